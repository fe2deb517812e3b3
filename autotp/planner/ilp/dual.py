"""Lower bounds and pruning without a solver: block-coordinate ascent on the dual of the linear relaxation.

A tensor with several uses is relaxed to one table per use. The cost of a reshard, paid once, is split among
the uses that may want it,

    sum over distinct wanted l of C[h,l]  >=  sum_i share_i[h, want_i],     share_i >= 0,  sum_i share_i = C,

which is the dual of the facility-location form of the mixed-integer program. What results is a sum of node
and pair tables; moving cost between a node and its pairs (messages) leaves every assignment's total alone and

    bound = sum_o min theta_o + sum_pairs min phi                                      (1) Dual.bound

rises. The sweeps are the sequential tree-reweighted ones (Kolmogorov, "Convergent tree-reweighted message
passing", PAMI 2006), exact on trees; :meth:`Dual.rebalance` moves shares from where they are slack to where
they are tight. A strategy whose cheapest completion by the same bound exceeds a known assignment is ruled out.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import numpy as np

from autotp.planner.ilp.problem import Problem, Tensor

__all__ = ["Dual"]

_ROUNDING = 1e-13


@dataclass(slots=True)
class _Port:
    """What a table distinguishes of one node's strategies: class of each, and how to minimise over
    classes.
    """

    index: np.ndarray
    order: np.ndarray
    starts: np.ndarray

    def least(self, values: np.ndarray) -> np.ndarray:
        return np.minimum.reduceat(values[self.order], self.starts)


@dataclass
class _Pair:
    """One use of one tensor as a table ``phi`` between two nodes, over rows and columns of the tensor's ``cost``, which
    ``wanted`` uses of each column share, cut to ``big``; ``share``, as large, is this use's, once it is asked for.
    """

    nodes: tuple[int, int]
    ports: tuple[_Port, _Port]
    cost: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    wanted: np.ndarray
    big: float
    phi: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.phi = self._evenly()
        if len(self.columns) < len(self.ports[1].starts):  # some of the use's strategies want nothing
            self.phi = np.concatenate([self.phi, np.zeros((len(self.rows), 1))], axis=1)

    @functools.cached_property
    def share(self) -> np.ndarray:
        return self._evenly()

    def _evenly(self) -> np.ndarray:
        cells, wanted = self.cost, self.wanted[self.columns]
        if (len(self.rows), len(self.columns)) != cells.shape:
            cells = cells[np.ix_(self.rows, self.columns)]
        found = np.minimum(cells, self.big)
        if wanted.max(initial=0) > 1:
            found /= wanted
        return found


@dataclass(frozen=True, slots=True)
class _Part:
    """A use's part of its tensor's cost, by strategies of producer and consumer."""

    pair: _Pair | None
    own: np.ndarray

    def at(self, producer: np.ndarray, consumer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Its share of the cost, and how far its table is above the table's least entry."""
        if self.pair is None:
            return self.own[consumer], np.zeros(len(consumer))
        row, column = self.pair.ports[0].index[producer], self.pair.ports[1].index[consumer]
        real = column < len(self.pair.columns)
        share = np.where(real, self.pair.share[row, np.where(real, column, 0)], 0.0) if real.any() else 0.0 * row
        return share, self.pair.phi[row, column] - self.pair.phi.min()


def _port(values: np.ndarray) -> tuple[_Port, np.ndarray]:
    return _port_of(values.tobytes(), values.dtype)


@functools.lru_cache(maxsize=4096)
def _port_of(data: bytes, dtype: np.dtype) -> tuple[_Port, np.ndarray]:
    # A model has the same few on every mesh.
    classes, index = np.unique(np.frombuffer(data, dtype), return_inverse=True)
    order = np.argsort(index, kind="stable")
    return _Port(index, order, np.searchsorted(index[order], np.arange(len(classes)))), classes


