"""Reading plans: what they do, why, and whether they are correct.

Input: plans, with the model where it is needed. Output: tables, graphs, traces and reports as data; nothing is printed
here. `inspection` and `explain` read one plan, `memory` its use of memory, `difference` two plans, `reprice` one on
another machine; `collective` prices a single collective. `verify` and `verify_capture` run a plan beside the model
(`verify_runs`) and `compare` the values, with as much tolerance as `conditioning` measures. `trace`, `graph_rows` and
`drawing` show schedules and graphs, `sweep` plans many times, and `report` is one HTML page.
"""
