"""What the documentation's tables are made of; each module is a command: ``python -m benchmarks.volumes``."""
