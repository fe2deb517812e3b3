"""The cost model: topologies, collectives, compute, memory and overlap, as sympy expressions that are evaluated in bulk.

It does not import torch. A machine is a `topology`: a `device` and `links`, for irregular machines with a `matrix`;
`groups` finds the links that the axes of a mesh use, `local` guesses this machine's, and `fit` fits measured figures.
Costs are those of `collectives`, `compute` and `memory`, of a step by `overlap` and of a loop by `pipeline`, and of
`energy`; `bounds` and `volumes` are closed forms to compare with. `formula` compiles expressions, `units` reads and
writes quantities, `tables` and `toml_out` read and write TOML, `files` writes files, and `errors` are what users see.
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
