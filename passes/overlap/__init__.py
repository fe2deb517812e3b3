"""Turns a sharded graph into a forward and a backward graph whose collectives overlap with compute.

Input: a sharded graph, and a device's coordinates in the mesh. Output: a pair of scheduled graphs (`Halves`, then
`Overlapped`). `pipeline` runs the passes in this order: `channels_last`, `trace` (into the operators of `primitives`),
`partition`, `prune` (`drop_zeros`), `join_products`, `tidy`, `bucket`, `stage`, `launch`, `schedule`, `outline` and
`inplace`.
`prune` also derives the backward graph for calls in which some outputs have no gradient, `aliasing` says which nodes share
memory, and `memory` computes the peak memory of a schedule.
"""

from passes.overlap.pipeline import Halves, Overlapped, halves

__all__ = ["Halves", "Overlapped", "halves"]
