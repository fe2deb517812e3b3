"""Verifies a distributed graph: compares every value and gradient with that of the plain model.

The sharded graph runs for all devices in this process, as in ``simulate``, and the captured graph runs unsharded. An
operator's result must equal the unsharded result in the layout that its strategy gives, a reshard's the same tensor in the
target layout, and likewise for gradients. The first value that differs locates the error, unless rounding alone may cause a
difference of that size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Partial

from autotp.analysis.conditioning import rounding
from autotp.analysis.verify_capture import compared_with_model
from autotp.analysis.verify_runs import Runs, gradient_of_name
from autotp.errors import AutotpError
from autotp.plans.options import require_plan
from autotp.plans.plan import AXIS_NAMES, Plan
from autotp.runtime.rewrite import Rewritten, rewrite
from autotp.runtime.state import real_tensors
from costmodel.text.numbers import figure
from passes.capture import buffered
from passes.graph import Note, note_of
from passes.layouts.layout import Layout, describe
from passes.rules.factors import value_of
from passes.rules.shapes import operands_of
from passes.rules.table import rule_of
from passes.strategies.strategy import gradient_of
from passes.world.ops import Parts

__all__ = ["Departure", "Verification", "verify", "verify_graph"]

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True, slots=True)
class Departure:
    """The first place where the distributed graph departs from the model.

    Attributes:
        operator: the captured operator, or the parameter, to inspect.
        module: its path in the user's model.
        source: its line, ``file.py:LINE``, if known.
        where: what is wrong, in words: its result, a reshard of its result, or a gradient.
        error: the largest difference over the largest magnitude; infinite if shapes differ or the graph fails.
    """

    operator: str
    module: str
    source: str | None
    where: str
    error: float


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of ``verify``. An error is the largest difference over the largest magnitude: of the value or, for a
    parameter's gradient, also of the gradients that are summed into it, which may cancel out.

    Attributes:
        outputs: number of the output -> its error.
        gradients: name of the parameter -> the error of its gradient.
        departure: the first place that is wrong; None if all values and gradients are correct.
        tolerance: the largest error that always counts as rounding.
        compared: the number of values and gradients that were compared, with intermediate ones.
        ill_conditioned: values with an error above the tolerance that rounding may cause: an operator, ``output 0``,
            ``new value of buffer ...`` or ``gradient of ...`` -> its relative change in the model itself when weights and
            inputs change by one unit in the last place. Errors up to 16 times that are accepted, for 16-bit floats 4 times.
    """

    outputs: Mapping[str, float]
    gradients: Mapping[str, float]
    departure: Departure | None
    tolerance: float
    compared: int
    ill_conditioned: Mapping[str, float] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether outputs, gradients and intermediate values equal the model's, up to rounding."""
        return self.departure is None

    def __bool__(self) -> bool:
        return self.right


def verify(
    model: nn.Module,
    plan: Plan,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    tolerance: float | None = None,
) -> Verification:
    """Compares a plan's distributed run with the model's own. Returns the errors, and the first departure, if any.

    Args:
        model: the model that was planned, on a real device.
        plan: the plan.
        args, kwargs: inputs, of the shapes that were planned.
        tolerance: relative; by default, for the least precise floating-point dtype (1e-9 for float64, 1e-4 for float32).

    Raises:
        PlanMismatchError: the plan is for another model or other inputs.
        AutotpError: the model cannot be compared: it draws random numbers, is on ``meta``, or the plan has a precision.
    """
    require_plan(plan)
    if plan.precision is not None:
        raise AutotpError(f"precision {plan.precision!r} rounds where the model does not; verify a plan without precision")
    return verify_graph(model, rewrite(model, plan, args, kwargs), args, kwargs, tolerance=tolerance)


def verify_graph(
    model: nn.Module,
    rewritten: Rewritten,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    tolerance: float | None = None,
) -> Verification:
    """``verify`` for a graph that is already rewritten, and possibly modified since."""
    with buffered(model, rewritten.captured.attributes), real_tensors(), torch.enable_grad():
        return _Comparison(model, rewritten, args, kwargs, tolerance).run()


