"""Is the distributed graph right? Every value of it, forward and backward, beside the plain model's.

The sharded graph runs for all devices in this process, as in ``simulate``; the captured graph runs beside it, whole. An
operator's result must be the whole result in the layout that its strategy says, a reshard's the same tensor in the layout
that is wanted; gradients the same on the way back. The first that is not is where to look.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Partial, Replicate

from autotp.comparing import difference, largest, listen
from autotp.errors import AutotpError
from autotp.lockstep import run_node
from autotp.plan import AXIS_NAMES, Plan
from autotp.rewrite import Rewritten, rewrite
from autotp.verify_capture import compared_with_model
from passes import ops
from passes.factors import value_of
from passes.layout import Layout, describe, take
from passes.ops import Parts
from passes.rules.shapes import operands_of
from passes.shard import place_constants
from passes.strategy import gradient_of
from passes.world import LocalWorld, World

__all__ = ["Departure", "Verification", "verify", "verify_graph"]

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True, slots=True)
class Departure:
    """Where the distributed graph first departs from the model.

    Attributes:
        operator: the captured operator, or parameter, that is to be looked at.
        module: its path in the user's model.
        source: its line, ``file.py:LINE``, if known.
        where: in words: its result, a reshard of its result, or their gradients.
        error: the largest difference over the largest magnitude; infinite where shapes differ or it failed.
    """

    operator: str
    module: str
    source: str | None
    where: str
    error: float


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared. Errors are largest differences over largest magnitudes; a parameter's gradient counts as no
    smaller than the gradients that it sums up, which may cancel out.

    Attributes:
        outputs: number of the output -> its error.
        gradients: name of the parameter -> its gradient's error.
        departure: the first place that is wrong; None where all is right.
        tolerance: errors up to this are rounding.
        compared: how many values and gradients were compared on the way.
    """

    outputs: Mapping[str, float]
    gradients: Mapping[str, float]
    departure: Departure | None
    tolerance: float
    compared: int

    @property
    def right(self) -> bool:
        """Whether outputs, gradients and all between are the model's."""
        return self.departure is None


def verify(
    model: nn.Module,
    plan: Plan,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    tolerance: float | None = None,
) -> Verification:
    """Compares a plan's distributed run with the model's own, operator by operator.

    Args:
        model: the model that was planned, on a real device.
        plan: the plan.
        args, kwargs: inputs, of the shapes that were planned.
        tolerance: relative; left out, by the dtype of the parameters (1e-9 for float64, 1e-4 for float32).

    Returns:
        The errors of outputs and gradients, and the first operator that departs, if one does.

    Raises:
        PlanMismatchError: the plan is for another model or other inputs.
        AutotpError: the model draws random numbers, or is on ``meta``: there is nothing to compare.
    """
    return verify_graph(model, rewrite(model, plan, args, kwargs), args, kwargs, tolerance=tolerance)


