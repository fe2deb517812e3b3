"""What a forward pass changes in Python, which no graph has: attributes of modules, and what is in them.

A model is captured in a call of it, which may set attributes. What every call leaves there anew is an output of the graph;
a tensor that carries something from call to call is a buffer, if it is not one already; of all else, a warning says that
the graph does not change it. The model is left as it was.
"""

from __future__ import annotations

import copy
import inspect
import random
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_structure

__all__ = [
    "Left", "buffered", "carried", "changed", "in_place", "in_python", "leaving", "placed", "plain", "renewed", "restored",
]  # fmt: skip

_DATA = (bool, int, float, complex, str, bytes)
#: What torch's modules have for themselves; recurrent ones have lists of their parameters.
_STANDARD = frozenset((*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"))
_HOLDERS = (list, deque, set, dict, OrderedDict, defaultdict)
#: The structure of one value.
_ALONE = str(tree_structure(0))


def in_python(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """What a forward pass may read and change that no graph has, and what is in it, now.

    Returns:
        Path of an attribute that is no parameter or module -> what it holds, inside lists, dicts and the like
        too, and which tensors an object has; modes and parts of modules, and other libraries' random numbers, under names
        with blanks.
    """
    _, words, place, *_ = np.random.get_state()
    found: dict[str, tuple[Any, ...]] = {
        "the random numbers of Python's random": (str(random.getstate()),),
        "the random numbers of numpy": (np.asarray(words).tobytes(), place),
    }
    for name, module in model.named_modules():
        found[f"the mode of {name or 'the model'}"] = (module.training,)
        found[f"the parameters of {name or 'the model'}"] = (*module._parameters, *module._parameters.values())
        found[f"the modules of {name or 'the model'}"] = (*module._modules, *module._modules.values())
        hooks = module._forward_pre_hooks.values()  # those of torch that compute a weight anew at each call
        weights = {getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in hooks}
        for key, value in (*module._buffers.items(), *vars(module).items()):
            if key not in _STANDARD and key not in weights:
                leaves, structure = tree_flatten(value)
                held = (len(leaf) if isinstance(leaf, set) else leaf for leaf in leaves)
                inside = (each for leaf in leaves for each in tree_leaves([*(_own(leaf) or {}).values()]))
                tensors = (each for each in inside if isinstance(each, Tensor))
                found[f"{name}.{key}".lstrip(".")] = (str(structure), *held, *tensors)
    return found


def changed(before: Mapping[str, tuple[Any, ...]], after: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Names of what `in_python` found changed, or new."""

    def same(one: Any, other: Any) -> bool:  # NaN is as it was
        return one is other or (type(one) is type(other) and isinstance(one, _DATA) and repr(one) == repr(other))

    def alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
        return len(one) == len(other) and all(map(same, one, other))

    return [name for name, held in after.items() if not alike(before.get(name, ()), held)]


@dataclass(frozen=True, slots=True)
class Left:
    """An attribute that a forward pass leaves on a module: a tensor, or a tree of tensors.

    Attributes:
        path: with the module's name.
        index: the module's place in ``model.modules()``.
    """

    path: str
    index: int

    @property
    def name(self) -> str:
        """Of the attribute."""
        return self.path.rpartition(".")[2]

    def of(self, modules: Sequence[nn.Module]) -> Any:
        """What is there now; None if it is not."""
        return vars(modules[self.index]).get(self.name)


class _Reads(TorchDispatchMode):
    """Notes which operators run, with what besides tensors, and which of some tensors they read."""

    def __init__(self, tensors: Iterable[Any] = ()) -> None:
        super().__init__()
        self.among, self.read, self.ran = {*map(id, tensors)}, set[int](), list[tuple[Any, str]]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        self.read |= self.among.intersection(map(id, leaves))
        self.ran.append((function, str([each for each in leaves if not isinstance(each, Tensor)])))
        return function(*args, **(kwargs or {}))


def placed(model: nn.Module, paths: Iterable[str]) -> tuple[Left, ...]:
    """The attributes among what a forward pass changes."""
    names = {name: index for index, (name, _) in enumerate(model.named_modules())}
    found = [Left(path, names.get(path.rpartition(".")[0], -1)) for path in paths]
    return tuple(left for left in found if left.index >= 0 and left.name.isidentifier())


def renewed(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], paths: Iterable[str]) -> tuple[Left, ...]:
    """Attributes in which every call leaves tensors of its own, whatever earlier ones have left there.

    The model is called twice on fake tensors: what the second call reads, or does not make anew, carries something from
    call to call, which no graph does. So does all of a model whose second call runs other operators than the first one.

    Args:
        model: it.
        args, kwargs: of a call.
        paths: of attributes that a call changes.
    """
    modules, found = list(model.modules()), placed(model, paths)
    if not found:
        return ()
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return mode.from_tensor(leaf.detach()).clone().requires_grad_(leaf.requires_grad)

    def leaves(left: Left) -> list[Any]:
        return tree_leaves(left.of(modules))

    try:
        with restored(model), mode, torch.enable_grad():
            for module in modules:  # what is written in place is a copy
                for held in (module._buffers, vars(module)):
                    held.update({name: own(value) for name, value in held.items() if isinstance(value, Tensor)})
            with _Reads() as before:
                model(*tree_map(own, tuple(args)), **tree_map(own, dict(kwargs)))
            first = {left: leaves(left) for left in found}
            with _Reads(leaf for each in first.values() for leaf in each if isinstance(leaf, Tensor)) as reads:
                made = model(*tree_map(own, tuple(args)), **tree_map(own, dict(kwargs)))
            second = {left: leaves(left) for left in found}
    except Exception:  # noqa: BLE001 - of what cannot be called twice nothing is known
        return ()

    kept = {*reads.read, *map(id, tree_leaves(made))}

    def anew(was: list[Any], now: list[Any]) -> bool:
        alone = all(isinstance(each, Tensor) and not isinstance(each, nn.Parameter) for each in now)
        return bool(now) and alone and not {*map(id, was)} & {*map(id, now), *kept}

    return tuple(left for left in found if before.ran == reads.ran and anew(first[left], second[left]))


@contextmanager
def leaving(model: nn.Module, left: Sequence[Left]) -> Iterator[None]:
    """While it lasts, a call of the model returns what it returns, and a tuple of what it leaves, if there is such."""
    modules = list(model.modules())

    def copies(_: nn.Module, __: Any, made: Any) -> Any:
        return made, tuple(tree_map(Tensor.clone, each.of(modules)) for each in left)

    handles = [model.register_forward_hook(copies)] if left else []
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The tensor attributes?")  # torch's advice is to make them buffers
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def in_place(model: nn.Module) -> Iterator[None]:
    """While it lasts, a buffer that a call replaces by a tensor like it is changed in place instead, at the call's end.

    ``torch.export`` follows such a change in the model itself, and not in its submodules.
    """
    modules, before = list(model.modules()), list[dict[str, Tensor | None]]()

    def begin(*_: Any) -> None:
        before[:] = [dict(module._buffers) for module in modules]

    def end(_: nn.Module, __: Any, made: Any) -> Any:
        found = [
            (module, name, old, now)
            for module, held in zip(modules, before, strict=True)
            for name, old in held.items()
            if (now := module._buffers.get(name)) is not old and old is not None and now is not None and alike(old, now)
        ]
        memory = {old.untyped_storage()._cdata for _, _, old, _ in found}

        def as_was(leaf: Any) -> Any:
            return leaf.clone() if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in memory else leaf

        made, new = tree_map(as_was, (made, [now for *_, now in found])) if found else (made, ())
        for (owner, name, old, __), value in zip(found, new, strict=True):
            setattr(owner, name, old.copy_(value))  # torch.export looks at what is set, and lets the last count
        return made

    handles = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether a buffer could have either."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def carried(model: nn.Module, changes: Mapping[str, Sequence[Any]]) -> list[str]:
    """Plain attributes with a tensor that a forward pass replaces by one like it: what buffers are for.

    Args:
        model: it.
        changes: path of an attribute -> what `in_python` found there after the pass.
    """
    alone = {path: held[1] for path, held in changes.items() if held[:1] == (_ALONE,) and isinstance(held[1], Tensor)}
    had = {path: (plain(model, path), now) for path, now in alone.items()}
    return [path for path, (was, now) in had.items() if was is not None and alike(was, now)]


def plain(model: nn.Module, path: str) -> Tensor | None:
    """A plain attribute's tensor, if it could be a buffer of that name."""
    owner, _, name = path.rpartition(".")
    module = dict(model.named_modules()).get(owner)
    if module is None or hasattr(type(module), name):
        return None
    held = vars(module).get(name)
    return held if isinstance(held, Tensor) and not isinstance(held, nn.Parameter) else None


@contextmanager
def buffered(model: nn.Module, paths: Iterable[str]) -> Iterator[None]:
    """While it lasts, plain attributes with tensors are buffers that no state dict holds, under all their names."""
    tensors = {id(plain(model, path)) for path in paths}
    moved = [
        (module, name, value)
        for module in (model.modules() if tensors else ())
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and id(value) in tensors
    ]
    try:
        for module, name, value in moved:
            del vars(module)[name]
            module.register_buffer(name, value, persistent=False)
        yield
    finally:
        for module, name, value in moved:
            if name in module._buffers:
                delattr(module, name)
            vars(module)[name] = value


def _own(value: Any) -> dict[str, Any] | None:
    """Attributes of an object that is no data, tensor, module, class or function."""
    other = isinstance(value, (*_DATA, Tensor, nn.Module, type, ModuleType)) or inspect.isroutine(value)
    found = None if other else getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else None


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Afterwards modules hold what they hold now, in lists, dicts and objects too: what they share stays shared."""
    held: dict[int, tuple[Any, Any]] = {}
    todo: list[tuple[Any, bool]] = [(vars(module), True) for module in model.modules()]
    while todo:
        value, objects = todo.pop()
        if type(value) not in _HOLDERS and not isinstance(value, tuple):
            value, objects = (_own(value) if objects else None), False
        if value is not None and id(value) not in held:
            if not isinstance(value, tuple):
                held[id(value)] = value, copy.copy(value)
            parts = value.values() if isinstance(value, dict) else value
            todo += [(part, objects) for part in parts if not isinstance(part, (*_DATA, Tensor))]

    def same(now: Any, was: Any) -> bool:
        if isinstance(now, set) or len(now) != len(was):
            return bool(len(now) == len(was) and now == was)
        pairs = zip(now, was, strict=True)
        return all(one is other and (not isinstance(now, dict) or now[one] is was[one]) for one, other in pairs)

    try:
        yield
    finally:
        for now, was in held.values():
            if not same(now, was):
                now.clear()
                (now.extend if hasattr(now, "extend") else now.update)(was)
