"""What a model shows besides what it returns: what observed modules are given and return, and what it leaves on itself.

``torch.export`` calls forward hooks, once and on fake tensors. While a model is captured, hooks of this file copy what
observed modules are given and return, as it is at that moment, and the attributes that the forward pass has set at its
end. Hooks of the model itself hand the copies out behind what the model returns. Once writes are values, copies are what
they are copies of, so they cost nothing.
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

#: What hooks can be shown besides tensors.
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


class Place(NamedTuple):
    """Where a tensor is: its number among those that were copied, and then among the graph's outputs."""

    number: int


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of a forward pass, at which hooks of an observed module run.

    Attributes:
        module: the module's name.
        index: its place in ``model.modules()``.
        before: whether the module begins then, or has ended.
        spec: the tree of what it is given, ``(args, kwargs)``, and of what it returns, if it has ended.
        leaves: of that tree: a `Place`, or a value that is no tensor.
    """

    module: str
    index: int
    before: bool
    spec: TreeSpec
    leaves: tuple[Any, ...]

    def values(self, outputs: Sequence[Any]) -> Any:
        """Positional and keyword arguments, and what the module returned, if it has ended.

        Args:
            outputs: of the graph.
        """
        return tree_unflatten([outputs[x.number] if isinstance(x, Place) else x for x in self.leaves], self.spec)

    def tensors(self, outputs: Sequence[Any]) -> list[Tensor]:
        """The tensors among ``values``."""
        return [outputs[leaf.number] for leaf in self.leaves if isinstance(leaf, Place)]


def foreign_hooks(module: nn.Module, known: Container[str]) -> list[int]:
    """torch's numbers of a module's forward hooks that none of some libraries has registered.

    Args:
        module: it.
        known: the libraries' names.
    """
    hooks = [item for before in (False, True) for item in forward_hooks(module, before=before).items()]
    places = ((number, str(getattr(hook, "__module__", None) or type(hook).__module__)) for number, hook in hooks)
    return [number for number, place in places if place.partition(".")[0] not in known]


def matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Name -> module, of those inside a model whose names match a pattern.

    Args:
        model: it.
        patterns: as in a shell, part by part: ``blocks.*`` are the elements of ``blocks``, and not what is in them.

    Raises:
        AutotpError: a pattern matches no name; says which are close.
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
    """While it lasts, a call of the model returns what it returns, and a tuple of what was copied; gives the moments.

    Args:
        model: it; nothing is changed, if nothing is observed.
        modules: by their names, those that are observed.

    Raises:
        CaptureError: in the call, when a module is given or returns what hooks could not be shown.
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
    """Notes which operators run, with what besides tensors, and which of some tensors they read."""

    def __init__(self, tensors: Iterable[Any] = ()) -> None:
        super().__init__()
        self.among, self.read, self.ran = {*map(id, tensors)}, set[int](), list[tuple[Any, str]]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        self.read |= self.among.intersection(map(id, leaves))
        if function.namespace != "prim":  # what asks for a device, which depends on what is known of it
            self.ran.append((function, str([each for each in leaves if not isinstance(each, Tensor)])))
        return function(*args, **(kwargs or {}))


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


def copied(leaf: Any) -> Any:
    """What an output of a model that is `leaving` tensors is a copy of."""
    return leaf.args[0] if isinstance(leaf, fx.Node) and leaf.target is torch.ops.aten.clone.default else leaf


def numbered(moments: Sequence[Moment], numbers: Mapping[int, int]) -> tuple[Moment, ...]:
    """The moments with numbers of the graph's outputs, for those of copies."""

    def place(leaf: Any) -> Any:
        return Place(numbers[leaf.number]) if isinstance(leaf, Place) else leaf

    return tuple(replace(moment, leaves=tuple(map(place, moment.leaves))) for moment in moments)


def apart(graph: fx.Graph, observed: range, *, kept: bool) -> dict[int, int]:
    """Makes outputs operators of their own: views of what the graph returned.

    Args:
        graph: it returns the user's leaves, what is observed, and new values of buffers.
        observed: numbers of what is observed, of which every tensor is returned once.
        kept: whether it is done to the user's leaves too.

    Returns:
        Which of what was observed -> its number among the outputs.
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
