"""A model and a machine become an `autotp.Plan`.

Input: a captured model, a topology and options; output: the plan whose predicted step is shortest, or a `refusal`. For
every mesh, `search` ties identical operators (`folding`), lists what may be chosen (`structure`, `choices`), builds an
integer program (`assemble`, `candidates`), solves it (`ilp`), compares (`contest`), and writes the best (`describe`).
Where memory is short, `fitting` calls `squeeze`, `mixing` and `least_memory`, which use the `moments` of a step and their
`tables`; `least_step` adds chunks, with the `shares` of what limits a step.
"""

from autotp.planner.candidates import candidate_meshes
from autotp.planner.search import plan, plan_captured, plan_model, prepare

__all__ = ["candidate_meshes", "plan", "plan_captured", "plan_model", "prepare"]
