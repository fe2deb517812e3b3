"""One program, what tells it from the others, what others are made from, and what programs leave undone."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import FunctionType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from autotp.errors import AutotpError
from autotp.plans.plan import Plan
from autotp.runtime.accumulation import Accumulation
from autotp.runtime.output_guard import Relations
from autotp.runtime.rewrite import Rewritten
from autotp.runtime.schedules import Schedules
from autotp.runtime.state import checksum, held_part
from autotp.runtime.strides import order_of
from passes.capture import Captured
from passes.capture.signature import overlap, path_of
from passes.torch_internals import tree_flatten_with_path, tree_unflatten

__all__ = ["Call", "Key", "Program", "Unkept", "blueprint", "named_state", "require_own", "run_alike", "without_memory"]


@dataclass(frozen=True, slots=True)
class Key:
    """What tells the programs of a module apart.

    Attributes:
        training: whether each of the model's modules is in training, in the order of ``model.modules()``.
        gradients: whether gradients are wanted.
        leaves: of the call's arguments by name, defaults included: a tensor's shape and dtype, or any other value's type
            and value.
        structure: of the arguments.
        whole: whether ranks that hold parts of the batch have joined them for the call.
        cast: names and dtypes of the parameters and buffers that have another dtype than the model's.
        default: torch's default dtype, where it is another than for the first program.
        orders: how its tensors lie in memory, where that matters and is otherwise than for the first program (`lying`).
    """

    training: tuple[bool, ...]
    gradients: bool
    leaves: tuple[tuple[Any, Any], ...]
    structure: Hashable
    whole: bool = False
    cast: tuple[tuple[str, torch.dtype], ...] = ()
    default: torch.dtype | None = None
    orders: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def leaf(value: Any) -> tuple[Any, Any]:
        """A leaf of a call as keys have it."""
        if isinstance(value, Tensor):
            return value.dtype, tuple(value.shape)
        if isinstance(value, set):  # whose text depends on how it was filled
            value = frozenset(value)
        # Of a float the text: -0.0 equals 0.0, and NaN not itself.
        return type(value), value if isinstance(value, Hashable) and not isinstance(value, float | complex) else repr(value)

    @property
    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """The name and the shape of every tensor, in the order of the graph's inputs."""
        named = zip(self._paths, self.leaves, strict=True)
        return [(path, shape) for path, (kind, shape) in named if isinstance(kind, torch.dtype)]

    @property
    def _paths(self) -> list[str]:
        """The name of every leaf."""
        spec: Any = self.structure
        paths, _ = tree_flatten_with_path(tree_unflatten(list(range(len(self.leaves))), spec))
        return [path_of(path) for path, _ in paths]

    def __str__(self) -> str:
        """What ranks compare: the same for the same call on all of them."""
        mode = "training" if all(self.training) else "training in part" if any(self.training) else "evaluation"
        given, skipped = list[str](), False
        for path, (kind, shape) in zip(self._paths, self.leaves, strict=True):
            if isinstance(kind, torch.dtype):  # with its name where its place does not tell which one it is
                named = "" if path.isidentifier() and not skipped else f"{path} "
                given.append(f"{named}{str(kind)[6:]}{list(shape)}")
            skipped |= shape is None
        others = [_text(kind, value) for kind, value in self.leaves if isinstance(kind, type) and value is not None]
        wanted = "with gradients" if self.gradients else "without gradients"
        joined = " of all ranks" if self.whole else ""
        to = sorted({str(dtype)[6:] for _, dtype in self.cast})
        cast = f", {len(self.cast)} parameters and buffers cast to {' and '.join(to)}" if to else ""
        usual = "" if self.default is None else f", default dtype {str(self.default)[6:]}"
        usual += f", with dims in memory as {self.orders}" if self.orders else ""
        return f"{mode} {wanted}, inputs{joined} {', '.join(given + others) or 'none'}{cast}{usual}"


