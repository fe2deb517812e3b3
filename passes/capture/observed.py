"""Makes more values outputs of the graph: the inputs and outputs of observed modules, and attributes that the model sets.

``torch.export`` calls forward hooks, once and on fake tensors. While a model is captured, hooks of this file copy the
inputs and outputs of observed modules at that moment, and, at the end of the forward pass, the attributes that it has set.
Hooks of the model itself return the copies after the model's own result. Once the graph is functional, the copies are
folded into their sources, so they cost nothing.
"""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from costmodel.errors import AutotpError, shown
from passes.capture.attributes import Left, faked, placed
from passes.capture.builder import CaptureError
from passes.torch_internals import (
    TorchDispatchMode,
    TreeSpec,
    forward_hooks,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

__all__ = ["Moment", "Place", "apart", "copied", "foreign_hooks", "leaving", "matching", "numbered", "observing", "renewed"]

#: Types of values other than tensors that hooks can receive.
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


class Place(NamedTuple):
    """Stands for a tensor: its index among the copied tensors; after `numbered`, among the graph's outputs."""

    number: int


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of a forward pass at which hooks of an observed module run.

    Attributes:
        module: the module's name.
        index: its index in ``model.modules()``.
        before: True for forward pre-hooks, False for forward hooks.
        spec: the tree of the hooks' arguments: ``(args, kwargs)``, or ``(args, kwargs, output)`` for forward hooks.
        leaves: the leaves of that tree: a `Place` for a tensor, and any other value itself.
    """

    module: str
    index: int
    before: bool
    spec: TreeSpec
    leaves: tuple[Any, ...]

    def values(self, outputs: Sequence[Any]) -> Any:
        """The module's positional and keyword arguments and, for forward hooks, its output.

        Args:
            outputs: the graph's outputs.
        """
        return tree_unflatten([outputs[x.number] if isinstance(x, Place) else x for x in self.leaves], self.spec)

    def tensors(self, outputs: Sequence[Any]) -> list[Tensor]:
        """The tensors among `values`."""
        return [outputs[leaf.number] for leaf in self.leaves if isinstance(leaf, Place)]


def foreign_hooks(module: nn.Module, known: Container[str]) -> list[int]:
    """The ids of a module's forward hooks and forward pre-hooks that were not defined in the given packages.

    Args:
        module: the module; its submodules are not searched.
        known: names of top-level packages.
    """
    hooks = [item for before in (False, True) for item in forward_hooks(module, before=before).items()]
    places = ((number, str(getattr(hook, "__module__", None) or type(hook).__module__)) for number, hook in hooks)
    return [number for number, place in places if place.partition(".")[0] not in known]


def matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Name -> submodule, for the submodules of a model whose names match a pattern.

    Args:
        model: the model.
        patterns: shell-style, matched part by part: ``blocks.*`` matches the elements of ``blocks``, but not their
            submodules.

    Raises:
        AutotpError: ``patterns`` is not a list of strings, or a pattern matches no name (the message suggests names).
    """
    listed = isinstance(patterns, Sequence) and not isinstance(patterns, str)
    if not listed or not all(isinstance(pattern, str) for pattern in patterns):
        raise AutotpError(f"observe={shown(patterns)}: give a list of modules' names, such as ['blocks.*']")
    names = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matched = {name: module for name, module in names.items() if _matches(name, pattern)}
        if not matched:
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are {', '.join(names) or 'none'}"
            raise AutotpError(f"observe: {shown(pattern)} names no module inside {type(model).__name__}; {hint}")
        found |= matched
    return found


def _matches(name: str, pattern: str) -> bool:
    mine, asked = name.split("."), pattern.split(".")
    return len(mine) == len(asked) and all(map(fnmatchcase, mine, asked))


@contextmanager
def observing(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[list[Moment]]:
    """Context manager under which a call of the model returns its result and a tuple of copied tensors.

    Yields the list of moments, which the call fills.

    Args:
        model: the model; its result stays as it is if ``modules`` is empty.
        modules: name -> observed module.

    Raises:
        CaptureError: in the call, if a module's argument or result is of a type that hooks cannot receive.
    """
    moments: list[Moment] = []
    copies: list[Tensor] = []
    if not modules:
        yield moments
        return
    indices = {id(module): index for index, module in enumerate(model.modules())}

    def look(name: str, index: int, _: nn.Module, *values: Any) -> None:  # export may call a proxy of a module
        leaves, spec = tree_flatten(values)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[place] = Place(len(copies))
                copies.append(leaf.clone())
            elif not isinstance(leaf, _PLAIN):
                raise CaptureError(
                    f"observe: module {name!r} is given or returns a {type(leaf).__name__}, which hooks of a distributed "
                    "module cannot be shown: only tensors, numbers, text, and lists, tuples and dicts of these"
                )
        moments.append(Moment(name, index, len(values) == 2, spec, tuple(leaves)))

    def begin(*_: Any) -> None:
        moments.clear()
        copies.clear()

    handles = [model.register_forward_pre_hook(begin)]
    handles.append(model.register_forward_hook(lambda _, __, made: (made, tuple(copies))))
    for name, module in {id(m): (n, m) for n, m in modules.items()}.values():
        for register in (module.register_forward_pre_hook, module.register_forward_hook):
            handles.append(register(functools.partial(look, name, indices[id(module)]), with_kwargs=True))  # type: ignore[arg-type]
    try:
        yield moments
    finally:
        for handle in handles:
            handle.remove()


class _Reads(TorchDispatchMode):
    """Records which operators run, with their non-tensor arguments, and which of the given tensors they read."""

    def __init__(self, tensors: Iterable[Any] = ()) -> None:
        super().__init__()
        self.among, self.read, self.ran = {*map(id, tensors)}, set[int](), list[tuple[Any, str]]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        self.read |= self.among.intersection(map(id, leaves))
        if function.namespace != "prim":  # prim operators query a device, depending on what is known of the tensor
            self.ran.append((function, str([each for each in leaves if not isinstance(each, Tensor)])))
        return function(*args, **(kwargs or {}))


def renewed(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], paths: Iterable[str]) -> tuple[Left, ...]:
    """The attributes that every call sets to new tensors, independently of the values that earlier calls have left.

    Calls the model twice on fake tensors. An attribute whose first value the second call reads, returns or keeps carries
    data from call to call, which a graph cannot do. If the two calls run different operators, no attribute qualifies.

    Args:
        model: the model.
        args, kwargs: arguments of a call.
        paths: paths of attributes that a call changes.
    """
    modules, found = list(model.modules()), placed(model, paths)
    if not found:
        return ()

    def leaves(left: Left) -> list[Any]:
        return tree_leaves(left.of(modules))

    try:
        with faked(model, args, kwargs) as call:
            with _Reads() as before:
                call()
            first = {left: leaves(left) for left in found}
            with _Reads(leaf for each in first.values() for leaf in each if isinstance(leaf, Tensor)) as reads:
                made = call()
            second = {left: leaves(left) for left in found}
    except Exception:  # noqa: BLE001 - nothing is known of a model that cannot be called twice
        return ()

    kept = {*reads.read, *map(id, tree_leaves(made))}

    def anew(was: list[Any], now: list[Any]) -> bool:
        alone = all(isinstance(each, Tensor) and not isinstance(each, nn.Parameter) for each in now)
        return bool(now) and alone and not {*map(id, was)} & {*map(id, now), *kept}

    return tuple(left for left in found if before.ran == reads.ran and anew(first[left], second[left]))


@contextmanager
def leaving(model: nn.Module, left: Sequence[Left]) -> Iterator[None]:
    """Context manager under which a call of the model also returns copies of ``left``, in a tuple, unless it is empty."""
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


def copied(leaf: Any) -> Any:
    """The node that an output is a clone of (see `leaving`); any other leaf itself."""
    return leaf.args[0] if isinstance(leaf, fx.Node) and leaf.target is torch.ops.aten.clone.default else leaf


def numbered(moments: Sequence[Moment], numbers: Mapping[int, int]) -> tuple[Moment, ...]:
    """The moments with indices of copies replaced by indices of the graph's outputs; ``numbers`` maps one to the other."""

    def place(leaf: Any) -> Any:
        return Place(numbers[leaf.number]) if isinstance(leaf, Place) else leaf

    return tuple(replace(moment, leaves=tuple(map(place, moment.leaves))) for moment in moments)


def apart(graph: fx.Graph, observed: range, *, kept: bool) -> dict[int, int]:
    """Replaces outputs by operators of their own, ``aten.alias`` of them, which may then stay sharded.

    Args:
        graph: a graph that returns the user's leaves, then observed tensors, then new values of written placeholders.
        observed: the range of the observed outputs; each distinct tensor among them is returned once.
        kept: whether to replace the user's leaves too.

    Returns:
        Index among the observed outputs -> index among the new outputs.
    """
    output = graph.output_node()
    leaves: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    made, numbers, places = leaves[: observed.start], dict[int, int](), dict[fx.Node, int]()

    def view(leaf: fx.Node) -> fx.Node:
        with graph.inserting_before(output):
            found = graph.call_function(torch.ops.aten.alias.default, (leaf,))
        found.meta = dict(leaf.meta)
        return found

    for place, leaf in enumerate(made):
        if kept and isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), Tensor):
            made[place] = view(leaf)
            places.setdefault(leaf, place)
    for number, leaf in enumerate(leaves[observed.start : observed.stop]):
        if leaf not in places:
            places[leaf] = len(made)
            made.append(view(leaf))
        numbers[number] = places[leaf]
    output.args = ((*made, *leaves[observed.stop :]),)
    return numbers
