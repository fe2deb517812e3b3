"""Compiles regions of scheduled graphs with torch's Inductor.

Input: the subgraphs that `passes.overlap.outline` takes out of a scheduled graph; output: modules that run them. `compiler`
compiles one graph, `regions` all distinct graphs once each.
"""

from autotp.runtime.inductor.regions import Region, Regions

__all__ = ["Region", "Regions"]
