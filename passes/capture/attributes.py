"""Finds the changes to Python state in a forward pass, which a graph lacks: attributes of modules and their contents.

Capturing a model calls it, which may set attributes. Tensors that every call creates anew become outputs of the graph; a
tensor that carries data from call to call becomes a buffer, if it is not one already; for all other changes, a warning says
that the graph does not make them. The model is restored afterwards.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from passes.capture.builder import CaptureError
from passes.torch_internals import (
    FakeTensorMode,
    TorchDispatchMode,
    own_attributes,
    storage_id,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_structure,
    without_values,
)

__all__ = [
    *("Left", "buffered", "carried", "changed", "faked", "in_place", "in_python", "of_other_kinds"),
    *("placed", "plain", "restored"),
]

_DATA = (bool, int, float, complex, str, bytes)
_HOLDERS = (list, deque, set, dict, OrderedDict, defaultdict)


def in_python(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """A snapshot of the Python state that a forward pass may read and change, and that a graph lacks.

    Returns:
        Path of an attribute that is not a parameter or module -> its contents, including those of nested lists, dicts and
        the like, and the tensors held by objects. Training modes, parameters and submodules of modules, and the random
        states of Python and numpy, are listed under names with spaces.
    """
    _, words, place, *_ = np.random.get_state()
    found: dict[str, tuple[Any, ...]] = {
        "the random numbers of Python's random": (str(random.getstate()),),
        "the random numbers of numpy": (np.asarray(words).tobytes(), place),
    }
    for name, module in model.named_modules():
        found[f"the mode of {name or 'the model'}"] = (module.training,)
        found[f"the parameters of {name or 'the model'}"] = (*module._parameters, *module._parameters.values())
        trained = [each is not None and each.requires_grad for each in module._parameters.values()]
        found[f"which parameters of {name or 'the model'} are frozen"] = (*trained,)
        found[f"the modules of {name or 'the model'}"] = (*module._modules, *module._modules.values())
        torchs = own_attributes(module)
        for key, value in (*module._buffers.items(), *vars(module).items()):
            if key not in torchs:
                leaves, structure = tree_flatten(value)
                held = (len(leaf) if isinstance(leaf, set) else leaf for leaf in leaves)
                inside = (each for leaf in leaves for each in tree_leaves([*(_own(leaf) or {}).values()]))
                tensors = (each for each in inside if isinstance(each, Tensor))
                found[f"{name}.{key}".lstrip(".")] = (str(structure), *held, *tensors)
    return found


def changed(before: Mapping[str, tuple[Any, ...]], after: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Names of the entries of `in_python` that changed or are new."""

    def same(one: Any, other: Any) -> bool:  # by repr, as NaN differs from itself
        return one is other or (type(one) is type(other) and isinstance(one, _DATA) and repr(one) == repr(other))

    def alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
        return len(one) == len(other) and all(map(same, one, other))

    return [name for name, held in after.items() if not alike(before.get(name, ()), held)]


@dataclass(frozen=True, slots=True)
class Left:
    """An attribute that a forward pass sets on a module: a tensor, or a tree of tensors.

    Attributes:
        path: the attribute's dotted path, including the module's.
        index: the module's index in ``model.modules()``.
    """

    path: str
    index: int

    @property
    def name(self) -> str:
        """The attribute's name."""
        return self.path.rpartition(".")[2]

    def of(self, modules: Sequence[nn.Module]) -> Any:
        """The attribute's present value; None if it does not exist."""
        return vars(modules[self.index]).get(self.name)

    def tensor(self, modules: Sequence[nn.Module]) -> Tensor | None:
        """The tensor that the attribute or buffer of this name holds now; None if it holds no tensor."""
        held = modules[self.index]._buffers.get(self.name, self.of(modules))
        return held if isinstance(held, Tensor) and not isinstance(held, nn.Parameter) else None


