"""Checks of the numbers of every pass, for ``debug=True``.

Replicas must be equal, outputs must not be NaN, and gradients must be finite: the ranks compare the sum and the norm of
each tensor, in one exchange per pass. If a check fails, and in the first pass of every program, the sharded graph is run
again operator by operator, to find the first operator that goes wrong. In that run, a reshard must also preserve the sum
over all elements, so that partial sums are added exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial, Replicate

from autotp.errors import AutotpError
from autotp.runtime.agreement import Agreement
from autotp.runtime.interpreter import Interpreter
from autotp.runtime.programs.program import Program
from passes.graph import note_of
from passes.layouts.layout import Layout
from passes.torch_internals import queue_callback
from passes.world.world import World

__all__ = ["Monitor", "Seen", "problem"]

_GRADIENT = "the gradient of"


@dataclass(frozen=True, slots=True)
class Seen:
    """Statistics of one rank's part of a tensor.

    Attributes:
        what: the tensor's name, for messages.
        part: the rank's coordinates on the mesh axes along which parts differ; ranks with equal coordinates are replicas.
        copies: the number of ranks that hold the same part.
        total, norm: sum and 2-norm of the part's finite elements.
        size: the number of elements.
        rounding: the relative error allowed in the tensor's dtype.
        infinite, nan: whether elements are infinite or NaN.
        gradient: whether it is a gradient, which must be finite; other tensors may be infinite, as masks are.
        before: for the result of a reshard, the part of its operand; None for all other tensors.
        added: for the result of a reshard, whether it adds partial sums, in the tensor's dtype.
    """

    what: str
    part: tuple[int, ...]
    copies: int
    total: float
    norm: float
    size: int
    rounding: float
    infinite: bool = False
    nan: bool = False
    gradient: bool = False
    before: Seen | None = None
    added: bool = False

    @property
    def wrong(self) -> bool:
        """Whether elements are NaN, or those of a gradient infinite."""
        return self.nan or (self.gradient and self.infinite)

    @property
    def slack(self) -> float:
        """The absolute difference allowed between the sums or the norms of replicas, whose rounding errors are random.

        In a sum of ``size`` elements such errors grow as the norm does, with the square root of ``size``.
        """
        return self.rounding * (self.norm + 1e-30)

    @property
    def adding(self) -> float:
        """The absolute difference allowed between the sums before and after a reshard.

        Where partial sums are added, equal elements are rounded alike, and the errors grow with ``size``.
        """
        return self.slack * (math.sqrt(self.size) if self.added else 1)


def problem(every: Sequence[Sequence[Seen]], *, numbers: bool) -> str:
    """Describes the first tensor that is wrong; empty if none is.

    Args:
        every: the statistics of each rank, in the same order.
        numbers: whether NaN elements, and infinite elements of gradients, are wrong.
    """
    for ranks in zip(*every, strict=True):
        what = ranks[0].what
        if numbers and (bad := [rank for rank, seen in enumerate(ranks) if seen.wrong]):
            return (
                f"{what} has elements that are {'infinite or ' * ranks[0].gradient}NaN, on rank {', '.join(map(str, bad))}"
            )
        first: dict[tuple[int, ...], int] = {}
        for rank, seen in enumerate(ranks):
            other = ranks[first.setdefault(seen.part, rank)]
            unlike = (seen.infinite, seen.nan) != (other.infinite, other.nan)
            apart = max(abs(seen.total - other.total), abs(seen.norm - other.norm)) > max(seen.slack, other.slack)
            if unlike or apart:
                pair = f"ranks {first[seen.part]} and {rank}, which should have the same"
                sums = f"its elements add up to {other.total:.9g} and {seen.total:.9g}"
                why = "only one has elements that are infinite or NaN" if unlike else sums
                return f"{what} differs between {pair}: {why}"
        before = [seen.before for seen in ranks if seen.before is not None]
        if not before or any(seen.infinite or seen.nan for seen in (*before, *ranks)):
            continue  # an infinite partial sum takes finite ones with it
        given, got = _sum(before), _sum(ranks)
        if abs(given - got) > sum(seen.adding / seen.copies for seen in (*before, *ranks)):
            return f"{what} adds up to {given:.9g} before its reshard and to {got:.9g} after it: a sum is taken wrongly"
    return ""


def _sum(seen: Iterable[Seen]) -> float:
    """The sum over all elements of a tensor, each counted once although replicas hold it too."""
    return sum(one.total / one.copies for one in seen)


class Monitor:
    """Checks the passes of one module.

    Args:
        world: in which the module's graphs run.
        agreement: of the processes.
    """

    def __init__(self, world: World, agreement: Agreement) -> None:
        self.world, self.agreement, self._known = world, agreement, set[Program]()
        #: Assumed layout of intermediate gradients, whose own is that of no tensor of the graph: no ranks are compared.
        self._unlike: Layout = (Partial(),) * len(world.mesh_shape)

    def check(
        self,
        program: Program,
        values: Callable[[], Mapping[str, Any]],
        results: Sequence[Any],
        parameters: Callable[[], Mapping[str, tuple[Tensor, Layout]]],
    ) -> None:
        """Checks a forward pass; if an output requires gradients, at the end of the backward pass, with all gradients.

        Args:
            program: that has run.
            values: returns the program's inputs, see `Program.run`.
            results: of the sharded graph.
            parameters: returns name -> this device's part of the parameter's gradient, and its layout.

        Raises:
            AutotpError: on every rank, if a check fails; names the first operator that goes wrong.
        """
        if program not in self._known:
            self._known.add(program)
            if found := self._compared(self._each(program, values), numbers=False):
                raise AutotpError(f"debug=True: {found}")
        outputs = [(i, each) for i, each in enumerate(results[: program.captured.outputs]) if _real(each)]
        layouts = note_of(program.rewritten.graph_module.graph.output_node()).layouts
        axes = len(self.world.mesh_shape)
        named = {f"output {i}": (each.detach(), layouts[i][:axes]) for i, each in outputs}
        trained = [(i, each) for i, each in outputs if each.grad_fn is not None]
        if not trained:
            self._all(program, values, named, {})
            return
        given: dict[int, Tensor] = {}

        def begun(gradients: Sequence[Tensor | None]) -> None:
            if not given:
                queue_callback(ended)
            given.update({i: g for i, each in trained if (g := gradients[each.output_nr]) is not None})

        def ended() -> None:
            before = dict(given)
            given.clear()
            gradients = {f"{_GRADIENT} output {i}": (each.detach(), layouts[i][:axes]) for i, each in before.items()}
            gradients |= {f"{_GRADIENT} parameter {name}": each for name, each in parameters().items()}
            self._all(program, values, named | gradients, before)

        for node in {each.grad_fn for _, each in trained}:
            node.register_prehook(begun)

    def _all(
        self,
        program: Program,
        values: Callable[[], Mapping[str, Any]],
        tensors: Mapping[str, tuple[Tensor, Layout]],
        gradients: Mapping[int, Tensor],
    ) -> None:
        wrong = self._compared(self._seen(tensors), numbers=True)
        if wrong:
            found = self._compared(self._each(program, values, gradients), numbers=True)
            where = f"; the first operator that goes wrong: {found}" if found else "; no operator of the graph makes it"
            raise AutotpError(f"debug=True: {wrong}{where}")

    def _compared(self, mine: Sequence[Seen], *, numbers: bool) -> str:
        return problem(self.agreement.gathered(list(mine)), numbers=numbers)

    def _seen(self, tensors: Mapping[str, tuple[Tensor, Layout]]) -> list[Seen]:
        numbers = iter(_figures([each for each, _ in tensors.values()]))
        return [self._one(name, each, layout, next(numbers)) for name, (each, layout) in tensors.items()]

    def _measured(self, what: str, tensor: Tensor, layout: Layout) -> Seen:
        (seen,) = self._seen({what: (tensor.detach(), layout)})
        return seen

    def _one(self, what: str, tensor: Tensor, layout: Layout, figures: tuple[float, float]) -> Seen:
        mesh, (at,) = self.world.mesh_shape, self.world.hosted
        same = [axis for axis in range(len(mesh)) if isinstance(layout[axis], Replicate)]
        part = tuple(at[axis] for axis in range(len(mesh)) if axis not in same)
        copies = math.prod(mesh[axis] for axis in same)
        rounding = torch.finfo(tensor.dtype).eps ** 0.75
        infinite = nan = False
        if not math.isfinite(figures[1]):
            infinite, nan = torch.stack([tensor.isinf().any(), tensor.isnan().any()]).tolist()
            (figures,) = _figures([torch.nan_to_num(tensor, 0.0, 0.0, 0.0)])
        gradient = what.startswith(_GRADIENT)
        return Seen(what, part, copies, *figures, tensor.numel(), rounding, infinite, nan, gradient)

    def _each(
        self, program: Program, values: Callable[[], Mapping[str, Any]], gradients: Mapping[int, Tensor] | None = None
    ) -> list[Seen]:
        """Runs the graph again. Statistics of every result, in order, and of every gradient if ``gradients`` are given."""
        found: list[Seen] = []

        def look(node: fx.Node, run: Callable[[], Any]) -> Any:
            value = run()
            note = note_of(node)
            if not _real(value) or not (note.operator or note.moves) or value.dtype != node.meta["val"].dtype:
                return value
            what = f"operator {note.operator}" if note.operator else f"the reshard of {node.kwargs['at']}"
            what += f" in {note.module}" if note.operator and note.module else ""
            seen = self._measured(what, value, note.layouts[0])
            if note.have is not None and isinstance(source := node.args[1], fx.Node):
                before = self._measured(what, interpreter.env[source], note.have)
                added = any(isinstance(each, Partial) for each in note.have)
                seen = replace(seen, before=replace(before, added=added), added=added)
            found.append(seen)
            if gradients and value.requires_grad:
                value.register_hook(lambda g: found.append(self._measured(f"{_GRADIENT} {what}", g, self._unlike)))
            return value

        graph = program.rewritten.graph_module
        interpreter = Interpreter(graph, look)
        names = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]
        with torch.set_grad_enabled(bool(gradients)), self.world.seeds.repeating(0):
            inputs = map(values().__getitem__, names)
            given = [each.detach().requires_grad_(each.requires_grad and bool(gradients)) for each in inputs]
            outputs = interpreter.run(*given)
            if gradients:
                ends = [(outputs[i], g) for i, g in gradients.items() if outputs[i].requires_grad]
                trained = [each for each in given if each.requires_grad]
                torch.autograd.grad([e for e, _ in ends], trained, [g for _, g in ends], allow_unused=True)
        return found


def _figures(tensors: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Sum and 2-norm of each tensor, read from the device at once."""
    both = [(each.sum(dtype=torch.float64), torch.linalg.vector_norm(each, dtype=torch.float64)) for each in tensors]
    found = torch.stack([figure for pair in both for figure in pair]).tolist() if both else []
    return list(zip(found[::2], found[1::2], strict=True))


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
