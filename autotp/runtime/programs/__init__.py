"""The programs of a module: sharded graphs, each for one mode, with or without gradients, and for one kind of inputs.

Input: a model, its first plan and the graph sharded by that plan; output: the graph that a call runs. All programs share
the module's parameters, which rest in the layouts of the first plan. A `program` is made when a call first needs it, on all
processes: `programs` captures the model in that mode for such inputs, plans it with the parameters in these layouts, and
shards the graph. `programmed` is the base class of modules that run programs, `attributes` has read-only copies of the
model's attributes, `rows` joins and splits the ranks' parts of a batch, `observed` calls the hooks of observed modules, and
`monitor` checks the numbers of every pass.
"""

from autotp.runtime.programs.attributes import UNCHANGED, FixedDict, as_it_was, defaults, is_data, methods, same
from autotp.runtime.programs.observed import show, unobserved
from autotp.runtime.programs.program import Key, Program, Unkept, blueprint, named_state
from autotp.runtime.programs.programmed import Programmed
from autotp.runtime.programs.programs import MOST, Programs
from autotp.runtime.programs.rows import Joined, own_inputs, own_rows

__all__ = [
    "MOST",
    "UNCHANGED",
    "FixedDict",
    "Joined",
    "Key",
    "Program",
    "Programmed",
    "Programs",
    "Unkept",
    "as_it_was",
    "blueprint",
    "defaults",
    "is_data",
    "methods",
    "named_state",
    "own_inputs",
    "own_rows",
    "same",
    "show",
    "unobserved",
]
