"""Regions of scheduled graphs, compiled by torch's Inductor.

Input: the graphs that `passes.overlap.outline` takes out of a scheduled graph; output: modules that run them. `compiler`
compiles one graph, `regions` all that are different.
"""

from autotp.runtime.inductor.regions import Region, Regions

__all__ = ["Region", "Regions"]