def _text(kind: type, value: Any) -> str:
    """A value that is no tensor, as every process writes it: without addresses, and sets in order."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(_text(type(each), each) for each in value))}}}"
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if issubclass(kind, float | complex) and isinstance(value, str):  # the text of a number
        return value
    return repr(value) if issubclass(kind, str) else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


@dataclass(frozen=True, slots=True)
class Call:
    """What a call is for, as ranks tell each other: its key, and the names of the parameters that are frozen."""

    key: Key
    frozen: tuple[str, ...]
    syncing: bool = True

    def __str__(self) -> str:
        some, rest = ", ".join(self.frozen[:3]), self.frozen[3:]
        others = f" and {len(rest)} more ({crc32(' '.join(rest).encode()):08x})" if rest else ""
        return f"{self.key}{some and f', frozen {some}'}{others}{'' if self.syncing else ', under no_sync()'}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Program:
    """What the calls of one kind run.

    Attributes:
        key: that kind.
        plan: by which the graph is sharded; its parameters rest as in the module's first plan.
        rewritten: the sharded graph, and what it was made from.
        schedules: of the sharded graph; None: it runs as it is.
        accumulation: its gradients that wait to be reduced.
        relations: of its outputs.
        constants: placeholder -> a constant on this device.
    """

    key: Key
    plan: Plan
    rewritten: Rewritten
    schedules: Schedules | None
    accumulation: Accumulation
    relations: Relations
    constants: dict[str, Tensor]

    @property
    def captured(self) -> Captured:
        """The model's graph."""
        return self.rewritten.captured

    def __repr__(self) -> str:
        return str(self.key)

    def run(
        self, values: Callable[[bool], Mapping[str, Any]], parameters: Mapping[str, Any], *, syncing: bool
    ) -> tuple[Sequence[Any], bool]:
        """The outputs of the sharded graph, and whether a schedule ran.

        Args:
            values: gives placeholder -> its value, a tensor or ``Parts``; it is told whether a schedule will read them.
            parameters: placeholder -> the parameter, as it is outside.
            syncing: whether gradients are reduced.
        """
        accumulation = self.accumulation
        if self.schedules is not None:
            outputs = accumulation.scheduled(self.schedules, values(True), parameters, syncing=syncing)
            if outputs is not None:
                return outputs, True
        return accumulation.eager(values(False), parameters, syncing=syncing), False

    def written(self, inputs: Sequence[Tensor], held: Callable[[str], Tensor], given: Sequence[Any]) -> list[Tensor]:
        """What a pass changes in place, in the order in which its outputs have the new values.

        Args:
            inputs: of the graph.
            held: gives a parameter or buffer by its name.
            given: the arguments of the call.

        Raises:
            AutotpError: the model would change something else, or a gradient would be lost.
        """
        captured = self.captured
        if not (captured.mutations or captured.written.strided):
            return []
        named, paths = dict(zip(captured.inputs, inputs, strict=True)), {**captured.parameters, **captured.buffers}
        inside = paths if named.keys() & captured.mutations.keys() else paths.keys() & captured.mutations.keys()
        state = {name: held(paths[name]) for name in inside}
        given = [*given, *(each.default for each in captured.signature.parameters.parameters.values())]
        for name in captured.mutations:
            if (fault := self._fault(name, named, state, given)) is not None:
                raise AutotpError(
                    f"{captured.title(name)}: the model changes it in place, and {fault}. Pass a clone, or let the model "
                    "change a clone"
                )
        for name, tensor in named.items() if captured.written.strided else ():
            planned = captured.placeholders[name]
            if order_of(tensor) != order_of(planned):
                raise AutotpError(
                    f"input {name}: it has strides {tensor.stride()}, and {planned.stride()} when the call was planned. "
                    "The model reads memory by as_strided(), or changes in place what reshape() or contiguous() copies or "
                    "not, as its strides are: pass an input that lies in memory as the example did"
                )
        return [held_part(named[name] if name in named else state[name]) for name in captured.mutations]

    def _fault(
        self, name: str, named: Mapping[str, Tensor], state: Mapping[str, Tensor], given: Sequence[Any]
    ) -> str | None:
        """Why a placeholder cannot be changed as the model changes it."""
        captured, mine = self.captured, named[name] if name in named else state[name]
        others = {**named, **state, **self.constants} if name in named else named
        if any(stride == 0 and size > 1 for stride, size in zip(mine.stride(), mine.shape, strict=True)):
            return "it was expanded: several of its elements are one in memory"
        for other, tensor in others.items():
            if other != name and overlap(held_part(tensor), held_part(mine)):
                return f"{captured.title(other)} lies in the same memory"
        if name not in named:
            learned = name in captured.written.frozen and self.key.gradients and mine.requires_grad
            return "torch allows that of a frozen parameter, or under torch.no_grad()" if learned else None
        if all(mine is not each for each in given):
            return "the graph has a copy of it: it is a DTensor, conjugated, or other ranks have other numbers of rows"
        if self.key.gradients and any(tensor.requires_grad for tensor in named.values()):
            for other in _followed(captured, name) & named.keys():
                if named[other].requires_grad:
                    return f"{captured.title(other)} needs a gradient"
        return None


