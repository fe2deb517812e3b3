"""Batches whose rows are distributed over the ranks: joining parts of different sizes, and slicing outputs and gradients.

No graph is made for parts of different sizes, as means and norms over the batch would weight their rows wrongly. Instead,
the ranks all-gather their rows and run the program of the whole batch, which splits it as its plan says. Each rank returns
the output rows of its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autotp.errors import AutotpError, PlanMismatchError
from autotp.runtime.agreement import Agreement
from autotp.runtime.programs.program import Key, Program
from autotp.runtime.rewrite import batch_of
from passes.capture import Captured
from passes.layouts.reshard import Step
from passes.torch_internals import tree_flatten, tree_map_only
from passes.world import ops
from passes.world.world import World

__all__ = ["Joined", "joined", "known_rows", "own_inputs", "own_rows", "require_same_inputs"]

_SIZES = "parts of the batch of different sizes are for inputs='uneven'"
_WHOLE = (
    "both are given the whole batch (inputs='global'): draw and shuffle with one seed; to give each rank its own part, use "
    "inputs='local'"
)
_UNSPLIT = (
    "this plan does not split the batch (its batch_ways is 1), so that all ranks bring the same one: load it with the "
    "module's sampler() or by its batch_rank; to give each rank its own part, use a strategy that splits the batch, such "
    "as 'data'"
)


@dataclass(frozen=True, slots=True)
class Joined:
    """A call with the joined rows of all ranks.

    Attributes:
        key, args, kwargs, inputs: the key and the arguments of the joined call (see `Programs.key`).
        rows: per input that is a part of the batch, where this rank's rows begin and end, and the total number of rows.
    """

    key: Key
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    rows: Sequence[tuple[int, int, int]]

    def own(self, size: int) -> slice:
        """This rank's slice of an output with ``size`` rows, computed from the joined batch."""
        begin, end, count = max((each for each in self.rows if each[2] and size % each[2] == 0), key=lambda each: each[2])
        return slice(begin * size // count, end * size // count)


def joined(
    agreement: Agreement,
    part: tuple[int, ...] | None,
    first: bool,
    key: Key,
    parts: Sequence[bool],
    call: tuple[Sequence[Any], Mapping[str, Any]],
    bound: Callable[..., Mapping[str, Any]],
    inputs: Sequence[Tensor],
) -> Joined:
    """Joins the rows of all ranks, whose parts of the batch have different sizes, into one call. A collective call.

    Args:
        agreement: of the processes.
        part: identifies this rank's part of the batch: its coordinates on the mesh axes that split the batch.
        first: whether this rank sends the rows, among the ranks that are given the same part.
        key, call, inputs: this rank's call, as key, as ``(args, kwargs)`` and as tensors.
        parts: which of the inputs are parts of the batch.
        bound: returns the arguments of a call by name, given its ``args`` and ``kwargs``.

    Raises:
        PlanMismatchError: on every rank, if the calls differ in more than the numbers of rows, if ranks with the same part
            of the batch made different calls, or if an argument's rows are not divided as those of the batch.
    """
    cut = iter(parts)
    less = [_less(each) if isinstance(kind, torch.dtype) and next(cut) else each for kind, each in key.leaves]
    rest = str(replace(key, leaves=tuple((kind, each) for (kind, _), each in zip(key.leaves, less, strict=True))))
    mine = [tensor.detach().cpu().clone() for tensor in inputs] if first else None
    every = agreement.gathered((part, str(key), rest, mine))
    lead = {at: rank for rank, (at, *_, sent) in enumerate(every) if sent is not None}
    for rank, (at, said, less, _) in enumerate(every):
        for other, differs in ((0, less != every[0][2]), (lead[at], said != every[lead[at]][1])):
            if differs:
                raise PlanMismatchError(
                    f"the ranks made different calls: rank {other} one for {every[other][1]}, rank {rank} one for {said}; "
                    "with inputs='uneven', only the rows (dim 0) of different parts of the batch may differ in number"
                )
    brought = [every[lead[at]][3] for at in sorted(lead)]
    lengths = [batch_of([tensor.shape for tensor in each]) for each in brought]
    place = sorted(lead).index(part)
    whole, rows = [], []
    for number, tensor in enumerate(inputs):
        if not parts[number]:
            whole.append(tensor)
            continue
        sizes = [each[number].shape[0] for each in brought]
        if any(size * sum(lengths) != sum(sizes) * length for size, length in zip(sizes, lengths, strict=True)):
            raise PlanMismatchError(
                f"argument {key.tensors[number][0]} has {_listed(sizes)} rows (dim 0) on the ranks, where the batch has "
                f"{_listed(lengths)}: it is taken for a part of the batch, as its dim 0 is a multiple of the batch in the "
                "example. Give an argument that all ranks have alike with inputs='global'"
            )
        begin = sum(sizes[:place])
        rows.append((begin, begin + sizes[place], sum(sizes)))
        found = torch.cat([each[number] for each in brought]).to(tensor.device)
        whole.append(_Brought.apply(tensor, found, begin) if tensor.requires_grad else found)
    args, kwargs = call
    leaves = [leaf for leaf in tree_flatten(bound(args, kwargs))[0] if isinstance(leaf, Tensor)]
    given = {id(leaf): tensor for leaf, tensor in zip(leaves, whole, strict=True)}
    args, kwargs = tree_map_only(Tensor, lambda leaf: given[id(leaf)], (tuple(args), dict(kwargs)))
    shapes = iter(whole)
    described = tuple((k, tuple(next(shapes).shape) if isinstance(k, torch.dtype) else v) for k, v in key.leaves)
    return Joined(replace(key, leaves=described, whole=True), args, kwargs, whole, rows)


def known_rows(key: Key, parts: Sequence[bool], known: Iterable[Program], captured: Captured) -> frozenset[int] | None:
    """Indices of the outputs whose dim 0 is the batch, for a joined batch of one row: no rule follows a dim of size 1.

    Args:
        key, parts: the call's key, and which of its tensors are parts of the batch.
        known: the programs so far, among which one with the same number of outputs and more rows is looked up.
        captured: the call's graph.

    Returns:
        The indices; None if the rules determine them: no rows were joined, or the batch has more than one.

    Raises:
        AutotpError: there is no such program.
    """
    if not key.whole or all(shape[0] != 1 for (_, shape), part in zip(key.tensors, parts, strict=True) if part):
        return None
    for other, rewritten in ((each.captured, each.rewritten) for each in known):
        if other.outputs == captured.outputs and batch_of([other.placeholders[name].shape for name in other.inputs]) > 1:
            return rewritten.sharding.rows
    raise AutotpError(
        "the ranks bring one row together, and from no call with more rows is it known which of these outputs have rows: "
        "prepare() such a call first, or leave this batch out"
    )


def require_same_inputs(
    key: Key, parts: Sequence[bool], every: Sequence[tuple[tuple[int, ...], str, Sequence[Any]]], ways: int | None
) -> None:
    """Checks that all ranks made the same call with consistent inputs.

    Args:
        key, parts: the call's key, and which of its tensors are parts of the batch.
        every: per rank, its part of the batch, its call as text, and a checksum of each tensor; no checksums if nothing is
            computed.
        ways: the number of parts in which the ranks are given the batch; None: each is given the whole batch.

    Raises:
        PlanMismatchError: ranks made different calls, have different values where they must be equal, or all have equal
            values of an argument that is taken for a part of the batch only because its dim 0 is a multiple of the batch.
    """
    for rank, (_, call, _) in enumerate(every):
        if call != every[0][1]:
            raise PlanMismatchError(
                f"the ranks made different calls: rank 0 one for {every[0][1]}, rank {rank} one for {call}; call the "
                f"module alike on all ranks ({_UNSPLIT if ways == 1 else _SIZES})"
            )
    if not every[0][2]:
        return
    tensors, first = key.tensors, dict[tuple[int, ...], int]()
    for rank, (part, _, sums) in enumerate(every):
        lead = first.setdefault(part, rank)
        for (name, _), cut, mine, leads, zeros in zip(tensors, parts, sums, every[lead][2], every[0][2], strict=True):
            if mine != (leads if cut else zeros):
                what = "the same part of the batch" if cut else "all of it, as its dim 0 is not the batch"
                why = f"both are given {what}: draw and shuffle with one seed"
                if ways is None:
                    why = _WHOLE
                elif ways == 1:
                    why = _UNSPLIT
                raise PlanMismatchError(f"argument {name} differs between ranks {lead if cut else 0} and {rank}, and {why}")
    batch = batch_of([shape for _, shape in tensors])
    for (name, shape), cut, *sums in zip(tensors, parts, *(each[2] for each in every), strict=True):
        if len(first) > 1 and cut and shape[0] != batch and len(set(sums)) == 1:
            raise PlanMismatchError(
                f"argument {name} of shape {shape} is the same on all ranks, but is taken for a part of the batch, as its "
                f"dim 0 is a multiple of {batch}: use inputs='global'"
            )


def _listed(sizes: Sequence[int]) -> str:
    *most, last = map(str, sizes)
    return f"{', '.join(most)} and {last}"


def _less(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The number of dims and the sizes of all dims but the first, which may differ between ranks."""
    return (len(shape), *shape[1:])


def own_rows(value: Tensor, ways: int, call: Joined | None, world: World, axes: tuple[int, ...]) -> Tensor:
    """This rank's rows of an output; gradients are those of the mean over ranks, as with FSDP2 and DDP.

    Args:
        value: the graph's output: this rank's rows, or the rows of all ranks if ``call`` is given.
        ways: the number of parts in which the ranks have the batch.
        call: the joined call that the graph ran for; None if no rows were joined.
        world: of the graph.
        axes: the mesh axes that split the batch.
    """
    if call is not None:
        if value.requires_grad:
            value = ops.reshard(world, value, (), (Step("all_reduce", axes),), at="an output's rows")
        value = value[call.own(value.shape[0])]
    return _Divided.apply(value, ways) if value.requires_grad else value


def own_inputs(inputs: Sequence[Tensor], parts: Sequence[bool], ways: int) -> list[Tensor]:
    """The inputs, with gradients of what this rank computes instead of the mean over ranks, as with FSDP2 and DDP.

    Args:
        inputs: of a call.
        parts: which inputs are parts of the batch that were passed as plain tensors, not as ``DTensor``.
        ways: the number of parts in which the ranks have the batch.
    """
    pairs = zip(inputs, parts, strict=True)
    return [_Divided.apply(value, 1 / ways) if part and value.requires_grad else value for value, part in pairs]


class _Divided(torch.autograd.Function):
    """The identity; its backward pass divides the gradient by ``divisor``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, divisor: float) -> Tensor:  # type: ignore[override]
        ctx.divisor = divisor
        return value.detach()  # a view that is created here could not be changed in place by the caller

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient / ctx.divisor, None


class _Brought(torch.autograd.Function):
    """Returns the joined rows ``whole`` in place of this rank's rows ``mine``, which get the gradient of their slice."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, whole: Tensor, begin: int) -> Tensor:  # type: ignore[override]
        ctx.rows = slice(begin, begin + mine.shape[0])
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient[ctx.rows], None, None