class _Flow(TorchDispatchMode):
    """Records which results are computed from the given tensors.

    Attributes:
        reached: id -> the tensor, for the given tensors and all such results, which it keeps alive.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.reached: dict[int, Any] = {id(tensor): tensor for tensor in tensors}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if any(id(leaf) in self.reached for leaf in tree_leaves((args, kwargs))):
            self.reached |= {id(leaf): leaf for leaf in tree_leaves(made)}
        return made


def placed(model: nn.Module, paths: Iterable[str]) -> tuple[Left, ...]:
    """The attributes of modules among the paths that a forward pass changes."""
    names = {name: index for index, (name, _) in enumerate(model.named_modules())}
    found = [Left(path, names.get(path.rpartition(".")[0], -1)) for path in paths]
    return tuple(left for left in found if left.index >= 0 and left.name.isidentifier())


@contextmanager
def faked(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Callable[[], Any]]:
    """Context manager that yields a function that calls the model on fake tensors; the model is restored on exit."""

    def own(x: Any) -> Any:  # not made from the values: stand-in modules have tensors without memory
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)

    parameters: dict[int, nn.Parameter] = {}
    with without_values(), restored(model), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        for each in model.parameters():
            parameters[id(each)] = nn.Parameter(own(each.detach()), each.requires_grad)
        for module in model.modules():  # so that in-place operators write to copies
            module._parameters.update({name: parameters.get(id(each)) for name, each in module._parameters.items()})
            for held in (module._buffers, vars(module)):
                held.update({name: own(value) for name, value in held.items() if isinstance(value, Tensor)})
        yield lambda: model(*tree_map(own, tuple(args)), **tree_map(own, dict(kwargs)))


def of_other_kinds(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], changes: Mapping[str, Sequence[Any]]
) -> list[str]:
    """Paths of buffers and attributes that a call sets to a tensor of another shape, dtype or device: no graph keeps these.

    Raises:
        CaptureError: one is computed from its previous value, so the next call depends on it.
    """
    modules = list(model.modules())
    had = [(left, left.tensor(modules)) for left in placed(model, _alone(changes))]
    found = [left for left, was in had if was is not None and not alike(was, changes[left.path][1])]
    if not found:
        return []
    carried = list[Left]()
    try:
        with faked(model, args, kwargs) as call:
            with _Flow(was for left in found if (was := left.tensor(modules)) is not None) as flow:
                call()
            carried = [left for left in found if id(left.tensor(modules)) in flow.reached]
    except Exception:  # noqa: BLE001, S110 - nothing is known of a model that fails on fake tensors
        pass
    if carried:
        left = carried[0]
        was, now = left.tensor(modules), changes[left.path][1]
        assert was is not None
        raise CaptureError(
            f"{type(model).__name__}: forward makes {left.path} {now.dtype} of shape {tuple(now.shape)}, from what was "
            f"there, {was.dtype} of shape {tuple(was.shape)}, so the next call would have another graph; begin with a "
            "tensor of that dtype and shape"
        )
    return [left.path for left in found]


@contextmanager
def in_place(model: nn.Module) -> Iterator[None]:
    """Context manager under which a buffer that a call replaces by a tensor like it is changed in place, at the call's end.

    ``torch.export`` follows the replacement of a buffer in the model itself, but not in its submodules.
    """
    modules, before = list(model.modules()), list[dict[str, Tensor | None]]()

    def begin(*_: Any) -> None:
        before[:] = [dict(module._buffers) for module in modules]

    def end(_: nn.Module, __: Any, made: Any) -> Any:
        found = [
            (module, name, old, now)
            for module, held in zip(modules, before, strict=True)
            for name, old in held.items()
            if (now := module._buffers.get(name)) is not old and old is not None and now is not None
        ]
        _require_apart(model, [each for each in found if alike(*each[2:])])
        memory = {storage_id(old) for _, _, old, _ in found}

        def as_was(leaf: Any) -> Any:
            return leaf.clone() if isinstance(leaf, Tensor) and storage_id(leaf) in memory else leaf

        made, new = tree_map(as_was, (made, [now for *_, now in found])) if found else (made, ())
        for (owner, name, old, __), value in zip(found, new, strict=True):
            # torch.export uses the last value that is set, and needs an operator that produces it
            setattr(owner, name, old.copy_(value if alike(old, value) else old.clone()))
        return made

    handles = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _require_apart(model: nn.Module, replaced: Sequence[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    """Refuses replaced buffers for which an in-place change would not be equivalent.

    Args:
        model: in its state after a call.
        replaced: a buffer's module and name, its old tensor and its new one.

    Raises:
        CaptureError: a new buffer shares memory with other state, an old one has another name that keeps it, or its
            elements share memory.
    """
    own = {(id(module), name) for module, name, *_ in replaced}
    state = [
        (f"{path}.{name}".lstrip("."), tensor)
        for path, module in (model.named_modules() if replaced else ())
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and (id(module), name) not in own
    ]
    for _, name, old, now in replaced:
        memory, why = storage_id(now), ""
        if any(stride == 0 and size > 1 for stride, size in zip(old.stride(), old.shape, strict=True)):
            why = "whose elements share memory: begin with a clone"
        for other, tensor in state:
            if tensor is old:
                why = f"and {other} is the same tensor, which stays as it was: give each its own"
            elif storage_id(tensor) == memory:
                why = f"and it lies in the memory of {other} from then on: give it a clone"
        if why:
            raise CaptureError(f"{type(model).__name__}: forward replaces buffer {name}, {why}")


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and device."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def carried(model: nn.Module, changes: Mapping[str, Sequence[Any]]) -> list[str]:
    """Paths of plain attributes whose tensor a forward pass replaces by one of equal shape, dtype and device.

    Args:
        model: in its state before the pass.
        changes: path of an attribute -> its entry of `in_python` after the pass.
    """
    had = {path: (plain(model, path), now) for path, now in _alone(changes).items()}
    return [path for path, (was, now) in had.items() if was is not None and alike(was, now)]


def _alone(changes: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
    """Path -> tensor, of the changed attributes that hold exactly one tensor and nothing else."""
    alone = (str(tree_structure(0)),)
    return {path: held[1] for path, held in changes.items() if held[:1] == alone and isinstance(held[1], Tensor)}


def plain(model: nn.Module, path: str) -> Tensor | None:
    """The tensor of a plain attribute that could be a buffer of that name; else None."""
    owner, _, name = path.rpartition(".")
    module = dict(model.named_modules()).get(owner)
    if module is None or hasattr(type(module), name):
        return None
    held = vars(module).get(name)
    return held if isinstance(held, Tensor) and not isinstance(held, nn.Parameter) else None


@contextmanager
def buffered(model: nn.Module, paths: Iterable[str]) -> Iterator[None]:
    """Context manager under which plain tensor attributes, under all their names, are non-persistent buffers."""
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
    """The attributes of an object; None for data, tensors, modules, classes and functions."""
    other = isinstance(value, (*_DATA, Tensor, nn.Module, type, ModuleType)) or inspect.isroutine(value)
    found = None if other else getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else None


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Context manager that restores what modules hold, also in lists, dicts and objects; shared objects stay shared."""
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
