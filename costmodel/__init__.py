"""The cost model: topologies, collectives, compute, memory and overlap, as sympy expressions that are evaluated in bulk.

It does not import torch. A machine is a `topology`, made of the parts in `machine`; `toml_out` writes it to a file. Costs
are those of `collectives`, `compute`, `memory` and `energy`, of a step (`overlap`) and of a loop (`pipeline`). `fit` fits
figures to measurements; `bounds` and `volumes` are closed forms for comparison. `formula` compiles the expressions of all
of them, `text` reads and writes quantities and files, and `errors` are the errors that users see.
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
