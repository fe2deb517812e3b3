"""Random models, planned, run, and compared with the original ones: ``python -m benchmarks.fuzz`` (see docs/fuzzing.md)."""
