"""Where a tensor rests on a mesh, and how it gets from one layout to another.

Input: shapes, meshes and placements. Output: parts of tensors, and the collectives that lead from one layout to another
with the bytes that each of them moves. A layout is described by `layout` and as numbers by `codes`, for many at once;
`phases` finds the changes between layouts, `reshard` makes steps of those of two, `reshard_matrix` prices those of all.
"""
