"""Prices: what strategies and reshards cost on a mesh, from the cost model's expressions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.distributed.tensor import Replicate

from costmodel import Topology, collectives, compute, memory, overlap
from passes.codes import local_elements
from passes.factors import Operator
from passes.layout import Layout, local_shape
from passes.reshard import COMMUNICATING, moves
from passes.rules.shapes import operands_of, results_of
from passes.rules.table import name_of, rule_of
from passes.space import Space
from passes.strategy import Strategy, Want, gradient_of
from passes.virtual import sums_first

__all__ = ["Price", "Prices", "flop_of", "kind_of"]

#: An all_reduce goes in stages where it then takes at most this share of its time: there are more messages to wait for.
_STAGED = 0.95


class Price(tuple):
    """(compute seconds, communication seconds, bytes received, contended seconds) of one step on one device.

    Contended are those of the communication's seconds that take the processors' time. Behind them is how much of the three
    kinds of seconds belongs to the backward pass: (compute, communication, contended).
    """

    __slots__ = ()

    def __new__(
        cls,
        compute_seconds: float,
        communication_seconds: float,
        received: float,
        contended: float = 0.0,
        *backward: float,
    ) -> Price:
        """The seven figures; those of the backward pass are 0 unless given."""
        return super().__new__(
            cls, (compute_seconds, communication_seconds, received, contended, *(backward or (0.0, 0.0, 0.0)))
        )

    @property
    def seconds(self) -> float:
        """Compute and communication together."""
        return self[0] + self[1]

    @property
    def backward(self) -> Price:
        """The same, all of it in the backward pass."""
        return Price(*self[:4], self[0], self[1], self[3])

    def plus(self, other: Price) -> Price:
        """Both."""
        return Price(*(mine + more for mine, more in zip(self, other, strict=True)))


class Prices:
    """Prices on one mesh of one topology.

    Args:
        topology: the machine.
        mesh: sizes of the mesh axes.
        train: whether there is a backward pass.
        optimizer: a key of ``costmodel.memory.OPTIMIZERS``.
        chunks: in how many chunks devices do their work, one after the other: virtual axes behind the mesh's. What such an
            axis splits is paid for each chunk; what it joins or sums up, once and without a network.
        together: bytes of all parameters, which travel together as their gradients do, so that latency counts little
            (`passes.bucket`), and all_reduces go in stages where that is faster (`passes.staged`); 0: each travels alone.
    """

    def __init__(
        self,
        topology: Topology,
        mesh: tuple[int, ...],
        *,
        train: bool = True,
        optimizer: str = "adamw",
        chunks: tuple[int, ...] = (),
        together: float = 0.0,
    ) -> None:
        self.topology, self.devices, self.train, self.optimizer = topology, mesh, train, optimizer
        self.mesh, self.together = (*mesh, *chunks), together
        self.collective = lru_cache(maxsize=None)(self._collective)
        self.moving = lru_cache(maxsize=None)(self._moving)
        self.contention = lru_cache(maxsize=None)(self._contention)

    def _contention(self, axes: tuple[int, ...]) -> float:
        """The share of communicating over ``axes`` that takes the processors' time."""
        return self.topology.link(self.devices, axes).contention

    def _collective(self, kind: str, axes: tuple[int, ...], volume: float, parameter: bool = False) -> tuple[float, float]:
        """(seconds, bytes received) of one collective; ``volume`` is in bytes of the larger tensor on one device."""
        ways = math.prod(self.mesh[a] for a in axes)
        pay = self.parameter_seconds if parameter else self.seconds
        return float(pay(kind, axes, np.array([volume]))[0]), float(collectives.bytes_moved(kind, ways, volume))

    def parameter_seconds(self, kind: str, axes: tuple[int, ...], volumes: np.ndarray) -> np.ndarray:
        """``seconds`` of collectives that move parameters or their gradients."""
        alone = self.seconds(kind, axes, volumes)
        if not self.together:
            return alone
        return np.asarray(overlap.merged(alone, self.seconds(kind, axes, np.ones(1)), volumes / self.together))

    def seconds(self, kind: str, axes: tuple[int, ...], volumes: np.ndarray) -> np.ndarray:
        """Seconds of a collective over ``axes`` for many sizes, in bytes of the larger tensor on one device."""
        alone = self.alone(kind, axes, volumes)
        if kind != "all_reduce" or len(axes) == 1 or not self.together:
            return alone
        staged = self.in_stages(axes, volumes)
        return np.where(staged < _STAGED * alone, staged, alone)

    def alone(self, kind: str, axes: tuple[int, ...], volumes: np.ndarray) -> np.ndarray:
        """``seconds`` of one collective, not in stages."""
        link = self.topology.link(self.devices, axes, kind)
        return np.asarray(collectives.of_link(kind, volumes, link, self.topology.library))

    def in_stages(self, axes: tuple[int, ...], volumes: np.ndarray) -> np.ndarray:
        """Seconds of an all_reduce that goes over the last axis first; see `passes.staged`."""
        rest, inner = axes[:-1], axes[-1:]
        shares = volumes / self.mesh[inner[0]]
        between = self.alone("all_reduce", rest, shares)
        if len(rest) > 1:
            between = np.minimum(between, self.in_stages(rest, shares))
        within = self.alone("reduce_scatter", inner, volumes) + self.alone("all_gather", inner, volumes)
        return np.asarray(within + between)

    def faster_staged(self, axes: tuple[int, ...], volume: float) -> bool:
        """Whether an all_reduce of so many bytes goes over the last of the axes first; see `passes.staged`."""
        volumes = np.array([volume])
        return bool(self.in_stages(axes, volumes)[0] < _STAGED * self.alone("all_reduce", axes, volumes)[0])

    def _moving(
        self, shape: tuple[int, ...], itemsize: int, source: Layout, target: Layout, parameter: bool = False
    ) -> Price:
        """Of the steps from one layout to another."""
        compute_seconds = seconds = received = contended = 0.0
        real, state = len(self.devices), list(source)
        found = {step: elements for step, elements in moves(shape, source, target, self.mesh)}
        for step in sums_first(found, real) if len(self.mesh) > real else found:
            there = found[step] if step in found else math.prod(local_shape(shape, tuple(state), self.mesh))
            volume = float(there * itemsize)
            if step.axes[0] < real and step.kind in COMMUNICATING:
                times = self._times([not isinstance(p, Replicate) for p in state[real:]])
                cost, size = self.collective(step.kind, step.axes, volume, parameter)
                seconds, received = seconds + times * cost, received + times * size
                contended += times * cost * self.contention(step.axes)
            for axis in step.axes:
                state[axis] = target[axis]
            if step.axes[0] >= real and step.kind in COMMUNICATING:  # read every chunk's, write one
                read = math.prod(self.mesh[axis] for axis in step.axes)
                compute_seconds += (read + 1) * volume / self.topology.device.memory_bandwidth
        return Price(compute_seconds, seconds, received, contended)

    def _times(self, splits: Sequence[bool]) -> int:
        """How often something is done, given which virtual axes split it."""
        return math.prod(n for n, cut in zip(self.mesh[len(self.devices) :], splits, strict=True) if cut)

    def reshard(
        self, value: torch.Tensor, have: Layout, want: Want, *, gradient: bool, regather: bool, parameter: bool = False
    ) -> Price:
        """One tensor's reshard with its mirror; ``regather``: it is gathered again for the backward pass."""
        shape, itemsize = tuple(value.shape), value.element_size()
        there = self.moving(shape, itemsize, have, want.layout, parameter)
        if self.train and regather and there[1]:
            there = there.plus(there.backward)
        if not (self.train and gradient):
            return there
        back = self.moving(shape, itemsize, want.gradient, gradient_of(have), parameter)
        return there.plus(back.backward)

    def space(self, space: Space, flop: float, *, gradient: bool) -> tuple[np.ndarray, np.ndarray]:
        """``operator`` for all strategies at once: (compute seconds, seconds of collectives inside), each ``[S]``."""
        node, table = space.operator.node, rule_of(space.operator.node)
        operands, results = [n.meta["val"] for n in operands_of(node)], results_of(node)
        nothing = np.zeros(len(space.serves))
        if (not operands and not results) or (table is not None and table.view):
            return nothing, nothing
        passes = self._passes(gradient)
        moved = nothing
        for tensor, rows in (*zip(operands, space.wants, strict=True), *zip(results, space.results, strict=True)):
            moved = moved + local_elements(tuple(tensor.shape), rows, self.mesh) * tensor.element_size()
        work = flop / np.where(space.factors(), np.array(self.mesh), 1).prod(axis=-1)
        dtype = str((results or operands)[0].dtype).removeprefix("torch.")
        dims = None
        if kind_of(node) == "product":
            dims = tuple(
                math.prod(space.operator.factors[f].size for f in names)
                / np.where(space.axes_of(names), np.array(self.mesh), 1).prod(axis=-1)
                for names in self._dims(space.operator)
            )
        compute_seconds = self._compute(node, passes, work, moved, dtype, dims)
        return np.asarray(compute_seconds), self._inner_of(space, gradient)

    def _passes(self, gradient: bool) -> float:
        """Times an operator's work is done: forward, and as much again for each operand's gradient."""
        return 3.0 if self.train and gradient else 1.0

    def behind(self, node: fx.Node, *, gradient: bool) -> tuple[float, float]:
        """Which shares of an operator's computing, and of the collectives inside it, belong to the backward pass."""
        table = rule_of(node)
        forward, backward = table.statistics if table is not None else (1, 0)
        inner = backward / (forward + backward) if self.train and gradient and backward else 0.0
        return 1 - 1 / self._passes(gradient), inner

    def _compute(self, node: fx.Node, passes: float, flop: Any, moved: Any, dtype: str, dims: Any) -> Any:
        """Seconds of an operator's kernels."""
        device, kind = self.topology.device, kind_of(node)
        return compute.seconds(passes * flop, passes * moved, device, dtype, dims=dims, kind=kind, launches=passes)

    @staticmethod
    def _dims(operator: Operator) -> tuple[frozenset[str], ...]:
        """The factors that make up m, k and n of a product."""
        return tuple(frozenset(f.name for f in operator.factors.values() if f.kind == kind) for kind in "mkn")

    def _inner_of(self, space: Space, gradient: bool) -> np.ndarray:
        rule, table = space.operator.rule, rule_of(space.operator.node)
        found = np.zeros(len(space.serves))
        if rule is None or table is None or not rule.inner:
            return found
        inner = space.axes_of(rule.inner)
        operand = operands_of(space.operator.node)[0].meta["val"]
        rows = local_elements(tuple(operand.shape), space.wants[0], self.mesh) * operand.element_size()
        for name in rule.inner:
            ways = np.where(space.axes_of(frozenset({name})), np.array(self.mesh), 1).prod(axis=-1)
            rows = rows / np.maximum(1, -(-rule.sizes[name] // ways))
        forward, backward = table.statistics
        times = forward + (backward if self.train and gradient else 0)
        groups = (inner * (1 << np.arange(len(self.mesh)))).sum(axis=-1)
        for group in np.unique(groups[groups > 0]):
            axes = tuple(a for a in range(len(self.mesh)) if group >> a & 1)
            found = np.where(groups == group, times * self.seconds("all_reduce", axes, rows), found)
        return found

    def bytes(self, value: torch.Tensor, layout: Layout) -> float:
        """Bytes of one device's part."""
        return float(math.prod(local_shape(tuple(value.shape), layout, self.mesh)) * value.element_size())

    def operator(self, operator: Operator, strategy: Strategy, flop: float, *, gradient: bool) -> Price:
        """One operator under one strategy: roofline compute, and the collectives of its lowering."""
        work = self.work(operator, strategy, flop, gradient=gradient)
        if work is None:
            return Price(0.0, 0.0, 0.0)
        seconds = float(work.seconds(self.topology.device))
        inner, received, contended = self._inner(operator, strategy, gradient)
        times = self._times([factor is not None for factor in strategy.assignment[len(self.devices) :]])
        computing, inside = self.behind(operator.node, gradient=gradient)
        here = times * seconds, times * inner, times * received, times * contended
        return Price(*here, computing * here[0], inside * here[1], inside * here[3])

    def work(self, operator: Operator, strategy: Strategy, flop: float, *, gradient: bool) -> compute.Work | None:
        """What one device computes of an operator, forward and backward; None where there is nothing to do."""
        node, table = operator.node, rule_of(operator.node)
        operands, results = operands_of(node), results_of(node)
        if (not operands and not results) or (table is not None and table.view):
            return None
        passes = self._passes(gradient)
        moved = sum(self.bytes(n.meta["val"], w.layout) for n, w in zip(operands, strategy.wants, strict=True))
        moved += sum(self.bytes(t, layout) for t, layout in zip(results, strategy.results, strict=True))
        dtype = str((results or [operands[0].meta["val"]])[0].dtype).removeprefix("torch.")
        dims = None
        if kind_of(node) == "product":
            m, k, n = (
                math.prod(operator.factors[f].size for f in names) / math.prod(self.mesh[a] for a in strategy.axes(*names))
                for names in self._dims(operator)
            )
            dims = m, k, n
        share = flop / strategy.ways(self.mesh)
        return compute.Work(passes * share, passes * moved, dtype, kind_of(node), dims, passes)

    def _inner(self, operator: Operator, strategy: Strategy, gradient: bool) -> tuple[float, float, float]:
        rule, table = operator.rule, rule_of(operator.node)
        if rule is None or table is None or not rule.inner:
            return 0.0, 0.0, 0.0
        axes = strategy.axes(*rule.inner)
        if not axes:
            return 0.0, 0.0, 0.0
        operand = operands_of(operator.node)[0].meta["val"]
        rows = self.bytes(operand, strategy.wants[0].layout)
        for name in rule.inner:
            ways = math.prod(n for n, f in zip(self.mesh, strategy.assignment, strict=True) if f == name)
            rows /= max(1, math.ceil(rule.sizes[name] / ways))
        forward, backward = table.statistics
        times = forward + (backward if self.train and gradient else 0)
        seconds, received = self.collective("all_reduce", axes, rows)
        return times * seconds, times * received, times * seconds * self.contention(axes)

    def states(self, elements: np.ndarray, itemsize: int) -> np.ndarray:
        """Bytes of parameters of so many elements on one device, with gradient and optimizer state."""
        return np.asarray(memory.state_bytes(elements, itemsize, self.optimizer, train=self.train))


_KINDS = (
    ("convolution", ("conv",)),
    ("attention", ("attention",)),
    ("norm", ("_norm",)),
    ("softmax", ("softmax", "cross_entropy")),
    ("gather", ("embedding", "gather", "index.")),
    ("copy", ("aten.cat.", "aten.stack.", "aten.repeat.", "pad.", "aten.slice", "aten.roll", "aten.flip")),
)


@cache
def _kind(name: str, product: bool) -> str:
    found = next((kind for kind, words in _KINDS if any(word in name for word in words)), None)
    return found or ("product" if product else "pointwise")


def kind_of(node: fx.Node) -> str:
    """Which of ``costmodel.KINDS`` an operator is."""
    table = rule_of(node)
    return _kind(name_of(node), table is not None and table.flop is not None)


def flop_of(node: fx.Node) -> float:
    """FLOP of a node's whole forward operator."""
    table = rule_of(node)
    return table.flop(node) if table is not None and table.flop is not None else 0.0
