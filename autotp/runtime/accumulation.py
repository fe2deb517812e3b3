"""Gradient accumulation over several micro-batches with one reduction: ``no_sync()`` of distributed and simulated modules.

In a step under ``no_sync()`` (an inner step), gradients stop where their reduction would begin
(`passes.sharding.deferral`), at leaf tensors, whose ``.grad`` accumulates over several backward passes. The first pass
outside of ``no_sync()`` reduces the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from autotp.errors import AutotpError
from autotp.runtime.compiled import Variant
from autotp.runtime.interpreter import Interpreter, execute, named
from autotp.runtime.schedules import Schedules
from passes.layouts.layout import take
from passes.sharding.deferral import Cut, Deferred, defer
from passes.torch_internals import is_profiling, queue_callback, version
from passes.world.ops import Parts
from passes.world.regather import Regather
from passes.world.world import World

__all__ = ["Accumulation"]


class Accumulation:
    """The unreduced gradients of an accumulated step, on the devices of this process.

    Args:
        sharded: the sharded graph of one step.
        parameters: placeholder -> the parameter's name.
        world: the world in which the graph runs.
        regathers: whether the backward pass gathers parameters again, rather than that autograd saves the gathered copies.
            Each saved tensor is gathered separately, so autograd must save the same tensors on all devices.
    """

    def __init__(self, sharded: fx.GraphModule, parameters: Mapping[str, str], world: World, *, regathers: bool) -> None:
        self.sharded, self.parameters, self.world, self.regathers = sharded, parameters, world, regathers
        sharded.world = world
        self.used = False
        self._sinks: dict[str, list[Tensor]] = {}
        self._versions: Mapping[str, int] = {}
        self._trained: Mapping[str, bool] = {}

    @cached_property
    def deferred(self) -> Deferred:
        """The graphs of an accumulated step, made on first use."""
        made = defer(self.sharded, self.parameters)
        made.inner.world = made.last.world = made.mirrors.world = self.world
        return made

    @property
    def waiting(self) -> bool:
        """Whether there are unreduced gradients."""
        return any(map(self._waits, self._sinks))

    def _waits(self, name: str) -> bool:
        return any(sink.grad is not None for sink in self._sinks[name])

    def defers(self, *, syncing: bool) -> bool:
        """Whether a forward pass that begins now uses the ``deferred`` graphs.

        True for inner steps, and while there are unreduced gradients; always false if grad mode is off.
        """
        return torch.is_grad_enabled() and (not syncing or self.waiting)

    def anew(self) -> Accumulation:
        """An ``Accumulation`` for a copy of the module, which has the same graph and no gradients yet."""
        return Accumulation(self.sharded, self.parameters, self.world, regathers=self.regathers)

    def drop(self) -> None:
        """Discards the unreduced gradients."""
        for sinks in self._sinks.values():
            for sink in sinks:
                sink.grad = None

    def scheduled(
        self, schedules: Schedules, values: Mapping[str, Any], parameters: Mapping[str, Tensor], *, syncing: bool
    ) -> Sequence[Any] | None:
        """Runs a forward pass with scheduled graphs and returns its outputs; None if the graph cannot be scheduled.

        Args:
            schedules: the schedules of the sharded graph.
            values, parameters: see ``values``.
            syncing: whether the pass reduces gradients.
        """
        if not self.defers(syncing=syncing):
            return schedules.run(values)
        ending = self.values(values, parameters)
        if not syncing:
            return schedules.run(ending, Variant(self.deferred.inner, {}, self.take))
        sinks = {cut.name: ending[cut.name] for cut in self.deferred.cuts}
        return schedules.run(values, Variant(self.deferred.last, sinks, self.take))

    def eager(self, values: Mapping[str, Any], parameters: Mapping[str, Tensor], *, syncing: bool) -> Sequence[Any]:
        """Runs a forward pass with autograd, without a schedule, and returns its outputs; see ``scheduled``."""
        graph, given = self.sharded, values
        if self.defers(syncing=syncing):
            graph, given = self.deferred.inner, self.values(values, parameters)
        if any(isinstance(value, Parts) for value in given.values()):
            return execute(graph, self.world, given)
        with Regather(self.world) if self.regathers and torch.is_grad_enabled() else nullcontext():
            run = Interpreter(graph, named).run if is_profiling() else graph
            found: Sequence[Any] = run(*_in_order(graph, given))
        return found

    def take(self, name: str) -> list[Tensor]:
        """Removes and returns a cut's unreduced gradient, one tensor per device of this process; empty if there is none."""
        sinks = self._sinks[name]
        found = [sink.grad for sink in sinks]
        for sink in sinks:
            sink.grad = None
        if all(gradient is None for gradient in found):
            return []
        return [
            torch.zeros_like(s, memory_format=torch.contiguous_format) if g is None else g
            for g, s in zip(found, sinks, strict=True)
        ]

    def check(self, parameters: Mapping[str, Tensor]) -> None:
        """Checks that the parameters have not changed since the unreduced gradients were computed.

        Args:
            parameters: see ``values``.

        Raises:
            AutotpError: a parameter was changed in place, frozen or unfrozen.
        """
        if not self.waiting:
            return
        held = [name for cut in self.deferred.cuts if self._waits(cut.name) for name in cut.parameters]
        if other := [n for n in held if parameters[n].requires_grad != self._trained[n]]:
            now = "trained" if parameters[other[0]].requires_grad else "frozen"
            raise AutotpError(
                f"{self.parameters[other[0]]} is {now} now, while gradients of steps under no_sync() wait to be reduced: "
                "freeze and unfreeze parameters between accumulated steps, or drop these gradients by zero_grad()"
            )
        changed = [self.parameters[n] for n, parameter in parameters.items() if version(parameter) != self._versions.get(n)]
        if changed:
            more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
            raise AutotpError(
                f"parameters were changed while gradients of steps under no_sync() wait to be reduced: "
                f"{', '.join(changed[:4])}{more}. Run the "
                "last forward and backward pass of an accumulated step outside no_sync(), before optimizer.step(); or "
                "drop these gradients by the module's zero_grad()"
            )

    def values(self, values: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns the inputs of the graph of inner steps, and records the parameters' versions for ``check``.

        Args:
            values: placeholder of the sharded graph -> its value, a tensor or ``Parts``.
            parameters: placeholder -> the module's own parameter, of which the value is a part.

        Raises:
            AutotpError: see ``check``.
        """
        self.used = True
        self.check(parameters)
        self._versions = {name: version(parameter) for name, parameter in parameters.items()}
        self._trained = {name: parameter.requires_grad for name, parameter in parameters.items()}
        found = {name: _detached(value) if name in self.parameters else value for name, value in values.items()}
        return found | {cut.name: self._sink(cut, values) for cut in self.deferred.cuts}

    def _sink(self, cut: Cut, values: Mapping[str, Any]) -> Any:
        """The leaf tensors that accumulate a cut's gradient. They have its local shapes, but the memory of one element."""
        first = values[cut.parameters[0]]
        parts = list(first) if isinstance(first, Parts) else [first]
        if cut.name not in self._sinks:
            shapes = [part.shape for part in parts]
            if cut.layout is not None:
                whole, mesh = torch.empty(cut.value.shape, device="meta"), self.world.mesh_shape
                layout = cut.layout[: len(mesh)]  # drops the virtual axes of chunks, which do not split these values
                shapes = [take(whole, layout, mesh, at).shape for at in self.world.hosted]
            like = parts[0].new_empty((), dtype=cut.value.dtype)
            self._sinks[cut.name] = [like.detach().expand(shape) for shape in shapes]
        trained = any(_requires_grad(values[name]) for name in cut.parameters)
        sinks = [sink.requires_grad_(trained) for sink in self._sinks[cut.name]]
        return Parts(sinks) if isinstance(first, Parts) else sinks[0]

    def watch(self, outputs: Sequence[Any], values: Callable[[], Mapping[str, Any]]) -> None:
        """Makes a backward pass from any of these outputs reduce all unreduced gradients when it ends.

        Args:
            outputs: the outputs of a pass that is no inner step.
            values: returns placeholder -> the parameter's part, whose gradient flows to the parameter.
        """

        def begun(_: Any) -> None:
            queue_callback(lambda: self.reduce(values))

        for node in {output.grad_fn for output in outputs if isinstance(output, Tensor) and output.grad_fn is not None}:
            node.register_prehook(begun)

    def reduce(self, values: Callable[[], Mapping[str, Any]]) -> None:
        """Reduces the unreduced gradients, and adds them to the parameters' ``.grad``.

        Args:
            values: see ``watch``.
        """
        if not self.waiting:
            return
        with torch.enable_grad():  # grad mode is off in a callback at the end of a backward pass
            mirrors, given = self.deferred.mirrors, dict(values())
        hosted = any(isinstance(value, Parts) for value in given.values())
        for cut in self.deferred.cuts:
            sinks = self._sinks[cut.name]
            given[cut.name] = Parts(sink.detach() for sink in sinks) if hosted else sinks[0].detach()
        with torch.enable_grad():
            found = execute(mirrors, self.world, given) if hosted else mirrors(*_in_order(mirrors, given))
        ends, gradients = [], []
        for cut, value in zip(self.deferred.cuts, found, strict=True):
            for part, sink in zip(value if hosted else [value], self._sinks[cut.name], strict=True):
                if sink.grad is not None and part.requires_grad:
                    ends.append(part)
                    gradients.append(sink.grad)
                sink.grad = None
        torch.autograd.backward(ends, gradients)


def _in_order(module: fx.GraphModule, values: Mapping[str, Any]) -> list[Any]:
    """The values of a graph's placeholders, in the graph's order."""
    return [values[str(node.target)] for node in module.graph.nodes if node.op == "placeholder"]


def _detached(value: Any) -> Any:
    return Parts(part.detach() for part in value) if isinstance(value, Parts) else value.detach()


def _requires_grad(value: Any) -> bool:
    return bool((value[0] if isinstance(value, Parts) else value).requires_grad)
