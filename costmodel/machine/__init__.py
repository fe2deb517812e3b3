"""The parts of a machine: a `device`, and the `links` of each level; for irregular ones, a `matrix` of bandwidths.

`groups` finds the links that the axes of a mesh use, and `local` guesses the device and the levels of this machine.
"""
