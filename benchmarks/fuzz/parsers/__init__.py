"""Damaged files and command lines: ``python -m benchmarks.fuzz --parsers`` (see docs/fuzzing.md).

`inputs` has valid inputs, `damage` damages them, `judge` runs the parser of an input and classifies its outcome, and
`campaign` runs cases in child processes with limits.
"""

from benchmarks.fuzz.parsers.campaign import fuzz_parsers

__all__ = ["fuzz_parsers"]
