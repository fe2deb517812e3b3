"""The planner: finds an `autotp.Plan` for a model and a machine.

Input: a captured model, a topology and options; output: the plan with the shortest predicted step, or a `refusal`. `search`
ties identical operators (`folding`). For every mesh, it lists the choices (`structure`, `choices`), builds an integer
program (`assemble`, `candidates`) and solves it (`ilp`); `contest` compares the meshes, `describe` writes the best plan.
Where memory is short, `fitting` calls `squeeze` and `mixing`, which use the bytes that plans hold (`memory`), and `exact`,
for small programs; `ways` is the order of all searches. `least_step` adds chunks, with the `shares` of what limits a step.
"""

from autotp.planner.candidates import candidate_meshes
from autotp.planner.search import plan, plan_captured, plan_model, prepare

__all__ = ["candidate_meshes", "plan", "plan_captured", "plan_model", "prepare"]
