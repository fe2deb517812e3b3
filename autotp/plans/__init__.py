"""Plans, their files, and the options of planning.

Input: options of a user, such as the name of a family and constraints, or a file. Output: a `Plan`, an immutable record.
`plan_file` defines the JSON form of `plan`, whose rows are `planned_operator`; `folded` folds the rows of identical layers,
`schemes` names their strategies, `families` and `constraints` restrict the planner's choices, and `options` has all options
of planning.
"""
