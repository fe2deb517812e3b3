"""A program and its key, the model copy from which programs are captured, and attributes that programs do not set."""

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
from passes.capture.signature import path_of
from passes.tensors import overlap
from passes.torch_internals import tree_flatten_with_path, tree_unflatten

__all__ = ["Call", "Key", "Program", "Unkept", "blueprint", "named_state", "require_own", "run_alike", "without_memory"]


@dataclass(frozen=True, slots=True)
class Key:
    """Identifies a kind of call, and thereby the program that runs it.

    Attributes:
        training: whether each of the model's modules is in training, in the order of ``model.modules()``.
        gradients: whether gradients are computed.
        leaves: the leaves of the call's arguments by name, defaults included: ``(dtype, shape)`` of a tensor, ``(type,
            value)`` of any other value.
        structure: tree spec of the arguments.
        whole: whether ranks that hold parts of the batch have joined them for the call.
        cast: names and dtypes of the parameters and buffers whose dtype differs from the model's.
        default: torch's default dtype, if it differs from the first program's.
        orders: the memory order of the tensors' dims, if it matters and differs from the first program's (see `lying`).
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
        """The entry of ``leaves`` for a leaf of a call."""
        if isinstance(value, Tensor):
            return value.dtype, tuple(value.shape)
        if isinstance(value, set):  # the repr of a set depends on the order of insertion
            value = frozenset(value)
        # Floats are compared by their repr, as -0.0 == 0.0 and NaN != NaN.
        return type(value), value if isinstance(value, Hashable) and not isinstance(value, float | complex) else repr(value)

    @property
    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor, in the order of the graph's inputs."""
        named = zip(self._paths, self.leaves, strict=True)
        return [(path, shape) for path, (kind, shape) in named if isinstance(kind, torch.dtype)]

    @property
    def _paths(self) -> list[str]:
        """The name of every leaf."""
        spec: Any = self.structure
        paths, _ = tree_flatten_with_path(tree_unflatten(list(range(len(self.leaves))), spec))
        return [path_of(path) for path, _ in paths]

    def __str__(self) -> str:
        """The text that ranks compare: equal calls have equal texts on all ranks."""
        mode = "training" if all(self.training) else "training in part" if any(self.training) else "evaluation"
        given, skipped = list[str](), False
        for path, (kind, shape) in zip(self._paths, self.leaves, strict=True):
            if isinstance(kind, torch.dtype):  # with its name, if its position does not identify it
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
    """The text of a value that is no tensor, equal on all processes: without addresses, and with sets sorted."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(_text(type(each), each) for each in value))}}}"
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if issubclass(kind, float | complex) and isinstance(value, str):  # the repr of a number
        return value
    return repr(value) if issubclass(kind, str) else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


@dataclass(frozen=True, slots=True)
class Call:
    """A call as ranks compare it: its key, the names of the frozen parameters, and whether gradients are reduced."""

    key: Key
    frozen: tuple[str, ...]
    syncing: bool = True

    def __str__(self) -> str:
        some, rest = ", ".join(self.frozen[:3]), self.frozen[3:]
        others = f" and {len(rest)} more ({crc32(' '.join(rest).encode()):08x})" if rest else ""
        return f"{self.key}{some and f', frozen {some}'}{others}{'' if self.syncing else ', under no_sync()'}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Program:
    """A sharded graph with its plan, which the calls of one kind run.

    Attributes:
        key: of the call that it was made for; calls of other kinds may run it too (see `run_alike`).
        plan: the plan by which the graph is sharded; parameters rest in the layouts of the module's first plan.
        rewritten: the sharded graph, with the captured graph and the sharding that it was made from.
        schedules: of the sharded graph; None: it runs unscheduled.
        accumulation: holds the gradients of this program that are not reduced yet.
        relations: which outputs are views of others, or computed from them.
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
        """The captured graph of the model."""
        return self.rewritten.captured

    def __repr__(self) -> str:
        return str(self.key)

    def run(
        self, values: Callable[[bool], Mapping[str, Any]], parameters: Mapping[str, Any], *, syncing: bool
    ) -> tuple[Sequence[Any], bool]:
        """Runs a forward pass. Returns the outputs of the sharded graph, and whether its scheduled graph ran.

        Args:
            values: returns placeholder -> value, a tensor or ``Parts``; its argument: whether a scheduled graph reads them.
            parameters: placeholder -> the module's parameter.
            syncing: whether gradients are reduced.
        """
        accumulation = self.accumulation
        if self.schedules is not None:
            outputs = accumulation.scheduled(self.schedules, values(True), parameters, syncing=syncing)
            if outputs is not None:
                return outputs, True
        return accumulation.eager(values(False), parameters, syncing=syncing), False

    def written(self, inputs: Sequence[Tensor], held: Callable[[str], Tensor], given: Sequence[Any]) -> list[Tensor]:
        """The local tensors that a pass changes in place, in the order of their new values among the graph's outputs.

        Args:
            inputs: of the graph.
            held: returns a parameter or buffer by its name.
            given: the arguments of the call.

        Raises:
            AutotpError: a tensor cannot be changed as the model would, or an input's strides differ from the planned ones.
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
        """Why the tensor of a placeholder cannot be changed in place as by the model; None if it can."""
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
    """The placeholder ``name``, and those that its new value may pass gradients to."""
    nodes = {node.name: node for node in captured.graph_module.graph.nodes}
    found, pending = {nodes[name]}, [*nodes[captured.mutations[name]].all_input_nodes]
    while pending:
        node = pending.pop()
        if node not in found and node.target is not torch.ops.aten.detach.default:
            found.add(node)
            pending += node.all_input_nodes
    return {node.name for node in found if node.op == "placeholder"}


def require_own(captured: Captured, known: Sequence[Captured]) -> Captured:
    """Returns a further program's graph after checking that its state is that of the first program.

    Raises:
        AutotpError: the graph has parameters of the original model, though it is captured from a copy; it changes
            attributes that are no buffers; or an attribute is a constant of one graph, and assigned by forward in another.
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


