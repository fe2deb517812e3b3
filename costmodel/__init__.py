"""The cost model: topologies, collectives, compute, memory and overlap, as sympy expressions that are evaluated in bulk.

It does not import torch.
"""

from . import collectives, compute, memory, units
from .collectives import LIBRARIES, bytes_moved
from .compute import ROOFLINE
from .compute import seconds as compute_seconds
from .device import DTYPES, KINDS
from .errors import TopologyError, UnitError
from .formula import Number, compile_formula
from .links import COLLECTIVES, Measured, Stage
from .memory import OPTIMIZERS, state_bytes
from .topology import Device, Level, Link, Topology
from .units import format_quantity, parse_quantity

__all__ = [
    "COLLECTIVES",
    "DTYPES",
    "KINDS",
    "LIBRARIES",
    "OPTIMIZERS",
    "ROOFLINE",
    "Device",
    "Level",
    "Link",
    "Measured",
    "Number",
    "Stage",
    "Topology",
    "TopologyError",
    "UnitError",
    "bytes_moved",
    "collectives",
    "compile_formula",
    "compute",
    "compute_seconds",
    "format_quantity",
    "memory",
    "parse_quantity",
    "state_bytes",
    "units",
]