class _Comparison:
    def __init__(
        self,
        model: nn.Module,
        rewritten: Rewritten,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        tolerance: float | None,
    ) -> None:
        self.rewritten, self.captured = rewritten, rewritten.captured
        self.runs = Runs(model, rewritten, args, kwargs)
        self.graph, self.mesh, self.nodes = self.runs.graph, self.runs.mesh, self.runs.nodes
        dtypes = [t.dtype for t in self.runs.inputs.values() if t.is_floating_point()]
        usual = max((_TOLERANCES.get(dtype, 1e-4) for dtype in dtypes), default=1e-9)
        self.tolerance = usual if tolerance is None else figure(tolerance, "tolerance")
        self.model, self.args, self.kwargs, self.compared = model, args, kwargs, 0
        self.moves: dict[str, float] | None = None
        self.ill_conditioned: dict[str, float] = {}
        self.titles = {plain.name: f"output {number}" for number, _, plain in self.runs.leaves()}
        given: Any = self.captured.graph_module.graph.output_node().args[0]
        for name, node in zip(self.captured.mutations, given[self.captured.returned :], strict=True):
            self.titles[node.name] = f"new value of {self.captured.title(name)}"
        self.titles |= self.captured.parameters
        self.names = {fqn: name for name, fqn in self.captured.parameters.items()}

    def run(self) -> Verification:
        whole = self.runs.reference()
        self.runs.weigh(whole)
        parts, failed = self.runs.distributed()
        departure = self.forward(whole, parts)
        outputs, gradients = self.outputs(whole, parts), {}
        if failed is not None:
            departure = departure or self.departure(self.name_of(failed[0]), f"it fails: {failed[1]}", math.inf)
        else:
            missing = self.backward(whole, parts)
            gradients = self.gradients(parts)
            departure = departure or missing or self.unreduced(gradients)
        departure = departure or self.miscaptured(whole)
        return Verification(outputs, gradients, departure, self.tolerance, self.compared, self.ill_conditioned)

    def wrong(self, name: str, error: float, gradient: bool = False) -> bool:
        """Whether the error of a captured node's value or gradient exceeds rounding; else records it if ill-conditioned."""
        if error <= self.tolerance:
            return False
        value = self.nodes[name].meta.get("val")
        if not math.isfinite(error) or not isinstance(value, Tensor):
            return True
        if self.moves is None:
            self.moves = self.runs.moved()
        move = self.moves.get(gradient_of_name(name) if gradient else name, 0.0)
        if not error <= rounding(value.dtype) * move:
            return True
        said = self.titles.get(name, name)
        self.ill_conditioned[gradient_of_name(said) if gradient else said] = move
        return False

    def name_of(self, node: fx.Node) -> str:
        """The name of the captured node that a sharded node belongs to."""
        return note_of(node).operator or note_of(node).tensor or node.name

    def checked(self, parts: Mapping[fx.Node, Any], gradient: bool) -> Iterator[tuple[fx.Node, str, Layout]]:
        """Yields (sharded node, captured value that it holds, layout of that or of its gradient), in graph order."""
        for node in self.graph.nodes:
            if node not in parts or not isinstance(parts[node], Parts) or not isinstance(parts[node][0], Tensor):
                continue
            note = note_of(node)
            if len(note.layouts) != 1:
                continue
            (layout,) = note.layouts
            if gradient:
                layout = note.gradient or gradient_of(layout)
            # Partial sums of chunks are compared after they have been summed.
            virtual = layout[len(self.mesh) :]
            if not virtual or (note.chunk is not None and not any(isinstance(p, Partial) for p in virtual)):
                yield node, note.operator or note.tensor, layout

    def forward(self, whole: Mapping[str, Any], parts: Mapping[fx.Node, Any]) -> Departure | None:
        """The first value in graph order that is wrong."""
        for node, name, layout in self.checked(parts, gradient=False):
            error = self.error([p.detach() for p in parts[node]], whole[name], layout, chunk=note_of(node).chunk or ())
            if not self.wrong(name, error):
                continue
            if note_of(node).moves:
                return self.departure(name, f"its reshard {self.change(node)} gives other values", error)
            missing = self.missing(node)
            if missing is not None:
                return self.departure(missing, f"its reshard for {name} is missing or another's", error)
            return self.departure(name, f"its result, {self.said(layout)}, has other values", error)
        return None

    def missing(self, node: fx.Node) -> str | None:
        """The first operand whose reshard an operator does not read, or for which it reads another tensor, if any."""
        name = note_of(node).operator
        strategy, operands = self.rewritten.sharding.strategies[name], operands_of(self.nodes[name])
        given = {self.name_of(n): n for n in node.all_input_nodes}
        for operand, want in zip(operands, strategy.wants, strict=True):
            have = self.layout_of(operand)
            read = given.get(operand.name)
            if have != want.layout[: len(have)] and read is not None and not note_of(read).moves:
                return str(operand.name)
            if operand.name not in given and len(operands) == len(given):
                return str(operand.name)
        return None

    def layout_of(self, node: fx.Node) -> Layout:
        producer, index = value_of(node)
        if producer.op == "placeholder":
            return self.rewritten.resting(producer.name)
        return self.rewritten.sharding.strategies[producer.name].results[index]

    def outputs(self, whole: Mapping[str, Any], parts: Mapping[fx.Node, Any]) -> dict[str, float]:
        """The error of every output that is a tensor."""
        found = {}
        for number, (_, mine, plain) in enumerate(self.runs.leaves()):
            if mine in parts and isinstance(parts[mine], Parts):
                values = [p.detach() for p in parts[mine]]
                found[str(number)] = self.error(values, whole[plain.name], self.rewritten.whole)
                self.wrong(plain.name, found[str(number)])  # records ill-conditioned outputs; forward() finds wrong ones
        return found

    def backward(self, whole: Mapping[str, Any], parts: Mapping[fx.Node, Any]) -> Departure | None:
        """Runs both backward passes. Returns the first wrong gradient, in the order of the backward pass."""
        listened = {node for node, _, _ in self.checked(parts, gradient=True)}
        listened |= {node for node in self.graph.nodes if node.op == "placeholder"}
        error = self.runs.backward(whole, parts, listened)
        if error is not None:
            return Departure("?", "", None, f"the backward pass fails: {error}", math.inf)
        return self.first_wrong(parts)

    def first_wrong(self, parts: Mapping[fx.Node, Any]) -> Departure | None:
        checked = list(self.checked(parts, gradient=True))
        wrong: set[fx.Node] = set()
        for node, name, layout in reversed(checked):
            wanted = self.runs.whole_gradients.get(name, [None])[0]
            given = self.runs.part_gradients.get(node, [])
            if wanted is None or not given or all(g is None for g in given):
                continue
            shapes = [p.shape for p in parts[node]]
            values = [wanted.new_zeros(s) if g is None else g for g, s in zip(given, shapes, strict=True)]
            shared = [user for user in node.users if note_of(user).moves]
            error = self.error(values, wanted, layout, self.runs.cancelled(name), note_of(node).chunk or ())
            if (note_of(node).moves and self.partly_read(node)) or not self.wrong(name, error, gradient=True):
                continue
            wrong.add(node)
            if note_of(node).moves or not shared or any(user in wrong for user in shared):
                readers = [user for user in node.users if note_of(user).operator]
                if readers:
                    return self.departure(
                        self.name_of(readers[0]), f"the gradient that it returns for {name} has other values", error
                    )
            return self.departure(name, "the reshard of its gradient gives other values", error)
        return None

    def partly_read(self, node: fx.Node) -> bool:
        """Whether the tensor is also read in other layouts, each of which has a share of its gradient."""
        return any(
            other is not node and note_of(other).tensor == note_of(node).tensor and note_of(other).moves
            for other in self.graph.nodes
        ) or any(not note_of(user).moves for user in node.args[1].users)  # type: ignore[union-attr]

    def gradients(self, parts: Mapping[fx.Node, Any]) -> dict[str, float]:
        """The error of every parameter's gradient."""
        found = {}
        for node in self.graph.nodes:
            fqn = self.captured.parameters.get(str(node.target)) if node.op == "placeholder" else None
            wanted = self.runs.whole_gradients.get(str(node.target), [None])[0] if fqn else None
            if fqn is None or wanted is None:
                continue
            given = self.runs.part_gradients[node]
            values = [wanted.new_zeros(p.shape) if g is None else g for g, p in zip(given, parts[node], strict=True)]
            layout = self.rewritten.resting(str(node.target))
            found[fqn] = self.error(values, wanted, layout, self.runs.cancelled(str(node.target)))
        return found

    def unreduced(self, gradients: Mapping[str, float]) -> Departure | None:
        """The first parameter whose gradient is wrong although all gradients that contribute to it are correct."""
        for fqn, error in gradients.items():
            if self.wrong(self.names[fqn], error, gradient=True):
                return self.departure(self.names[fqn], "the reshard of its gradient gives other values", error)
        return None

    def miscaptured(self, whole: Mapping[str, Any]) -> Departure | None:
        """The first value or gradient of the captured graph that differs from the model's own."""
        names, found_gradients = self.names, self.runs.whole_gradients
        if any(rule is not None and rule.misreads is not None for rule in map(rule_of, self.nodes.values())):
            whole = self.runs.reference(careful=False)  # with kernels that misread formats, as in the model
            found_gradients = self.runs.plain_backward(whole) if found_gradients else {}
        slopes = {fqn: found_gradients.get(name, [None])[0] for fqn, name in names.items()}
        gradients = {fqn: slope for fqn, slope in slopes.items() if slope is not None}
        least = {fqn: self.runs.cancelled(name) for fqn, name in names.items()}
        found = compared_with_model(
            self.model, self.captured, self.args, self.kwargs, whole, self.runs.weights, gradients, least
        )
        for name, what, error, gradient in found:
            self.compared += 1
            node = names.get(name, name) if gradient else name
            if self.wrong(node, error, gradient):
                return self.departure(node, f"{what} in the captured graph is not the model's own", error)
        return None

    def error(
        self, parts: Sequence[Tensor], whole: Tensor, layout: Layout, least: float = 0.0, chunk: tuple[int, ...] = ()
    ) -> float:
        self.compared += 1
        return self.runs.error(parts, whole, layout, least, chunk)

    def departure(self, name: str, where: str, error: float) -> Departure:
        note = note_of(self.nodes[name]) if name in self.nodes else Note()
        return Departure(self.captured.parameters.get(name, name), note.module, note.source, where, error)

    def change(self, node: fx.Node) -> str:
        have, (want,) = note_of(node).have, note_of(node).layouts
        assert have is not None
        return f"from {self.said(have)} to {self.said(want)}"

    def said(self, layout: Layout) -> str:
        real = len(self.mesh)
        return describe(layout, (*AXIS_NAMES[:real], *("chunks" for _ in layout[real:])))