#: Fields of a captured graph that `run_alike` compares by other means, such as the plan's hash.
_NODES = ("graph_module", "constants", "signature")


def _left(captured: Captured) -> set[str]:
    return {each.path for each in captured.left}


def run_alike(one: tuple[Key, Plan, Captured], other: tuple[Key, Plan, Captured]) -> bool:
    """Whether one program can run the calls of two kinds: their plans' hashes and the rest of their graphs are equal."""

    def kind(key: Key, plan: Plan, captured: Captured) -> tuple[Any, ...]:
        beside = [getattr(captured, each.name) for each in fields(captured) if each.name not in _NODES]
        return plan.hash, key.gradients, key.whole, key.orders, captured.answered, [*captured.constants], beside

    if kind(*one) != kind(*other):
        return False
    pairs = zip(one[2].constants.values(), other[2].constants.values(), strict=True)
    return all(mine is its or checksum(mine) == checksum(its) for mine, its in pairs)


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tied one is listed under each of its names."""
    return dict(
        itertools.chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    )


def without_memory(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the same shape and strides whose storage is empty."""
    bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)
    if not bare.is_meta:
        bare.untyped_storage().resize_(0)
    return bare


def _beside(first: Tensor, tensor: Tensor) -> Tensor:
    """A tensor of the shape and strides of ``tensor`` that shares the empty storage of ``first``."""
    bare = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    bare.set_(first.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    first.untyped_storage().resize_(0)
    return bare


def blueprint(model: nn.Module) -> nn.Module | AutotpError:
    """A copy of a model to capture, whose parameters and buffers take no memory; or the error, if it cannot be copied."""
    tensors: dict[int, Tensor] = {}
    memories: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        bare = without_memory(tensor, tensor.dtype)
        if not tensor.is_meta and tensor.layout is torch.strided:  # keep which tensors share memory
            first = memories.setdefault(tensor.untyped_storage().data_ptr() or id(tensor), bare)
            bare = bare if first is bare else _beside(first, tensor)
        tensors[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    for value in [value for module in model.modules() for value in vars(module).values()]:
        if isinstance(value, Tensor) and value.grad_fn is not None:  # a weight that prune or weight_norm computes in a hook
            tensors[id(value)] = value.detach()
    try:
        return copy.deepcopy(model, dict(tensors))
    except Exception as error:  # noqa: BLE001 - the model's attributes may raise anything
        return AutotpError(
            f"this call needs a program of its own, and {type(model).__name__} cannot be copied to make one "
            f"({type(error).__name__}: {error}); distribute the model again in that mode and with such inputs"
        )


class Unkept(set[str]):
    """Paths of attributes that the model's forward sets and programs do not, so their values would be out of date."""

    def require(self, path: str, name: str, error: type[Exception]) -> None:
        """Raises if an attribute is one of them.

        Args:
            path: of the module.
            name: of the attribute.
            error: the type of the exception.
        """
        if (whole := f"{path}.{name}".lstrip(".")) in self:
            raise error(
                f"{whole}: the model's forward sets it, and a distributed module, which runs a graph, does not. Let "
                "forward return it"
            ) from None