def _followed(captured: Captured, name: str) -> set[str]:
    """Placeholders that autograd may follow the new value of another to, which is itself one of them."""
    nodes = {node.name: node for node in captured.graph_module.graph.nodes}
    found, pending = {nodes[name]}, [*nodes[captured.mutations[name]].all_input_nodes]
    while pending:
        node = pending.pop()
        if node not in found and node.target is not torch.ops.aten.detach.default:
            found.add(node)
            pending += node.all_input_nodes
    return {node.name for node in found if node.op == "placeholder"}


def require_own(captured: Captured, known: Sequence[Captured]) -> Captured:
    """A program's graph, unless it has state that the first has not, or reads what another leaves.

    Raises:
        AutotpError: it has parameters of the model itself, of which the graph is made from a copy, or changes attributes
            that are not among the buffers; or an attribute is a constant of one graph, and left by another.
    """
    leaves, reads = {path for each in known for path in _left(each)}, {path for each in known for path in each.reads}
    if both := sorted(leaves.intersection(captured.reads) | reads.intersection(_left(captured))):
        raise AutotpError(
            f"forward leaves {', '.join(both)} in some calls, and reads it in others, which another graph runs: make it a "
            "buffer (register_buffer(..., persistent=False))"
        )
    if captured.attributes:
        raise AutotpError(
            f"forward changes {', '.join(captured.attributes)} in this call, and not in the first that was planned: make "
            "them buffers (register_buffer(..., persistent=False)), or plan this call first"
        )
    own = {id(each) for each in known[0].constants.values()}
    if any(isinstance(each, nn.Parameter) and id(each) not in own for each in captured.constants.values()):
        raise AutotpError(
            "this call needs a program of its own, made from a copy of the model, and forward calls a function that holds "
            "the model itself (a lambda or a closure in an attribute): make it a method, or a module"
        )
    return captured


#: Of a captured graph: what plans are told apart by.
_NODES = ("graph_module", "constants", "signature")


def _left(captured: Captured) -> set[str]:
    return {each.path for each in captured.left}


def run_alike(one: tuple[Key, Plan, Captured], other: tuple[Key, Plan, Captured]) -> bool:
    """Whether one program can run the calls of two kinds. A graph has more than the nodes that plans are told apart by."""

    def kind(key: Key, plan: Plan, captured: Captured) -> tuple[Any, ...]:
        beside = [getattr(captured, each.name) for each in fields(captured) if each.name not in _NODES]
        return plan.hash, key.gradients, key.whole, key.orders, captured.answered, [*captured.constants], beside

    if kind(*one) != kind(*other):
        return False
    pairs = zip(one[2].constants.values(), other[2].constants.values(), strict=True)
    return all(mine is its or checksum(mine) == checksum(its) for mine, its in pairs)


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all their names."""
    return dict(
        itertools.chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    )


def without_memory(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the same shape and strides whose elements take no memory."""
    bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)
    if not bare.is_meta:
        bare.untyped_storage().resize_(0)
    return bare


def _beside(first: Tensor, tensor: Tensor) -> Tensor:
    """A tensor like another in the memory of one that takes none."""
    bare = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    bare.set_(first.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    first.untyped_storage().resize_(0)
    return bare


def blueprint(model: nn.Module) -> nn.Module | AutotpError:
    """A copy of a model to capture, whose parameters and buffers take no memory; or why there is none."""
    tensors: dict[int, Tensor] = {}
    memories: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        bare = without_memory(tensor, tensor.dtype)
        if not tensor.is_meta and tensor.layout is torch.strided:  # what shares memory must be seen to
            first = memories.setdefault(tensor.untyped_storage().data_ptr() or id(tensor), bare)
            bare = bare if first is bare else _beside(first, tensor)
        tensors[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    for value in [value for module in model.modules() for value in vars(module).values()]:
        if isinstance(value, Tensor) and value.grad_fn is not None:  # a weight as prune and weight_norm make it in a hook
            tensors[id(value)] = value.detach()
    try:
        return copy.deepcopy(model, dict(tensors))
    except Exception as error:  # noqa: BLE001 - what a model holds besides tensors is its own
        return AutotpError(
            f"this call needs a program of its own, and {type(model).__name__} cannot be copied to make one "
            f"({type(error).__name__}: {error}); distribute the model again in that mode and with such inputs"
        )


class Unkept(set[str]):
    """Paths of attributes that the model's forward sets, and no program does: what is read there would be out of date."""

    def require(self, path: str, name: str, error: type[Exception]) -> None:
        """Refuses one of them.

        Args:
            path: of a module.
            name: of an attribute of it.
            error: what to raise.
        """
        if (whole := f"{path}.{name}".lstrip(".")) in self:
            raise error(
                f"{whole}: the model's forward sets it, and a distributed module, which runs a graph, does not. Let "
                "forward return it"
            ) from None
