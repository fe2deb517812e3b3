"""Attributes of a model's modules besides parameters, buffers and submodules, as they were when the model was captured."""

from __future__ import annotations

import copy
import copyreg
import enum
import functools
import inspect
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autotp.errors import AutotpError

__all__ = ["UNCHANGED", "FixedDict", "as_it_was", "defaults", "is_data", "methods", "same"]

UNCHANGED = "the graph cannot follow a change. Change it on the model, and distribute the model again"
_DATA = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


def is_data(value: Any, depth: int = 4) -> bool:
    """Whether a value holds only numbers, text, functions and the like, as a configuration does; no tensors or modules.

    Args:
        value: any value.
        depth: how many levels of containers and objects are searched; deeper ones are not data.
    """
    if isinstance(value, (*_DATA, type)) or (inspect.isroutine(value) and not getattr(value, "__closure__", None)):
        return True
    held: Any = value if isinstance(value, (dict, list, tuple, set, frozenset)) else getattr(value, "__dict__", None)
    if not depth or held is None or callable(value) or isinstance(value, Tensor):
        return False
    return all(is_data(each, depth - 1) for each in (held.values() if hasattr(held, "values") else held))


def _members(kind: type) -> dict[str, Any]:
    """The attributes that a model's class has in addition to `nn.Module`'s, without those that begin with ``__``."""
    bases = [base for base in reversed(kind.__mro__) if base not in nn.Module.__mro__]
    return {name: value for base in bases for name, value in vars(base).items() if not name.startswith("__")}


@functools.cache
def defaults(kind: type) -> dict[str, Any]:
    """The data among a model's class attributes, which its instances have unless they set their own."""
    return {name: value for name, value in _members(kind).items() if not hasattr(value, "__get__") and is_data(value)}


@functools.cache
def methods(kind: type) -> frozenset[str]:
    """Names of the methods of a model's class, which its forward may call."""
    return frozenset(name for name, value in _members(kind).items() if inspect.isroutine(value))


class FixedDict(dict[Any, Any]):
    """A dict that raises an `AutotpError` on changes; setting a key to the object that it already holds is allowed.

    Args:
        given: the contents.
        why: the error's message.
    """

    def __init__(self, given: Mapping[Any, Any], why: str) -> None:
        super().__init__(given)
        self.why = why

    def __setitem__(self, name: Any, value: Any) -> None:
        if name not in self or self[name] is not value:
            self._refuse()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:  # when a module is copied
        return type(self)(copy.deepcopy(dict(self), memo), self.why)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise AutotpError(self.why)

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]


class _FixedData(FixedDict):
    """The read-only form of a dict among a module's data. Copies of it are plain dicts."""

    def __copy__(self) -> dict[Any, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> Any:
        return OrderedDict, (tuple(self.items()),)  # torch.load accepts this type by default


_CHANGING = (
    *("__setitem__", "__delitem__", "__iadd__", "__imul__", "__ior__", "__iand__", "__isub__", "__ixor__"),
    *("add", "append", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem", "remove", "reverse"),
    *("setdefault", "sort", "update", "difference_update", "intersection_update", "symmetric_difference_update"),
)


class _Quiet:
    """As the first base of a class, suppresses ``__init_subclass__`` of the other bases."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


@functools.cache
def _read_only(kind: Any) -> Any:
    """A subclass of ``kind`` whose instances refuse changes; copies of them are instances of ``kind``."""

    def refuse(_: Any, name: str, *__: Any) -> NoReturn:
        raise AutotpError(f"{kind.__name__}.{name} of a distributed module: {UNCHANGED}")

    def changed(*_: Any, **__: Any) -> NoReturn:
        raise AutotpError(f"a {kind.__name__} of a distributed module: {UNCHANGED}")

    def copied(self: Any, protocol: Any) -> Any:
        if not contains:
            return object.__new__, (kind,), vars(self).copy()
        how, args, *rest = kind.__reduce_ex__(self, max(2, int(protocol)))
        return (kind, args[1:], *rest) if how is copyreg.__newobj__ else (kind, args, *rest)  # type: ignore[attr-defined]

    contains = issubclass(kind, (dict, list, set))
    own: dict[str, Any] = {"__setattr__": refuse, "__delattr__": refuse, "__reduce_ex__": copied}
    own |= {name: changed for name in _CHANGING if contains and hasattr(kind, name)}
    return type(kind)(kind.__name__, (_Quiet, kind), own | {"__module__": kind.__module__})


def same(value: Any, was: Any) -> bool:
    """Whether a value equals the data ``was``, in its own type or in the read-only form that `as_it_was` returns."""
    kept = as_it_was(was, "")
    return type(value) in (type(was), type(kept)) and value in (was, kept)


def as_it_was(value: Any, name: str) -> Any:
    """A read-only form of data. Lists become tuples and sets become frozensets; copies of dicts and objects can be changed.

    Args:
        value: the data.
        name: of the attribute that holds the data, with its module's path, for error messages.
    """
    if type(value) is dict:
        return _FixedData({key: as_it_was(each, name) for key, each in value.items()}, f"{name}: {UNCHANGED}")
    if type(value) in (list, tuple):
        return tuple(as_it_was(each, name) for each in value)
    if type(value) is set:
        return frozenset(value)
    if isinstance(value, (*_DATA, tuple, frozenset)) or callable(value):
        return value
    try:
        made: Any = copy.copy(value)
        object.__setattr__(made, "__class__", _read_only(made.__class__))
        return made
    except Exception:  # noqa: BLE001 - of classes that cannot be subclassed or copied like this
        return _FixedData(value, f"{name}: {UNCHANGED}") if isinstance(value, dict) else copy.deepcopy(value)
