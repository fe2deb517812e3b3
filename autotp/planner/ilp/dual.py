"""Lower bounds and pruning without a solver: block-coordinate ascent on the dual of the linear relaxation.

A tensor with several uses is relaxed to one table per use. The cost of a reshard, paid once, is split among
the uses that may want it,

    sum over distinct wanted l of C[h,l]  >=  sum_i share_i[h, want_i],     share_i >= 0,  sum_i share_i = C,

which is the dual of the facility-location form of the mixed-integer program. The result is a sum of node
and pair tables. Moving cost between a node and its pairs (messages) keeps every assignment's total, and raises the bound

    bound = sum_o min theta_o + sum_pairs min phi                                      (1) Dual.bound

The sweeps are the sequential tree-reweighted ones (Kolmogorov, "Convergent tree-reweighted message
passing", PAMI 2006), exact on trees; :meth:`Dual.rebalance` moves shares from uses where they are slack to uses where
they are tight. A strategy is pruned if the same bound on its assignments exceeds the cost of a known assignment.
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
    """The classes of one node's strategies that a table distinguishes: the class of each strategy (``index``), and the
    strategies in order of class (``order``), with the start of each class (``starts``).
    """

    index: np.ndarray
    order: np.ndarray
    starts: np.ndarray

    def least(self, values: np.ndarray) -> np.ndarray:
        return np.minimum.reduceat(values[self.order], self.starts)


@dataclass
class _Pair:
    """One use of one tensor: a table ``phi`` between two nodes, over some rows and columns of the tensor's ``cost``, capped
    at ``big``. ``wanted`` uses share the cost of each column; ``share`` is this use's part, computed when read.
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
        if len(self.columns) < len(self.ports[1].starts):  # some of the use's strategies require no layout
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
    """The part of a tensor's cost that one use pays, by strategies of producer and consumer."""

    pair: _Pair | None
    own: np.ndarray

    def at(self, producer: np.ndarray, consumer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The use's share of the cost, and the excess of its table over the table's least entry."""
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
    # Cached: a model has the same few ports on every mesh.
    classes, index = np.unique(np.frombuffer(data, dtype), return_inverse=True)
    order = np.argsort(index, kind="stable")
    return _Port(index, order, np.searchsorted(index[order], np.arange(len(classes)))), classes


class Dual:
    """The dual of a problem's linear relaxation.

    Args:
        problem: the problem.
        cap: the cost of a known assignment in seconds, or another upper bound on the optimum. Costs are capped at twice
            its excess over the sum of the nodes' least costs.
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
        # Rounding must never cause a false proof, so the error of sums of numbers this large is subtracted.
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
        # A table's outgoing and incoming messages are applied as one change, as updates of tables take most of the time.
        for number, (pair, side) in enumerate((*ahead, *behind)):
            change = -lows[number]
            if number < len(ahead):
                part = weight * pair.ports[side].least(full)
                change += part
                theta -= part[pair.ports[side].index]
            pair.phi += change[:, None] if side == 0 else change[None, :]
        return full

    def sweep(self) -> tuple[float, list[np.ndarray]]:
        """Pass messages forward and backward once. Returns the lower bound, and per node a lower bound on the assignments
        with each strategy, in seconds.
        """
        count = len(self.theta)
        for node in range(count):
            self._visit(node, self.after[node], self.before[node])
        # The bound never falls, so the one before the backward sweep holds at every node of it.
        floor = self._of_nodes()
        through: list[np.ndarray] = [np.zeros(0)] * count
        for node in reversed(range(count)):
            full = self._visit(node, self.before[node], self.after[node])
            through[node] = floor + (full - full.min())
        return self._of_nodes(), through

    def _of_nodes(self) -> float:
        """The bound if the least entry of every pair table is 0, as it is after messages."""
        return self.offset - self.error + math.fsum(float(theta.min()) for theta in self.theta)

    def rebalance(self) -> None:
        """Move shares of reshards that several uses may share: the slack of each use is divided among all of them."""
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
        """An assignment decoded from the messages, node by node, given the strategies of the earlier nodes."""
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
