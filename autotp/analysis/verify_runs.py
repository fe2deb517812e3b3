"""The two runs that ``verify`` compares: of the captured graph, unsharded, and of the sharded graph, for all devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Partial, Replicate

from autotp.analysis.compare import difference, largest, listen
from autotp.analysis.conditioning import moved, weighed
from autotp.errors import AutotpError
from autotp.runtime.interpreter import Interpreter, execute
from autotp.runtime.programs.program import named_state
from autotp.runtime.rewrite import Rewritten
from passes.graph import differentiable
from passes.layouts.layout import Layout, take
from passes.rules.table import rule_of
from passes.sharding.guards import relies_on_copies
from passes.sharding.shard import place_constants
from passes.tensors import require_memory
from passes.world import ops
from passes.world.ops import Parts
from passes.world.world import LocalWorld, World, groups

__all__ = ["Runs", "gradient_of_name"]


def gradient_of_name(name: str) -> str:
    """The name of a value's gradient, among the names of values."""
    return f"gradient of {name}"


class _FailedNode(Exception):
    """A node of the sharded graph failed. ``args`` has the node, and the exception that it raised."""


def _in_one_format(node: fx.Node, values: Mapping[str, Any]) -> Any:
    """Runs a captured node with operands and its result in clear memory formats: its kernel may misread those of the plain
    model, too, or rely on a copy that the capture has left out.
    """
    world = LocalWorld((1,))
    args: Any
    kwargs: Any
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: values[n.name])
    result = node.target(*(ops.in_one_format(world, a) if isinstance(a, Tensor) else a for a in args), **kwargs)  # type: ignore[operator]
    if isinstance(result, Tensor):
        return ops.in_one_format(world, result)
    first = isinstance(result, (list, tuple)) and result and isinstance(result[0], Tensor)
    return (ops.in_one_format(world, result[0]), *result[1:]) if first else result


