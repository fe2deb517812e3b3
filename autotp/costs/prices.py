"""The prices of strategies and reshards on a mesh, from the cost model's expressions."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.distributed.tensor import Replicate

from autotp.costs.price import Price
from autotp.costs.runs import Run
from costmodel import Topology, collectives, compute, memory, overlap
from passes.graph import Cast
from passes.layouts.codes import local_elements
from passes.layouts.layout import Layout, local_shape
from passes.layouts.reshard import COMMUNICATING, moves, sums_first
from passes.rules.factors import Operator
from passes.rules.shapes import Shape, operands_of, results_of
from passes.rules.table import kind_of, rule_of
from passes.strategies.space import Space
from passes.strategies.strategy import Strategy, Want, gradient_of

__all__ = ["Prices"]

#: An all_reduce goes in stages if these take at most this share of its time, because more messages have to be awaited.
_STAGED = 0.95
#: The share of the memory held that a schedule may hold in addition, for early gathers and for messages of several tensors.
_SPARE = 0.025
#: Libraries whose collectives are driven by CPU cores from beginning to end.
_DRIVEN = ("gloo", "mpi")


class Prices:
    """Prices on one mesh of one topology.

    Args:
        topology: the machine.
        mesh: sizes of the mesh axes.
        train: whether there is a backward pass.
        optimizer: a key of ``costmodel.memory.OPTIMIZERS``.
        chunks: the numbers of chunks that a device processes one after the other: sizes of virtual axes after those of the
            mesh. Operators and reshards that such an axis splits are paid per chunk; joins and sums over such an axis are
            paid once, without communication.
        together: bytes of all parameters, if collectives of parameters and of their gradients are merged, so that latency
            counts little (`passes.overlap.bucket`), and all_reduces go in stages where that is faster
            (`passes.overlap.stage`); 0 if every collective runs alone.
        accumulate: the number of micro-batches of a step. ``reshard`` returns the price of a whole step, in which gradients
            of parameters are reduced once; all other methods return that of one micro-batch.
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
        accumulate: int = 1,
    ) -> None:
        self.topology, self.devices, self.train, self.optimizer = topology, mesh, train, optimizer
        self.mesh, self.together, self.accumulate = (*mesh, *chunks), together, accumulate
        self.link = lru_cache(maxsize=None)(partial(topology.link, mesh))
        self.collective = lru_cache(maxsize=None)(self._collective)
        self.moving = lru_cache(maxsize=None)(self._moving)
        self.moved = lru_cache(maxsize=None)(self._moved)
        self.known: dict[Hashable, np.ndarray] = {}  # results of `spent`, needed again with other weights
        self.contention = lru_cache(maxsize=None)(lambda kind, axes: self.link(axes, kind).contention)
        self.shares = lru_cache(maxsize=None)(self._shares)
        # Seconds of a collective with hardly any bytes: waiting, which takes no device time; `least`: in stages if less.
        self.latency = lru_cache(maxsize=None)(lambda kind, axes: float(self.alone(kind, axes, np.ones(1))[0]))
        self.least = lru_cache(maxsize=None)(lambda kind, axes: float(self.spent(kind, axes, np.ones(1))[0, 0]))
        self.operator = lru_cache(maxsize=None)(self._operator)

    @property
    def spare(self) -> float:
        """The share of the memory held at a moment that a schedule may hold in addition."""
        return _SPARE if self.together > 0 else 0.0

    def _shares(self, kind: str, axes: tuple[int, ...]) -> np.ndarray:
        """Per second of a collective over ``axes``: 1, the share that takes compute time, the share of each level."""
        busy = self.link(axes, kind).busy
        return np.array([1.0, self.contention(kind, axes), *(busy.get(level.name, 0.0) for level in self.topology.levels)])

    def _collective(self, kind: str, axes: tuple[int, ...], volume: float, parameter: bool = False) -> tuple[float, float]:
        """(seconds, bytes received) of one collective; ``volume`` is in bytes of the larger tensor on one device."""
        return float(self.spent(kind, axes, np.array([volume]), parameter)[0, 0]), float(self._received(kind, axes, volume))

    def _received(self, kind: str, axes: tuple[int, ...], volumes: Any) -> Any:
        return collectives.bytes_moved(kind, math.prod(self.mesh[a] for a in axes), volumes)

    def spent(self, kind: str, axes: tuple[int, ...], volumes: np.ndarray, parameter: bool = False) -> np.ndarray:
        """Seconds of a collective over ``axes`` for many sizes, and of what it occupies.

        Args:
            kind, axes: the kind of the collective, and its mesh axes.
            volumes: bytes of the larger tensor on one device.
            parameter: whether it moves parameters or their gradients, which may be merged with others: copied into one
                message, and out of it.

        Returns:
            ``[2 + levels, ...]`` seconds: of communication; of the communication that takes compute time; and for every
            level of the network, innermost first, of the communication that occupies it.
        """
        key = kind, axes, parameter, volumes.shape, volumes.tobytes()
        if key not in self.known:
            self.known[key] = self._spent(kind, axes, volumes, parameter)
        return self.known[key]

    def _spent(self, kind: str, axes: tuple[int, ...], volumes: np.ndarray, parameter: bool) -> np.ndarray:
        found = self.at_once(kind, axes, volumes, parameter)
        if not self.together:
            return found
        if kind == "all_reduce" and len(axes) > 1:
            staged = self.in_stages(axes, volumes, parameter)
            found = np.where(staged[0] < _STAGED * found[0], staged, found)
        if not parameter:
            return found
        latency = np.minimum(self.least(kind, axes), found[0])  # which is less for no bytes
        merged = np.asarray(overlap.merged(found[0], latency, volumes / self.together))
        share = np.divide(merged, found[0], out=np.ones_like(merged), where=found[0] > 0)
        taken = found[1]  # merging does not reduce the bytes
        found = found * share
        found[1] = taken
        bytes_copied = overlap.copied(kind, math.prod(self.mesh[a] for a in axes), volumes)
        copying = np.where(share < 1, 2 * np.asarray(bytes_copied) / self.topology.device.memory_bandwidth, 0.0)
        found[:2] += copying  # which occupies the device, but no level
        return np.asarray(found)

    def at_once(self, kind: str, axes: tuple[int, ...], volumes: np.ndarray, parameter: bool = False) -> np.ndarray:
        """``spent`` of one collective, which is neither in stages nor merged with others.

        Communication of parameters is hidden in few messages, of which only the bytes take compute time. Chunks hide
        activations in many messages; CPU cores that drive these wake up for each, so its latency is compute time, too.
        """
        alone = self.alone(kind, axes, volumes)
        found = np.multiply.outer(self.shares(kind, axes), alone)
        latency = np.minimum(alone, self.latency(kind, axes))
        found[1] = self.contention(kind, axes) * (alone - latency)
        if not parameter and self.topology.library in _DRIVEN:
            found[1] += latency
        return np.asarray(found)

    def alone(self, kind: str, axes: tuple[int, ...], volumes: np.ndarray) -> np.ndarray:
        """Seconds of one collective over ``axes``, not in stages, for many sizes in bytes."""
        return np.asarray(collectives.of_link(kind, volumes, self.link(axes, kind), self.topology.library))

    def in_stages(self, axes: tuple[int, ...], volumes: np.ndarray, parameter: bool = False) -> np.ndarray:
        """``spent`` of an all_reduce in stages, over the last axis first; see `passes.overlap.stage`."""
        rest, inner = axes[:-1], axes[-1:]
        shares = volumes / self.mesh[inner[0]]
        between = self.at_once("all_reduce", rest, shares, parameter)
        if len(rest) > 1:
            staged = self.in_stages(rest, shares, parameter)
            between = np.where(staged[0] < between[0], staged, between)
        within = sum(self.at_once(kind, inner, volumes, parameter) for kind in ("reduce_scatter", "all_gather"))
        return np.asarray(within + between)

    def faster_staged(self, axes: tuple[int, ...], volume: float) -> bool:
        """Whether an all_reduce of ``volume`` bytes goes in stages, the last axis first; see `passes.overlap.stage`."""
        one = np.array([volume])
        return bool(self.in_stages(axes, one)[0, 0] < _STAGED * self.alone("all_reduce", axes, one)[0])

    def _moving(
        self, shape: tuple[int, ...], itemsize: int, source: Layout, target: Layout, parameter: bool = False
    ) -> Price:
        """The price of the reshard steps from one layout to another, once."""
        compute_seconds, received, spent = 0.0, 0.0, self._nothing()
        real, state = len(self.devices), list(source)
        found = {step: elements for step, elements in moves(shape, source, target, self.mesh)}
        for step in sums_first(found, real) if len(self.mesh) > real else found:
            there = found[step] if step in found else math.prod(local_shape(shape, tuple(state), self.mesh))
            volume = float(there * itemsize)
            if step.axes[0] < real and step.kind in COMMUNICATING:
                times = self._times([not isinstance(p, Replicate) for p in state[real:]])
                spent += times * self.spent(step.kind, step.axes, np.array([volume]), parameter)[:, 0]
                received += times * float(self._received(step.kind, step.axes, volume))
            for axis in step.axes:
                state[axis] = target[axis]
            if step.axes[0] >= real and step.kind in COMMUNICATING:  # reads the part of every chunk, writes one
                read = math.prod(self.mesh[axis] for axis in step.axes)
                compute_seconds += (read + 1) * volume / self.topology.device.memory_bandwidth
        return self._price(received, compute_seconds, spent)

    def _nothing(self) -> np.ndarray:
        return np.zeros(2 + len(self.topology.levels))

    def _price(
        self, received: float, compute: float, spent: np.ndarray, late: float = 0.0, spent_late: float = 0.0
    ) -> Price:
        """A `Price`; the shares ``late`` of ``compute`` and ``spent_late`` of ``spent`` belong to the backward pass."""
        ahead, behind = (1 - spent_late) * spent, spent_late * spent
        return Price(received, [(1 - late) * compute, *ahead.tolist()], [late * compute, *behind.tolist()])

    def _times(self, splits: Sequence[bool]) -> int:
        """The number of chunks in which something is done, given which virtual axes split it."""
        return math.prod(n for n, cut in zip(self.mesh[len(self.devices) :], splits, strict=True) if cut)

    def reshard(
        self,
        value: torch.Tensor,
        have: Layout,
        want: Want,
        *,
        gradient: bool,
        regather: bool,
        parameter: bool = False,
        cast: Cast | None = None,
    ) -> Price:
        """The price of one tensor's reshards in a step, and of the opposite ones of its gradient.

        Args:
            value: the whole tensor.
            have, want: layouts.
            gradient: whether a gradient is returned.
            regather: whether the tensor is resharded again for the backward pass.
            parameter: whether it is a parameter.
            cast: its dtypes; None if all are the dtype of ``value``.
        """
        cast = cast or Cast(value.dtype, value.dtype, value.dtype)
        return self.moved(tuple(value.shape), have, want, cast, gradient, regather, parameter)

    def _moved(
        self, shape: Shape, have: Layout, want: Want, cast: Cast, gradient: bool, regather: bool, parameter: bool
    ) -> Price:
        there = self.moving(shape, cast.used.itemsize, have, want.layout, parameter)
        if cast.there:
            there = there.plus(
                self._price(0.0, self.casting(self._part(shape, have), cast.rests, cast.used), self._nothing())
            )
        if self.train and regather and (there.communication or cast.there):
            there = there.plus(there.backward)
        if self.accumulate > 1:
            there = there.times(self.accumulate)
        if not (self.train and gradient):
            return there
        back = self.returning(shape, have, want, cast, parameter=parameter)
        waits = parameter and not cast.changes
        return there.plus(back if waits or self.accumulate == 1 else back.times(self.accumulate))

    def returning(self, shape: tuple[int, ...], have: Layout, want: Want, cast: Cast, *, parameter: bool = False) -> Price:
        """The price of returning one tensor's gradient, once: the opposite of its reshard."""
        back = self.moving(shape, cast.reduced.itemsize, want.gradient, gradient_of(have), parameter)
        if cast.back:
            seconds = self.casting(self._part(shape, want.gradient), cast.used, cast.reduced)
            back = back.plus(self._price(0.0, seconds, self._nothing()))
        return back.backward

    def casting(self, elements: Any, source: torch.dtype, target: torch.dtype) -> Any:
        """Seconds of casting ``elements`` elements from one dtype to another: the time of the bytes read and written."""
        return elements * float(source.itemsize + target.itemsize) / self.topology.device.memory_bandwidth

    def _part(self, shape: tuple[int, ...], layout: Layout) -> int:
        """Elements of one device's part."""
        return math.prod(local_shape(shape, layout, self.mesh))

    def work(self, space: Space, flop: float, run: Run) -> compute.Work | None:
        """The work of an operator on one device in a micro-batch, ``[S]``; None if there is none."""
        node, table = space.operator.node, rule_of(space.operator.node)
        operands, results = [n.meta["val"] for n in operands_of(node)], results_of(node)
        if (not operands and not results) or (table is not None and table.view):
            return None
        read, written = (
            [local_elements(tuple(t.shape), rows, self.mesh) * t.element_size() for t, rows in zip(*each, strict=True)]
            for each in ((operands, space.wants), (results, space.results))
        )
        dtype = str((results or operands)[0].dtype).removeprefix("torch.")
        dims: Any = None
        if kind_of(node) == "product" and space.operator.factors:
            factors = space.operator.factors.values()
            made = [[f for f in factors if f.kind == kind] for kind in "mkn"]
            dims = tuple(math.prod(f.size for f in fs) / space.ways(self.mesh, *(f.name for f in fs)) for fs in made)
        passes = run.passes(node)
        share = passes * flop / space.ways(self.mesh, *space.operator.factors)
        if run.fused is None:
            return compute.Work(share, passes * sum((*read, *written)), dtype, kind_of(node), dims, passes)
        moved = sum(run.fused.moved(read, written)[: 2 if passes > 1 else 1])
        # Whatever the operator's kind, the compiler generates a loop.
        return compute.Work(share, moved, dtype, "pointwise", dims, run.kernels(node))

    def computing(self, space: Space, flop: float, run: Run) -> np.ndarray:
        """Seconds of computation for all strategies at once, ``[S]``."""
        work = self.work(space, flop, run)
        return np.zeros(len(space.serves)) if work is None else np.asarray(work.seconds(self.topology.device))

    def behind(self, node: fx.Node, run: Run) -> tuple[float, float]:
        """The shares of an operator's computation, and of the collectives inside it, that belong to the backward pass."""
        times, (forward, backward) = run.passes(node), run.sums(node)
        if times == 1:
            return 0.0, 0.0
        sizes = [n.meta["val"].nbytes for n in operands_of(node)], [t.nbytes for t in results_of(node)]
        ahead, late = (1.0, times - 1) if run.fused is None else run.fused.moved(*sizes)
        return late / max(ahead + late, 1.0), backward / max(forward + backward, 1)

    def inside(self, space: Space, run: Run) -> tuple[np.ndarray, np.ndarray]:
        """Bytes received, ``[S]``, and `spent` of the collectives inside an operator, for all strategies at once."""
        rule, table = space.operator.rule, rule_of(space.operator.node)
        received, found = np.zeros(len(space.serves)), np.zeros((len(self._nothing()), len(space.serves)))
        if rule is None or table is None or not rule.inner:
            return received, found
        operand = operands_of(space.operator.node)[0].meta["val"]
        rows = local_elements(tuple(operand.shape), space.wants[0], self.mesh) * operand.element_size()
        for name in rule.inner:
            rows = rows / np.maximum(1, -(-rule.sizes[name] // space.ways(self.mesh, name)))
        times = sum(run.sums(space.operator.node))
        groups = (space.axes_of(rule.inner) * (1 << np.arange(len(self.mesh)))).sum(axis=-1)
        for group in np.unique(groups[groups > 0]).tolist():
            axes, where = tuple(a for a in range(len(self.mesh)) if group >> a & 1), groups == group
            found[:, where] = times * self.spent("all_reduce", axes, rows[where])
            received[where] = times * self._received("all_reduce", axes, rows[where])
        return received, found

    def bytes(self, value: torch.Tensor, layout: Layout) -> float:
        """Bytes of one device's part of a tensor."""
        return float(self._part(tuple(value.shape), layout) * value.element_size())

    def _operator(self, operator: Operator, strategy: Strategy, flop: float, run: Run) -> Price:
        """The price of one operator under one strategy: roofline compute, and the collectives of its lowering."""
        alone = Space.alone(operator, strategy)
        (seconds,) = self.computing(alone, flop, run).tolist()
        received, spent = self.inside(alone, run)
        times = self._times([factor is not None for factor in strategy.assignment[len(self.devices) :]])
        price = self._price(float(received[0]), seconds, spent[:, 0], *self.behind(operator.node, run))
        return price.times(times)

    def update_bytes(self, elements: Any, itemsize: int) -> Any:
        """Bytes that the optimizer's step reads and writes for parameters of ``elements`` elements on one device."""
        return memory.update_bytes(elements, itemsize, self.optimizer) if self.train else 0.0 * elements

    def updating(self, moved: Any) -> Any:
        """Seconds of an optimizer's step that reads and writes ``moved`` bytes."""
        return compute.seconds(0.0, moved, self.topology.device, "float32", kind="pointwise", launches=0.0)

    def states(self, elements: np.ndarray, itemsize: int) -> np.ndarray:
        """Bytes of parameters of ``elements`` elements on one device, with gradients and optimizer state if training."""
        return np.asarray(memory.state_bytes(elements, itemsize, self.optimizer, train=self.train))
