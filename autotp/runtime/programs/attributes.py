"""What the modules of a model have beside their parts, as it was when the model was captured."""

from __future__ import annotations

import copy
import enum
import functools
import inspect
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autotp.errors import AutotpError

__all__ = ["UNCHANGED", "FixedDict", "as_it_was", "defaults", "is_data", "methods", "same"]

UNCHANGED = "the graph cannot follow a change. Change it on the model, and distribute the model again"
_DATA = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


def is_data(value: Any, depth: int = 4) -> bool:
    """Whether it holds numbers, text, functions and the like alone, as a configuration does, and no tensors or modules."""
    if isinstance(value, (*_DATA, type)) or (inspect.isroutine(value) and not getattr(value, "__closure__", None)):
        return True
    held: Any = value if isinstance(value, (dict, list, tuple, set, frozenset)) else getattr(value, "__dict__", None)
    if not depth or held is None or callable(value) or isinstance(value, Tensor):
        return False
    return all(is_data(each, depth - 1) for each in (held.values() if hasattr(held, "values") else held))


def _members(kind: type) -> dict[str, Any]:
    """What a model's class adds to torch's module."""
    bases = [base for base in reversed(kind.__mro__) if base not in nn.Module.__mro__]
    return {name: value for base in bases for name, value in vars(base).items() if not name.startswith("__")}


@functools.cache
def defaults(kind: type) -> dict[str, Any]:
    """The data of a model's class, which its modules have unless they have their own."""
    return {name: value for name, value in _members(kind).items() if not hasattr(value, "__get__") and is_data(value)}


@functools.cache
def methods(kind: type) -> frozenset[str]:
    """The methods of a model's class, which its forward may call."""
    return frozenset(name for name, value in _members(kind).items() if inspect.isroutine(value))


class _Fixed:
    """A container that refuses changes; ``why`` says why. Copies of it can be changed."""

    _plain: Any
    why: str

    def __init__(self, given: Any, why: str) -> None:
        super().__init__(given)  # type: ignore[call-arg]
        self.why = why

    def __deepcopy__(self, memo: dict[int, Any]) -> _Fixed:  # as part of a module
        return type(self)(copy.deepcopy(self._plain(self), memo), self.why)

    def __reduce__(self) -> Any:
        return self._plain, (self._plain(self),)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise AutotpError(self.why)


class FixedDict(_Fixed, dict[Any, Any]):
    """A dict, which takes what it has already."""

    _plain = dict
    __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _Fixed._refuse  # type: ignore[assignment]

    def __setitem__(self, name: Any, value: Any) -> None:
        if name not in self or self[name] is not value:
            self._refuse()


class _FixedList(_Fixed, list[Any]):
    _plain = list
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _Fixed._refuse  # type: ignore[assignment]
    append = extend = insert = remove = pop = clear = sort = reverse = _Fixed._refuse  # type: ignore[assignment]


class _FixedSet(_Fixed, set[Any]):
    _plain = set
    __iand__ = __ior__ = __isub__ = __ixor__ = _Fixed._refuse  # type: ignore[assignment]
    add = discard = remove = pop = clear = update = _Fixed._refuse  # type: ignore[assignment]
    difference_update = intersection_update = symmetric_difference_update = _Fixed._refuse  # type: ignore[assignment]


@functools.cache
def _read_only(kind: Any) -> Any:
    def refuse(_: Any, name: str, *__: Any) -> NoReturn:
        raise AutotpError(f"{kind.__name__}.{name} of a distributed module: {UNCHANGED}")

    def copied(self: Any, _: Any) -> Any:
        return object.__new__, (kind,), vars(self).copy()

    own = {"__setattr__": refuse, "__delattr__": refuse, "__reduce_ex__": copied, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), own)


def same(value: Any, was: Any) -> bool:
    """Whether a value is data as it was, or as `as_it_was` gives it."""
    return getattr(value, "_plain", type(value)) is type(was) and bool(value == was)


def as_it_was(value: Any, name: str) -> Any:
    """Data that cannot be changed where it is read; copies of it can.

    Args:
        value: the data.
        name: of the attribute that has it, with its module's path, for errors.
    """
    why = f"{name}: {UNCHANGED}"
    if isinstance(value, dict):
        return FixedDict({key: as_it_was(each, name) for key, each in value.items()}, why)
    if isinstance(value, list):
        return _FixedList((as_it_was(each, name) for each in value), why)
    if isinstance(value, set):
        return _FixedSet(value, why)
    if isinstance(value, (*_DATA, tuple, frozenset)) or callable(value):
        return value
    made: Any = copy.copy(value)
    made.__class__ = _read_only(made.__class__)
    return made
