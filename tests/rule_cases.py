"""Arguments of networks, and of operators along dims, at indices, or on complex numbers, as the fuzzer makes them.

See `test_rules.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from benchmarks.fuzz.dims import DIMS
from benchmarks.fuzz.draws import Operand
from benchmarks.fuzz.indices import INDICES
from benchmarks.fuzz.networks import NETWORKS

__all__ = ["CASES"]


@dataclass(frozen=True)
class Drawn:
    """The fuzzer's source of choices, implemented by hypothesis's ``draw``."""

    draw: Any

    def pick(self, options):
        # Largest rank first: the fixed instance takes the first option, and then has dims to shard.
        chosen = reversed(options) if isinstance(options, range) else options
        return self.draw(st.sampled_from(list(chosen)))

    def size(self):
        return self.pick([1, 2, 3, 4, 5, 6, 8])


def made(argument):
    if isinstance(argument, list):
        return [made(a) for a in argument]
    return argument.make() if isinstance(argument, Operand) else argument


def case(builder):
    def build(draw):
        built = builder(Drawn(draw))
        args, kwargs = built if isinstance(built, tuple) else (built, {})
        return made(args), kwargs

    return build


CASES = {name: case(builder) for name, builder in {**DIMS, **INDICES, **NETWORKS}.items()}