def verify_graph(
    model: nn.Module,
    rewritten: Rewritten,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    tolerance: float | None = None,
) -> Verification:
    """``verify`` for a graph that was rewritten already, and perhaps changed since."""
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
        self.graph, self.mesh = rewritten.graph_module.graph, rewritten.sharding.mesh
        self.extended = self.mesh + rewritten.chunks
        self.world: World = LocalWorld(self.mesh)
        if any(node.target is ops.next_seed for node in self.graph.nodes):
            raise AutotpError(
                "the model draws random numbers (dropout), so no two runs agree; set rates to 0, plan it, and verify that"
            )
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if any(tensor.is_meta for tensor in state.values()):
            raise AutotpError("the model is on meta: it has no values to compare; build it on a real device")
        captured = self.captured
        self.inputs: dict[str, Tensor] = {name: state[fqn] for name, fqn in captured.parameters.items()}
        self.inputs |= {name: state[fqn].clone() for name, fqn in captured.buffers.items()}
        self.inputs |= dict(captured.constants)
        flat = captured.signature.flatten(tuple(args), dict(kwargs or {}))
        self.inputs |= dict(zip(captured.inputs, flat, strict=True))
        self.inputs = {name: self._leaf(name, tensor) for name, tensor in self.inputs.items()}
        dtypes = [t.dtype for t in self.inputs.values() if t.is_floating_point()]
        if tolerance is not None and not tolerance >= 0:
            raise AutotpError(f"tolerance {tolerance!r}: give a number that is not negative, or leave it out")
        usual = max((_TOLERANCES.get(dtype, 1e-4) for dtype in dtypes), default=1e-9)
        self.tolerance = usual if tolerance is None else tolerance
        device = next((t.device for t in self.inputs.values()), torch.device("cpu"))
        for graph in (self.graph, captured.graph_module.graph):
            place_constants(graph, device)
        self.nodes = {node.name: node for node in captured.graph_module.graph.nodes}
        self.model, self.args, self.kwargs = model, args, kwargs
        self.weights: dict[int, Tensor] = {}
        self.whole_gradients: dict[str, list[Tensor | None]] = {}
        self.compared = 0
        self.failure: Departure | None = None

    def _leaf(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(name in self.captured.parameters and tensor.requires_grad)

    def run(self) -> Verification:
        whole = self.reference()
        parts = self.distributed()
        departure = self.forward(whole, parts) or self.failure
        outputs, gradients = self.outputs(whole, parts), {}
        if self.failure is None:
            missing = self.backward(whole, parts)
            gradients = self.gradients(whole, parts)
            departure = departure or missing or self.unreduced(gradients)
        departure = departure or self.miscaptured(whole)
        return Verification(outputs, gradients, departure, self.tolerance, self.compared)

    def reference(self) -> dict[str, Any]:
        """Every value of the captured graph, by node name."""
        found: dict[str, Any] = {}

        class Keeping(fx.Interpreter):
            def run_node(self, node: fx.Node) -> Any:
                found[node.name] = super().run_node(node)
                return found[node.name]

        module = self.captured.graph_module
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        Keeping(module, garbage_collect_values=False).run(*(self.inputs[name] for name in names))
        return found

    def distributed(self) -> dict[fx.Node, Any]:
        """Every value of the sharded graph on every device."""
        resting, everywhere = self.rewritten.sharding.resting, self.rewritten.whole
        found: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                name = str(node.target)
                layout, tensor = resting.get(name, everywhere), self.inputs[name]
                found[node] = Parts(
                    take(tensor.detach(), layout, self.mesh, at).clone().requires_grad_(tensor.requires_grad)
                    for at in self.world.hosted
                )
            elif node.op == "get_attr":
                found[node] = self.world
            elif node.op != "output":
                try:
                    found[node] = run_node(node, found, self.world)
                except Exception as error:  # noqa: BLE001 - whatever a wrong graph raises is the finding
                    self.failure = self.departure(self.name_of(node), f"it fails: {error}", math.inf)
                    break
        return found

    def name_of(self, node: fx.Node) -> str:
        """The captured node that a sharded one belongs to."""
        return str(node.meta.get("operator") or node.meta.get("tensor") or node.name)

    def checked(self, parts: Mapping[fx.Node, Any], gradient: bool) -> Iterator[tuple[fx.Node, str, Layout]]:
        """(sharded node, captured value that it holds, in which layout), in the graph's order."""
        for node in self.graph.nodes:
            if node not in parts or not isinstance(parts[node], Parts) or not isinstance(parts[node][0], Tensor):
                continue
            if "want" in node.meta:
                want, name = node.meta["want"], node.meta["tensor"]
                layout = want.gradient if gradient else want.layout
            elif "strategy" in node.meta and len(node.meta["strategy"].results) == 1:
                layout, name = node.meta["strategy"].results[0], node.meta["operator"]
                layout = gradient_of(layout) if gradient else layout
            else:
                continue
            # What chunks have yet to sum up is compared when they have.
            virtual = layout[len(self.mesh) :]
            if not virtual or ("chunk" in node.meta and not any(isinstance(p, Partial) for p in virtual)):
                yield node, name, layout

    def forward(self, whole: Mapping[str, Any], parts: Mapping[fx.Node, Any]) -> Departure | None:
        """The first value that departs."""
        for node, name, layout in self.checked(parts, gradient=False):
            error = self.error([p.detach() for p in parts[node]], whole[name], layout, chunk=node.meta.get("chunk", ()))
            if error <= self.tolerance:
                continue
            if "want" in node.meta:
                return self.departure(name, f"its reshard {self.change(node)} gives other values", error)
            missing = self.missing(node)
            if missing is not None:
                return self.departure(missing, f"its reshard for {name} is missing or another's", error)
            return self.departure(name, f"its result, {self.said(layout)}, has other values", error)
        return None

    def missing(self, node: fx.Node) -> str | None:
        """The tensor that an operator reads in another layout than its strategy wants."""
        strategy = node.meta["strategy"]
        operands = operands_of(self.nodes[node.meta["operator"]])
        given = {self.name_of(n): n for n in node.all_input_nodes}
        for operand, want in zip(operands, strategy.wants, strict=True):
            have = self.layout_of(operand)
            read = given.get(operand.name)
            if have != want.layout[: len(have)] and read is not None and "want" not in read.meta:
                return str(operand.name)
            if operand.name not in given and len(operands) == len(given):
                return str(operand.name)
        return None

    def layout_of(self, node: fx.Node) -> Layout:
        producer, index = value_of(node)
        if producer.op == "placeholder":
            return self.rewritten.sharding.resting.get(producer.name, self.rewritten.whole)
        return self.rewritten.sharding.strategies[producer.name].results[index]

    def outputs(self, whole: Mapping[str, Any], parts: Mapping[fx.Node, Any]) -> dict[str, float]:
        """The error of every output that is a tensor."""
        found = {}
        for number, (_, mine, plain) in enumerate(self.leaves()):
            if mine in parts and isinstance(parts[mine], Parts):
                values = [p.detach() for p in parts[mine]]
                found[str(number)] = self.error(values, whole[plain.name], self.rewritten.whole)
        return found

    def leaves(self) -> Iterator[tuple[int, fx.Node, fx.Node]]:
        """The numbers and nodes of the outputs, sharded and captured."""
        given: Any = self.captured.graph_module.graph.output_node().args[0]
        made: Any = self.graph.output_node().args[0]
        for number, (mine, plain) in enumerate(zip(made[: self.captured.outputs], given, strict=False)):
            if isinstance(mine, fx.Node) and isinstance(plain, fx.Node) and isinstance(plain.meta.get("val"), Tensor):
                yield number, mine, plain

    def backward(self, whole: Mapping[str, Any], parts: Mapping[fx.Node, Any]) -> Departure | None:
        """The first gradient that departs, from the outputs back."""
        self.whole_gradients = listen({name: [value] for name, value in whole.items() if isinstance(value, Tensor)})
        listened = {node: parts[node] for node, _, _ in self.checked(parts, gradient=True)}
        listened |= {n: parts[n] for n in self.graph.nodes if n.op == "placeholder"}
        self.part_gradients = listen(listened)
        generator = torch.Generator().manual_seed(0)
        plain: list[Tensor] = []
        mine: list[list[Tensor]] = []
        for number, node, original in self.leaves():
            value = whole[original.name]
            if value.requires_grad and node in parts and all(part.shape == value.shape for part in parts[node]):
                weight = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
                self.weights[number] = weight
                plain.append((value * weight).sum())
                mine.append([(part * weight).sum() for part in parts[node]])
        if not plain:
            return None
        torch.stack([p.double() for p in plain]).sum().backward()
        try:
            torch.autograd.backward([loss for losses in mine for loss in losses])
        except Exception as error:  # noqa: BLE001 - as in the forward pass
            return Departure("?", "", None, f"the backward pass fails: {error}", math.inf)
        return self.first_wrong(parts)

    def first_wrong(self, parts: Mapping[fx.Node, Any]) -> Departure | None:
        checked = list(self.checked(parts, gradient=True))
        wrong: dict[fx.Node, float] = {}
        for node, name, layout in reversed(checked):
            wanted = self.whole_gradients.get(name, [None])[0]
            given = self.part_gradients.get(node, [])
            if wanted is None or not given or all(g is None for g in given):
                continue
            shapes = [p.shape for p in parts[node]]
            values = [wanted.new_zeros(s) if g is None else g for g, s in zip(given, shapes, strict=True)]
            shared = [user for user in node.users if "want" in user.meta]
            error = self.error(values, wanted, layout, self.cancelled(name), node.meta.get("chunk", ()))
            if error <= self.tolerance or ("want" in node.meta and self.partly_read(node)):
                continue
            wrong[node] = error
            if "want" in node.meta or not shared or any(user in wrong for user in shared):
                readers = [user for user in node.users if "operator" in user.meta]
                if readers:
                    return self.departure(
                        self.name_of(readers[0]), f"the gradient that it returns for {name} has other values", error
                    )
            return self.departure(name, "the reshard of its gradient gives other values", error)
        return None

    def partly_read(self, node: fx.Node) -> bool:
        """Whether other layouts of the same tensor are read too, which have a share of its gradient each."""
        return any(
            other is not node and other.meta.get("tensor") == node.meta["tensor"] and "want" in other.meta
            for other in self.graph.nodes
        ) or any("want" not in user.meta and user.op != "output" for user in node.args[1].users)  # type: ignore[union-attr]

    def gradients(self, whole: Mapping[str, Any], parts: Mapping[fx.Node, Any]) -> dict[str, float]:
        """The error of every parameter's gradient."""
        found = {}
        for node in self.graph.nodes:
            fqn = self.captured.parameters.get(str(node.target)) if node.op == "placeholder" else None
            wanted = self.whole_gradients.get(str(node.target), [None])[0] if fqn else None
            if fqn is None or wanted is None:
                continue
            given = self.part_gradients[node]
            values = [wanted.new_zeros(p.shape) if g is None else g for g, p in zip(given, parts[node], strict=True)]
            layout = self.rewritten.sharding.resting.get(str(node.target), self.rewritten.whole)
            found[fqn] = self.error(values, wanted, layout, self.cancelled(str(node.target)))
        return found

    def unreduced(self, gradients: Mapping[str, float]) -> Departure | None:
        """A parameter whose gradient departs although all that it is made of is right."""
        names = {fqn: name for name, fqn in self.captured.parameters.items()}
        for fqn, error in gradients.items():
            if not error <= self.tolerance:
                return self.departure(names[fqn], "the reshard of its gradient gives other values", error)
        return None

    def miscaptured(self, whole: Mapping[str, Any]) -> Departure | None:
        """The first value or gradient of the captured graph that is not the model's own."""
        names = {fqn: name for name, fqn in self.captured.parameters.items()}
        slopes = {fqn: self.whole_gradients.get(name, [None])[0] for fqn, name in names.items()}
        gradients = {fqn: slope for fqn, slope in slopes.items() if slope is not None}
        least = {fqn: self.cancelled(name) for fqn, name in names.items()}
        found = compared_with_model(
            self.model, self.captured, self.args, self.kwargs, whole, self.weights, gradients, least
        )
        for name, what, error in found:
            self.compared += 1
            if not error <= self.tolerance:
                return self.departure(names.get(name, name), f"{what} in the captured graph is not the model's own", error)
        return None

    def cancelled(self, name: str) -> float:
        """The largest gradient among those that a parameter's sums up; 0 for other values.

        They may cancel out, as for the bias of keys, which a softmax does not see: what is left is rounding of its terms.
        """
        if name not in self.captured.parameters:
            return 0.0
        users = list(self.nodes[name].users)
        # What an operator with several results gives are its readers' values.
        results = [made for user in users for made in ([user] if user.name in self.whole_gradients else user.users)]
        found = [gradient for made in results for gradient in self.whole_gradients.get(made.name, [])]
        gradients = [gradient for gradient in found if gradient is not None and gradient.numel()]
        return max((float(g.abs().max()) for g in gradients), default=0.0)

    def error(
        self, parts: Sequence[Tensor], whole: Tensor, layout: Layout, least: float = 0.0, chunk: tuple[int, ...] = ()
    ) -> float:
        """The largest difference of any device's part from what it should hold, over the largest magnitude or ``least``.

        Where devices work in chunks, parts are those of one ``chunk``.
        """
        self.compared += 1
        kept = tuple(Replicate() if isinstance(p, Partial) else p for p in layout)
        partial = [axis for axis, p in enumerate(layout) if isinstance(p, Partial)]
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, at in enumerate(self.world.hosted):
            groups.setdefault(tuple(c for a, c in enumerate(at) if a not in partial), []).append(index)
        whole = whole.detach()
        scale = max(largest(whole), least)
        worst = 0.0
        for members in groups.values():
            at = (*self.world.hosted[members[0]], *chunk)
            expected = take(whole, kept, self.extended[: len(kept)], at)
            given = [parts[i] for i in members]
            if any(part.shape != expected.shape for part in given):
                return math.inf
            if not expected.numel():
                continue
            if not whole.is_floating_point():
                worst = max(worst, math.inf if not torch.equal(given[0], expected) else 0.0)
                continue
            worst = max(worst, difference(torch.stack(given).sum(0) if partial else given[0], expected, scale))
        return worst

    def departure(self, name: str, where: str, error: float) -> Departure:
        meta = self.nodes[name].meta if name in self.nodes else {}
        name = self.captured.parameters.get(name, name)
        return Departure(name, str(meta.get("module", "")), meta.get("source"), where, error)

    def change(self, node: fx.Node) -> str:
        return f"from {self.said(node.meta['have'])} to {self.said(node.meta['want'].layout)}"

    def said(self, layout: Layout) -> str:
        real = len(self.mesh)
        return describe(layout, (*AXIS_NAMES[:real], *("chunks" for _ in layout[real:])))
