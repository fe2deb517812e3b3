"""Damaged files and command lines: ``python -m benchmarks.fuzz --parsers`` (see docs/fuzzing.md).

`damage` draws the damage, `inputs` the valid inputs that are damaged, `judge` says what each parser makes of one, and
`campaign` runs case after case in children with limits.
"""

from benchmarks.fuzz.parsers.campaign import fuzz_parsers

__all__ = ["fuzz_parsers"]
