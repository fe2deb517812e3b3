"""Machines to plan for, so slow that sharding pays even for the tiny models of tests.

On a fast device, the best plan for a tiny model replicates everything, so that nothing would be tested.
"""

import math

import autotp
from costmodel import Device

#: With ample memory.
SLOW = Device("slow", {"float64": 1e6, "float32": 1e6}, 1e12, 1e6, 0.0)

#: With 1 GB of memory, and faster, so that communication is worth considering.
SMALL = Device("slow", {"float32": 1e7}, 1e9, 1e7, 0.0)


def slow_machine(mesh: tuple[int, ...]) -> autotp.Topology:
    """A machine of slow devices for a mesh, with links on which communication costs almost nothing."""
    return autotp.Topology.flat(math.prod(mesh), bandwidth=1e12, latency=1e-9, device=SLOW)
