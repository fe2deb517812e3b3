"""The cost model: topologies, collectives, compute, memory and overlap, as sympy expressions that are evaluated in bulk.

It does not import torch. A machine is a `topology`, made of what stands in `machine`, and `toml_out` writes one. Costs
are those of `collectives`, `compute` and `memory`, of a step by `overlap` and of a loop by `pipeline`, and of `energy`;
`fit` fits measured figures; `bounds` and `volumes` are closed forms to compare with. Below them, `formula` compiles
expressions, `text` reads and writes quantities and files, and `errors` are what users see.
"""

from . import collectives, compute, memory
from .collectives import LIBRARIES, bytes_moved
from .compute import ROOFLINE
from .compute import seconds as compute_seconds
from .errors import TopologyError, UnitError
from .formula import Number, compile_formula
from .machine.device import DTYPES, KINDS
from .machine.links import COLLECTIVES, Measured, Stage
from .memory import OPTIMIZERS, state_bytes
from .text import units
from .text.units import format_quantity, parse_quantity
from .topology import Device, Level, Link, Topology

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