class Dual:
    """The dual of a problem.

    Args:
        problem: the problem.
        cap: seconds of a known assignment, or anything above the optimum: larger costs are cut to twice this.
    """

    def __init__(self, problem: Problem, cap: float) -> None:
        self.problem = problem
        self.offset = 0.0
        self.theta: list[np.ndarray] = []
        for node in problem.nodes:
            least = float(node.cost.min())
            self.offset += least
            self.theta.append(node.cost - least)
        self.big = 2.0 * max(cap - self.offset, 0.0) + 1e-300
        # Rounding must never turn into a false proof: what sums of numbers this large may lose is taken off.
        self.error = _ROUNDING * (abs(self.offset) + self.big)
        self.theta = [np.minimum(theta, self.big) for theta in self.theta]
        self.pairs: list[_Pair] = []
        self.parts: list[list[_Part]] = []
        self.tables: list[tuple[list[_Pair], int]] = []
        for tensor in problem.tensors:
            self._split(tensor)
        count = len(problem.nodes)
        self.before: list[list[tuple[_Pair, int]]] = [[] for _ in range(count)]
        self.after: list[list[tuple[_Pair, int]]] = [[] for _ in range(count)]
        for pair in self.pairs:
            low = int(pair.nodes[0] > pair.nodes[1])
            self.after[pair.nodes[low]].append((pair, low))
            self.before[pair.nodes[1 - low]].append((pair, 1 - low))

    def _split(self, tensor: Tensor) -> None:
        width = tensor.cost.shape[1]
        have, rows = _port(tensor.have)
        wants, wanted = [], np.zeros(width)
        for use in tensor.uses:
            want, columns = _port(np.where(use.want < 0, width, use.want))
            real = columns[columns < width]
            wanted[real] += 1.0
            wants.append((want, real))
        made = []
        parts: list[_Part] = []
        self.parts.append(parts)
        for use, (want, real) in zip(tensor.uses, wants, strict=True):
            if use.node == tensor.producer:
                at = np.maximum(use.want, 0)
                cells = np.minimum(tensor.cost[tensor.have, at], self.big) / np.maximum(wanted[at], 1.0)
                own = np.where(use.want < 0, 0.0, cells)
                self.theta[use.node] = np.minimum(self.theta[use.node] + own, self.big)
                parts.append(_Part(None, own))
                continue
            pair = _Pair((tensor.producer, use.node), (have, want), tensor.cost, rows, real, wanted, self.big)
            made.append(pair)
            parts.append(_Part(pair, np.zeros(0)))
        self.pairs.extend(made)
        if len(made) > 1:
            self.tables.append((made, width))

    def bound(self) -> float:
        """The proven lower bound (1), in seconds."""
        return self._of_nodes() + math.fsum(float(pair.phi.min()) for pair in self.pairs)

    def _visit(self, node: int, ahead: list[tuple[_Pair, int]], behind: list[tuple[_Pair, int]]) -> np.ndarray:
        theta, lows = self.theta[node], []
        for pair, side in (*ahead, *behind):
            least = pair.phi.min(axis=1 - side)
            lows.append(least)
            theta += least[pair.ports[side].index]
        weight = 1.0 / max(len(ahead), len(behind), 1)
        full = theta.copy()
        # What a table gives and what it gets is one change: tables are what takes the time.
        for number, (pair, side) in enumerate((*ahead, *behind)):
            change = -lows[number]
            if number < len(ahead):
                part = weight * pair.ports[side].least(full)
                change += part
                theta -= part[pair.ports[side].index]
            pair.phi += change[:, None] if side == 0 else change[None, :]
        return full

    def sweep(self) -> tuple[float, list[np.ndarray]]:
        """Messages forward and back once; returns the bound, and per node a lower bound on any assignment with each
        strategy.
        """
        count = len(self.theta)
        for node in range(count):
            self._visit(node, self.after[node], self.before[node])
        # Bounds only rise, so what holds before the way back holds at every node on it.
        floor = self._of_nodes()
        through: list[np.ndarray] = [np.zeros(0)] * count
        for node in reversed(range(count)):
            full = self._visit(node, self.before[node], self.after[node])
            through[node] = floor + (full - full.min())
        return self._of_nodes(), through

    def _of_nodes(self) -> float:
        """The bound where every table's least entry is 0, as messages leave them."""
        return self.offset - self.error + math.fsum(float(theta.min()) for theta in self.theta)

    def rebalance(self) -> None:
        """Move shares of reshards that several uses may share from uses for which they are slack to all of
        them.
        """
        for pairs, width in self.tables:
            pool = np.zeros((len(pairs[0].phi), width))
            wanted = np.zeros(width)
            taken = []
            for pair in pairs:
                cells = pair.phi[:, : len(pair.columns)]
                slack = np.minimum(cells - pair.phi.min(), pair.share)
                pool[:, pair.columns] += slack
                wanted[pair.columns] += 1.0
                taken.append(slack)
            pool /= np.maximum(wanted, 1.0)
            for pair, slack in zip(pairs, taken, strict=True):
                change = pool[:, pair.columns] - slack
                pair.share += change
                pair.phi[:, : len(pair.columns)] += change

    def decode(self) -> tuple[int, ...]:
        """An assignment read off the messages, node by node, each given the earlier ones."""
        choice = [0] * len(self.theta)
        for node in range(len(choice)):
            value = self.theta[node].copy()
            for pair, side in self.before[node]:
                at = int(pair.ports[1 - side].index[choice[pair.nodes[1 - side]]])
                line = pair.phi[:, at] if side == 0 else pair.phi[at]
                value += line[pair.ports[side].index]
            for pair, side in self.after[node]:
                value += pair.phi.min(axis=1 - side)[pair.ports[side].index]
            choice[node] = int(np.argmin(value))
        return tuple(choice)
