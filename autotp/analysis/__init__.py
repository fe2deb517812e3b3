"""Analysis of plans: what they do, why, and whether they are correct.

Input: plans, and the model where it is needed. Output: tables, graphs, traces and reports as data; nothing is printed here.
`inspection` and `explain` describe one plan, `memory` its memory use, `difference` compares two plans, `reprice` prices a
plan on another machine, and `collective` prices a single collective. `verify` and `verify_capture` compare a plan's run
with the model's: `verify_runs` runs both graphs, `compare` has the errors, and `conditioning` the effect of rounding.
`trace`, `graph_rows` and `drawing` show schedules and graphs, `sweep` plans many times, and `report` is one HTML page.
"""
