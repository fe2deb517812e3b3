"""What a plan costs: seconds and bytes, of one operator up to a whole step.

Input: a captured model (`model`), how a step runs its operators (`runs`), a mesh and a topology. Output: prices: of one
operator or reshard (`price`, `prices`), of a step by what may hide its communication (`step`), of a whole plan
(`priced`), of the memory that a device needs (`storages`, `transit`, `needs`, `gradients`, `returns`, `footprint`), of
what is recomputed (`recompute`), at least, of any plan (`floor`), of a change (`what_if`), and of products in panels
(`panels`). Each file uses only files that are listed before it.
"""
