"""Generators of the documentation's tables; each module is a command: ``python -m benchmarks.volumes``."""