class Runs:
    """Runs a captured graph, and the sharded graph that was made of it, on the same inputs.

    Attributes:
        inputs: placeholder name -> parameter, buffer, constant or input.
        nodes: captured nodes by name.
        world: a world that hosts all devices.
        weights: number of the output -> the weights of its elements in the loss whose gradients are compared.
        whole_gradients: name of the captured node -> its gradient, after the backward pass.
        part_gradients: sharded node -> its gradient on every device, after the backward pass.
    """

    def __init__(
        self, model: nn.Module, rewritten: Rewritten, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> None:
        self.rewritten, self.captured = rewritten, rewritten.captured
        self.graph, self.mesh = rewritten.graph_module.graph, rewritten.sharding.mesh
        self.world: World = LocalWorld(self.mesh)
        if any(node.target is ops.next_seed for node in self.graph.nodes):
            raise AutotpError(
                "the model draws random numbers (dropout), so no two runs agree; set rates to 0, plan it, and verify that"
            )
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise AutotpError("the model is on meta: it has no values to compare; build it on a real device")
        captured, state = self.captured, named_state(model)
        require_memory(state)
        values = captured.values(state, args, kwargs or {})
        self.inputs = {name: self._leaf(name, tensor) for name, tensor in values.items()}
        device = next((t.device for t in self.inputs.values()), torch.device("cpu"))
        for graph in (self.graph, captured.graph_module.graph):
            place_constants(graph, device)
        self.nodes = {node.name: node for node in captured.graph_module.graph.nodes}
        self.weights: dict[int, Tensor] = {}
        self.whole_gradients: dict[str, list[Tensor | None]] = {}
        self.part_gradients: dict[fx.Node, list[Tensor | None]] = {}

    def _leaf(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(name in self.captured.parameters and tensor.requires_grad)

    def reference(self, inputs: Mapping[str, Tensor] | None = None, *, careful: bool = True) -> dict[str, Any]:
        """Runs the captured graph. Returns all its values by node name.

        Args:
            inputs: by placeholder name, in place of ``self.inputs``.
            careful: whether kernels that misread some memory formats get others; if not, they err as in the model.
        """
        # New leaves: those of another run have hooks, which would add this run's gradients to that run's.
        given = {name: x.detach().requires_grad_(x.requires_grad) for name, x in (inputs or self.inputs).items()}
        found: dict[str, Any] = {}

        def keep(node: fx.Node, run: Callable[[], Any]) -> Any:
            rule = rule_of(node) if node.op == "call_function" else None
            misread = careful and rule is not None and rule.misreads is not None and rule.misreads(node)
            misread |= relies_on_copies(node)
            found[node.name] = _in_one_format(node, found) if misread else run()
            return found[node.name]

        module = self.captured.graph_module
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        Interpreter(module, keep).run(*(given[name] for name in names))
        return found

    def distributed(self) -> tuple[dict[fx.Node, Any], tuple[fx.Node, Exception] | None]:
        """Runs the sharded graph. Returns all its values on every device and, if a node fails, that and its exception."""
        found: dict[fx.Node, Any] = {}

        def keep(node: fx.Node, run: Callable[[], Any]) -> Any:
            try:
                found[node] = run()
            except Exception as error:  # any exception is a finding about the graph
                raise _FailedNode(node, error) from error
            return found[node]

        inputs = {}
        for name, tensor in self.inputs.items():
            layout = self.rewritten.resting(name)
            parts = (take(tensor.detach(), layout, self.mesh, at).clone() for at in self.world.hosted)
            inputs[name] = Parts(part.requires_grad_(tensor.requires_grad) for part in parts)
        try:
            execute(self.rewritten.graph_module, self.world, inputs, keep)
        except _FailedNode as failed:
            return found, failed.args  # type: ignore[return-value]
        return found, None

    def leaves(self) -> Iterator[tuple[int, fx.Node, fx.Node]]:
        """Yields the number of each output that is a tensor, its sharded node, and its captured node."""
        given: Any = self.captured.graph_module.graph.output_node().args[0]
        made: Any = self.graph.output_node().args[0]
        for number, (mine, plain) in enumerate(zip(made[: self.captured.outputs], given, strict=False)):
            if isinstance(mine, fx.Node) and isinstance(plain, fx.Node) and isinstance(plain.meta.get("val"), Tensor):
                yield number, mine, plain

    def weigh(self, whole: Mapping[str, Any]) -> None:
        """Draws random weights for the elements of differentiable outputs in the loss."""
        generator = torch.Generator().manual_seed(0)
        for number, _, plain in self.leaves():
            value = whole[plain.name]
            if value.requires_grad:
                self.weights[number] = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)

    def backward(
        self, whole: Mapping[str, Any], parts: Mapping[fx.Node, Any], listened: Iterable[fx.Node]
    ) -> Exception | None:
        """Runs both backward passes. Returns the exception that the sharded one raised, if any.

        Args:
            whole: values of the captured graph, by node name.
            parts: values of the sharded graph on every device.
            listened: sharded nodes whose gradients are collected.
        """
        self.part_gradients = listen({node: parts[node] for node in listened})
        mine = []
        for number, node, plain in self.leaves():
            if number not in self.weights:
                continue
            weight = self.weights[number]
            if node in parts and all(part.shape == whole[plain.name].shape for part in parts[node]):
                mine += [weighed(part, weight) for part in parts[node]]
            else:
                del self.weights[number]
        self.whole_gradients = self.plain_backward(whole)
        if not self.weights:
            return None
        try:
            torch.autograd.backward(mine)
        except Exception as error:  # noqa: BLE001 - as in the forward pass
            return error
        return None

    def plain_backward(self, whole: Mapping[str, Any]) -> dict[str, list[Tensor | None]]:
        """Runs the captured graph's backward pass. Returns the gradients of its values, by node name, in lists of one."""
        found = listen({name: [value] for name, value in whole.items() if isinstance(value, Tensor)})
        plain = [weighed(whole[node.name], self.weights[n]) for n, _, node in self.leaves() if n in self.weights]
        if plain:
            torch.stack([p.double() for p in plain]).sum().backward()
        return found

    def moved(self) -> dict[str, float]:
        """The relative change of the captured graph's values, and of their gradients, when parameters and inputs change by
        one unit in the last place (see `autotp.analysis.conditioning.moved`).
        """
        movable = {*self.captured.parameters, *self.captured.inputs}
        plain = self.plain_backward(self.reference())
        scales = {gradient_of_name(name): self.cancelled(name, plain) for name in self.captured.parameters}

        def run(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
            whole = self.reference({**self.inputs, **state})
            slopes = self.plain_backward(whole)
            values = {name: value for name, value in whole.items() if isinstance(value, Tensor)}
            return values | {gradient_of_name(name): slope for name, (slope,) in slopes.items() if slope is not None}

        return moved(run, {name: tensor for name, tensor in self.inputs.items() if name in movable}, least=scales)

    def cancelled(self, name: str, gradients: Mapping[str, Sequence[Tensor | None]] | None = None) -> float:
        """The largest magnitude of the gradients that are summed into a parameter's gradient; 0 for other values.

        They may cancel out, as for the bias of keys, to which a softmax is invariant: the rest is rounding of the terms.
        """
        if name not in self.captured.parameters:
            return 0.0
        given = self.whole_gradients if gradients is None else gradients
        users = list(self.nodes[name].users)
        # The results of an operator with several results are its users.
        results = [made for user in users for made in ([user] if user.name in given else user.users)]
        found = [gradient for made in results for gradient in given.get(made.name, [])]
        sizes = [float(g.abs().max()) for g in found if g is not None and g.numel()]
        return max(sizes, default=0.0)

    def error(
        self, parts: Sequence[Tensor], whole: Tensor, layout: Layout, least: float = 0.0, chunk: tuple[int, ...] = ()
    ) -> float:
        """The largest difference of any device's part from its expected value, over the largest magnitude or ``least``.

        Infinite if shapes differ, 1 if integers differ. If devices work in chunks, the parts are those of one ``chunk``,
        given by its index on each virtual axis.
        """
        extended = self.mesh + self.rewritten.chunks
        kept = tuple(Replicate() if isinstance(p, Partial) else p for p in layout)
        partial = [axis for axis, p in enumerate(layout) if isinstance(p, Partial)]
        whole = whole.detach()
        scale = max(largest(whole), least)
        worst = 0.0
        for members in groups(self.world.hosted, partial):
            at = (*self.world.hosted[members[0]], *chunk)
            expected = take(whole, kept, extended[: len(kept)], at)
            given = [parts[i] for i in members]
            if any(part.shape != expected.shape for part in given):
                return math.inf
            if not expected.numel():
                continue
            if not differentiable(whole):
                worst = max(worst, float(not torch.equal(given[0], expected)))
                continue
            worst = max(worst, difference(torch.stack(given).sum(0) if partial else given[0], expected, scale))
        return worst
