"""Reduces a case with a defect to the smallest one that reproduces it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from benchmarks.fuzz.case import Case, Leaf, Step, build, refs_of, renamed

__all__ = ["shrink"]

Reproduces = Callable[[Case], bool]


def shrink(case: Case, reproduces: Reproduces, tries: int = 400) -> Case:
    """The smallest case found in at most ``tries`` attempts that still reproduces the defect."""
    left, progress = tries, True
    while progress and left > 0:
        progress = False
        for simpler in _WAYS:
            found = True
            while found and left > 0:
                found = False
                for one in simpler(case):
                    left -= 1
                    if reproduces(one):
                        case, found, progress = one, True, True
                    if found or left <= 0:
                        break
    return case


def tidy(case: Case) -> Case:
    """Removes unused steps and leaves."""
    leaves = {leaf.name: leaf for leaf in case.leaves}
    used = set(case.outputs)
    for step in reversed(case.steps):
        if step.writes or step.result in used:
            used |= {name for a in (*step.args, *step.kwargs.values()) for name in refs_of(a)}
    used |= {leaf.same for name, leaf in leaves.items() if name in used and leaf.same}
    kept = tuple(step for step in case.steps if step.writes or step.result in used)
    return replace(case, leaves=tuple(leaf for leaf in case.leaves if leaf.name in used), steps=kept)


def _fewer_outputs(case: Case) -> Iterator[Case]:
    if len(case.outputs) > 1:
        for name in case.outputs:
            yield tidy(replace(case, outputs=(name,)))
        for name in case.outputs:
            yield tidy(replace(case, outputs=tuple(o for o in case.outputs if o != name)))


def _with(case: Case, gone: Step, names: dict[str, str]) -> Case:
    """The case without the step ``gone``; references are renamed by ``names``."""
    steps = [
        replace(s, args=renamed(s.args, names), kwargs={k: renamed(v, names) for k, v in s.kwargs.items()})
        for s in case.steps
        if s is not gone
    ]
    outputs = tuple(dict.fromkeys(names.get(name, name) for name in case.outputs))
    return tidy(replace(case, steps=tuple(steps), outputs=outputs))


def _without_steps(case: Case) -> Iterator[Case]:
    for step in reversed(case.steps):
        if step.writes:
            yield tidy(replace(case, steps=tuple(s for s in case.steps if s is not step)))
            continue
        for operand in dict.fromkeys(refs_of(list(step.args))):
            yield _with(case, step, {step.result: operand})
        others = tuple(name for name in case.outputs if name != step.result)
        if others:
            yield tidy(replace(case, outputs=others))


def _values_as_inputs(case: Case) -> Iterator[Case]:
    """Cases in which the result of a step is replaced by an input of the same shape and dtype."""
    if not case.steps:
        return
    shown = replace(case, outputs=tuple(s.result for s in case.steps if not s.writes))
    try:
        model, args = build(shown)
        found = model(*args)
    except Exception:  # noqa: BLE001 - its values are unknown
        return
    found = found if isinstance(found, tuple) else (found,)
    for name, value in reversed(list(zip(shown.outputs, found, strict=True))):
        step = next(s for s in case.steps if s.result == name)
        if not hasattr(value, "shape") or value.is_complex() or len(refs_of(list(step.args))) == 0:
            continue
        floating = value.dtype.is_floating_point
        kind = "real" if floating else "mask" if str(value.dtype) == "torch.bool" else "ids"
        high = 2 if kind != "ids" else int(value.max()) + 1 if value.numel() else 1
        seed = 1 + max((leaf.seed for leaf in case.leaves), default=0)
        leaf = Leaf(f"x{seed}", "input", tuple(value.shape), value.dtype, kind, seed, "plain", high, None, floating)
        yield _with(replace(case, leaves=(*case.leaves, leaf)), step, {name: leaf.name})


def _plainer_options(case: Case) -> Iterator[Case]:
    options = case.options
    plainer: list[dict[str, Any]] = [
        {"schedule": "none"},
        {"chunks": {}},
        {"panels": None},
        {"recompute": "none"},
        {"reshard_after_forward": None},
        {"constraints": ()},
        {"family": "auto"},
        {"inference": False},
        {"training": True},
        {"rests": {}},
        {"memory": None},
    ]
    for changes in plainer:
        if any(getattr(options, key) != value for key, value in changes.items()):
            yield case.where(**changes)
    if len(options.mesh) > 1:
        for axis in range(len(options.mesh)):

            def fewer(sizes: Any, axis: int = axis) -> Any:
                return tuple(sizes[:axis]) + tuple(sizes[axis + 1 :])

            served = {key: fewer(value) for key, value in options.served.items()}
            rests = {key: fewer(value) for key, value in options.rests.items()}
            yield case.where(mesh=fewer(options.mesh), served=served, rests=rests)
    for axis, size in enumerate(options.mesh):
        if size > 2:
            yield case.where(mesh=(*options.mesh[:axis], 2, *options.mesh[axis + 1 :]))


def _fewer_served(case: Case) -> Iterator[Case]:
    names = {step.result for step in case.steps}
    gone = {key: value for key, value in case.options.served.items() if key[0] in names}
    if len(gone) < len(case.options.served):
        yield case.where(served=gone)
    for key, value in case.options.served.items():
        for axis, factor in enumerate(value):
            if factor is not None:
                plainer = (*value[:axis], None, *value[axis + 1 :])
                yield case.where(served={**case.options.served, key: plainer})
    for key, value in case.options.rests.items():
        for axis, placement in enumerate(value):
            if placement != "R":
                yield case.where(rests={**case.options.rests, key: (*value[:axis], "R", *value[axis + 1 :])})


def _plainer_leaves(case: Case) -> Iterator[Case]:
    for i, leaf in enumerate(case.leaves):
        for changes in ({"form": "plain"}, {"same": None}, {"role": "input", "same": None}, {"trained": False}):
            plainer = replace(leaf, **changes)  # type: ignore[arg-type]
            if plainer != leaf and not any(o.same == leaf.name for o in case.leaves):
                yield replace(case, leaves=(*case.leaves[:i], plainer, *case.leaves[i + 1 :]))


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with a smaller size: everywhere, with or without its multiples, or in one dim of one leaf."""
    for size in sorted({n for leaf in case.leaves for n in leaf.shape if n > 1}, reverse=True):
        for less in dict.fromkeys((1, 2, size // 2, size - 1)):
            if 0 < less < size:
                yield _resized(case, size, less, products=False)
                yield _resized(case, size, less, products=True)
    for i, leaf in enumerate(case.leaves):
        for dim, size in enumerate(leaf.shape):
            for less in dict.fromkeys((1, 2, size // 2)):
                if 0 < less < size:
                    shape = (*leaf.shape[:dim], less, *leaf.shape[dim + 1 :])
                    yield replace(case, leaves=(*case.leaves[:i], replace(leaf, shape=shape), *case.leaves[i + 1 :]))


def _resized(case: Case, size: int, less: int, *, products: bool) -> Case:
    def change(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, list)):
            return value
        if isinstance(value, list):
            return [change(v) for v in value]
        if value == size:
            return less
        return value // size * less if products and value > size and value % size == 0 else value

    leaves = tuple(replace(leaf, shape=tuple(map(change, leaf.shape))) for leaf in case.leaves)
    steps = tuple(
        replace(step, args=tuple(change(a) if isinstance(a, list) else a for a in step.args)) for step in case.steps
    )
    return replace(case, leaves=leaves, steps=steps)


#: Ways to make a case simpler, in the order in which they are tried.
_WAYS = (
    _fewer_outputs,
    _plainer_options,
    _without_steps,
    _values_as_inputs,
    _fewer_served,
    _plainer_leaves,
    _smaller,
)
