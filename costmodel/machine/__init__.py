"""What a machine is made of: a `device`, and `links` of each level, for irregular machines with a `matrix` of bandwidths.

`groups` finds the links that the axes of a mesh use, and `local` guesses the device and the levels of this machine.
"""
