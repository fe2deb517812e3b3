"""Reading plans: what they do, why, and whether they are correct.

In come plans, with the model where it is needed. Out go tables, graphs, traces and reports as data; nothing is printed
here. `inspection` and `explain` read one plan, `difference` two, `reprice` one on another machine; `verify` and
`verify_capture` run it beside the model (`compare`); `trace`, `graph_rows` and `drawing` show schedules, `sweep` plans many
times, and `report` is one HTML page.
"""
