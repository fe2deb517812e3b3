"""A model and a machine become an `autotp.Plan`.

Input: a captured model, a topology and what the user asks for. Output: the plan whose predicted step is shortest.
`search` tries every mesh: `folding` finds operators that are alike, `structure` lists what may be chosen (`choices`),
`assemble` makes an integer program of it (one of `candidates`), `ilp` solves it, `contest` compares them. Where memory
is short (`fitting`), `squeeze` decides what is recomputed too (layer by layer: `mixing`), and `least_memory` finds
what fits at all, both by the `moments` of a step (`tables`); `least_step` adds chunks (all three weigh what limits by
`shares`), and `describe` writes the plan. Where nothing fits, `refusal` says why, and what would.
"""

from autotp.planner.search import candidate_meshes, plan, plan_captured, plan_model, prepare

__all__ = ["candidate_meshes", "plan", "plan_captured", "plan_model", "prepare"]
