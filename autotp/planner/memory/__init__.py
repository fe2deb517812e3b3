"""The memory that all plans on a mesh hold, as integer programs.

Input: the integer program of a mesh (`autotp.planner.assemble`); output: the bytes of all its choices at a moment of a step
(`moments`), as estimates or as lower bounds, and the choice that holds the least (`least_memory`). `lives` finds when every
tensor is held, the same for all meshes; `tables` lists its bytes at one moment, by strategy and layout.
"""
