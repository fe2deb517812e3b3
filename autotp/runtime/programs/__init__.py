"""The programs of a module: what its calls run, each for one mode, for gradients or none, and for one kind of inputs.

Input: a model, its first plan and the graph sharded by that; output: what a call runs. All programs share the module's
parameters, which rest as the first plan says. A `program` is made when a call first needs it, on all processes alike:
`programs` captures the model in that mode for such inputs, plans it with the parameters where they rest, and shards the
graph; `programmed` is what modules offer of it, `attributes` what they have of the model's data, `rows` are the ranks'
parts of a batch, `observed` calls their hooks, and `monitor` checks the numbers of every pass.
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
