"""What is decided, and how it is written.

Input: a user's words: the name of a family, constraints, a file. Output: a `Plan`, an immutable record. `plan_file`
reads and writes the JSON form of `plan`, whose rows are `planned_operator`; `folded` folds those of like layers,
`schemes` names them, `families` and `constraints` restrict what the planner may choose, and `options` is all that it is
asked for.
"""
