"""Architectures of several libraries: planned, simulated, and compared with one device."""
