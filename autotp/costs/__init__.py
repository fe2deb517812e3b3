"""The costs of a plan, in seconds and bytes: of one operator up to a whole step.

Input: a captured model (`model`), how a step runs its operators (`runs`), a mesh and a topology. Output: the costs of one
operator or reshard (`price`, `prices`), lower bounds on those of any plan (`floor`), the costs of a step by what may hide
its communication (`step`), of a whole plan (`priced`), the memory of a device (`storages`, `transit`, `needs`,
`gradients`, `returns`, `footprint`; with many identical layers: `layers`), what is recomputed (`recompute`), the effect of
a change (`what_if`), and the panels of products (`panels`). Each file uses only files that are listed before it.
"""
