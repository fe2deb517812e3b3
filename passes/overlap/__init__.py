"""A sharded graph becomes a forward and a backward graph whose collectives run while something is computed.

Input: a sharded graph with a device's place in the mesh. Output: a pair of scheduled graphs (`Halves`, then
`Overlapped`). `pipeline` runs the passes in this order: `channels_last`, `trace` (into the operators of `primitives`),
`partition`, `prune` (`drop_zeros`), `join_products`, `tidy`, `bucket`, `stage`, `launch`, `schedule`, `outline` and
`inplace`.
`prune` also shortens a backward graph when some outputs have no gradient, `aliasing` says which nodes share memory, and
`memory` counts what a schedule holds.
"""

from passes.overlap.pipeline import Halves, Overlapped, halves

__all__ = ["Halves", "Overlapped", "halves"]
