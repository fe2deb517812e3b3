"""Random models, planned and run beside the plain ones: ``python -m benchmarks.fuzz`` (see docs/fuzzing.md)."""
