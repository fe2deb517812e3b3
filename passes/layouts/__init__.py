"""Layouts of tensors on a mesh, and the collectives that convert one layout to another.

Input: shapes, meshes and placements. Output: parts of tensors, and the collectives between layouts, with the size and the
cost of each. `layout` describes a layout, and `codes` many layouts at once, as integers. `phases` finds the changes between
layouts; `reshard` converts those of one pair of layouts to steps, and `reshard_matrix` computes the costs for all pairs.
"""
