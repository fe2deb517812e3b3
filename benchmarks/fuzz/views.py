"""Views around operands: to bring a value into a shape, or to change its memory format but not its shape."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

from benchmarks.fuzz.case import Ref

__all__ = ["adapted", "disguised"]

Shape = tuple[int, ...]
Emit = Callable[..., Ref]


def adapted(emit: Emit, rng: random.Random, value: Ref, have: Shape, want: Shape) -> Ref | None:
    """Brings ``value`` into the shape ``want`` by views and reductions (sum, amax); None if that is not possible."""
    if have == want:
        return value
    if sorted(have) == sorted(want) and len(have) <= 5:
        order = next(p for p in itertools.permutations(range(len(have))) if tuple(have[i] for i in p) == want)
        return emit(".permute", value, list(order))
    if math.prod(have) == math.prod(want) and 0 not in have:
        return emit(".reshape", value, list(want))
    if len(have) > len(want):
        dim = rng.randrange(len(have))
        if have[dim] == 0:
            return None
        rest = have[:dim] + have[dim + 1 :]
        if len(rest) == len(want) and not _sliced(rest, want):
            return None
        how = rng.choice(["select", "sum", "amax"])
        part = emit(".select", value, dim, rng.randrange(have[dim])) if how == "select" else emit(f".{how}", value, dim)
        return adapted(emit, rng, part, rest, want)
    if len(have) < len(want):
        tail = want[len(want) - len(have) :]
        if not _sliced(have, tail):
            return None
        return emit(".expand", adapted(emit, rng, value, have, _narrowed(have, tail)) or value, list(want))
    if not _sliced(have, want):
        return None
    for dim, (a, b) in enumerate(zip(have, want, strict=True)):
        if a > b:
            step = rng.choice([1, 2]) if a >= 2 * b and b else 1
            start = rng.randint(0, a - step * b)
            stop = min(a, start + step * b)
            value = emit("[]", value, (*[slice(None)] * dim, slice(start, stop, step if step > 1 else None)))
    narrowed = _narrowed(have, want)
    return value if narrowed == want else emit(".expand", value, list(want))


def _sliced(have: Shape, want: Shape) -> bool:
    """Whether slices and broadcasting suffice."""
    return len(have) == len(want) and all(a >= b or a == 1 for a, b in zip(have, want, strict=True))


def _narrowed(have: Shape, want: Shape) -> Shape:
    return tuple(min(a, b) for a, b in zip(have, want, strict=True))


def disguised(emit: Emit, rng: random.Random, value: Ref, shape: Shape, *, always: bool = False) -> Ref:
    """The same values in another memory format, or unchanged; with ``always``, possibly a view of another shape."""
    if not shape or (not always and rng.random() < 0.6):
        return value
    last = len(shape) - 1
    a, b = rng.randrange(len(shape)), rng.randrange(len(shape))
    if always and rng.random() < 0.6:
        kind = rng.choice(["transpose", "unsqueeze", "slice", "flatten", "flip", "expand"])
        if kind == "transpose":
            return emit(".transpose", value, a, b)
        if kind == "unsqueeze":
            return emit(".unsqueeze", value, a)
        if kind == "slice":
            return emit("[]", value, (*[slice(None)] * a, slice(0, max(1, shape[a] // 2))))
        if kind == "flatten":
            return emit(".flatten", value, min(a, b), max(a, b))
        if kind == "flip":
            return emit(".flip", value, [a])
        return emit(".expand", value, [rng.choice([2, 3]), *shape])
    kind = rng.choice(["strides", "strides", "twice", "one", "copy"])
    if kind == "strides":
        return emit(".transpose", emit(".contiguous", emit(".transpose", value, a, last)), a, last)
    if kind == "twice":
        pairs = emit("torch.stack", [value, value], len(shape))
        return emit("[]", pairs, (..., rng.choice([0, 1])))
    if kind == "one":
        return emit(".squeeze", emit(".unsqueeze", value, a), a)
    return emit(".clone", value)
