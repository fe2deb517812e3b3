"""Instances of the abstract integer program: small random ones, and a transformer layer with meaningful layouts."""

from __future__ import annotations

import itertools
import math

import numpy as np

from autotp.planner.ilp import Node, Problem, Tensor, Use, evaluate

__all__ = ["brute_force", "small_problem", "transformer_layer"]

Layout = tuple[str, ...]


def small_problem(seed: int) -> Problem:
    """Up to four nodes: shared tensors, repeated uses, uses that want none, loops, impossible reshards, many magnitudes."""
    rng = np.random.default_rng(seed)
    integers = rng.random() < 0.5  # many ties

    def values(*shape: int) -> np.ndarray:
        if integers:
            return rng.integers(0, 5, shape).astype(float)
        return rng.random(shape) * 10.0 ** rng.integers(-6, 2, shape)

    sizes = [int(rng.integers(1, 5)) for _ in range(int(rng.integers(1, 5)))]
    nodes = tuple(Node(f"n{k}", values(size), rng.integers(0, 6, size).astype(float)) for k, size in enumerate(sizes))
    tensors = []
    for number in range(int(rng.integers(0, 6))):
        rows, columns = (int(n) for n in rng.integers(1, 5, 2))
        producer = int(rng.integers(len(sizes)))
        uses = []
        for _ in range(int(rng.integers(0, 5))):
            consumer = int(rng.integers(len(sizes)))
            uses.append(Use(consumer, rng.integers(-1 if rng.random() < 0.5 else 0, columns, sizes[consumer])))
        cost = values(rows, columns)
        if rng.random() < 0.4:
            cost[rng.random((rows, columns)) < 0.25] = math.inf
        memory = rng.integers(0, 4, columns) * float(rng.random() < 0.7) + np.zeros((rows, columns))
        if rng.random() < 0.3:  # rows differ, as if some of them hold nothing
            memory = memory * rng.integers(0, 2, (rows, 1))
        temporary = rng.integers(0, 6, (rows, columns)) * float(rng.random() < 0.7)
        have = rng.integers(0, rows, sizes[producer])
        tensors.append(Tensor(f"t{number}", producer, have, tuple(uses), cost, memory, temporary))
    return Problem(nodes, tuple(tensors))


def brute_force(problem: Problem) -> tuple[float, float]:
    """The least seconds and the least bytes of all feasible assignments; ``inf`` if there is none."""
    best = least = math.inf
    for choice in itertools.product(*(range(len(node.cost)) for node in problem.nodes)):
        found = evaluate(problem, choice)
        if math.isfinite(found.seconds):
            best, least = min(best, found.seconds), min(least, found.memory)
    return best, least


# name, operands, factors that may be sharded, factors of the result, factors of the weight
_BLOCK = [
    ("norm1", ["x"], "bs", "bsd", "d"),
    ("q", ["norm1"], "bshd", "bsh", "hd"),
    ("k", ["norm1"], "bshd", "bsh", "hd"),
    ("v", ["norm1"], "bshd", "bsh", "hd"),
    ("rope_q", ["q"], "bsh", "bsh", ""),
    ("rope_k", ["k"], "bsh", "bsh", ""),
    ("attention", ["rope_q", "rope_k", "v"], "bh", "bsh", ""),
    ("out", ["attention"], "bsdh", "bsd", "dh"),
    ("add1", ["x", "out"], "bsdP", "bsd", ""),
    ("norm2", ["add1"], "bs", "bsd", "d"),
    ("gate", ["norm2"], "bsfd", "bsf", "fd"),
    ("up", ["norm2"], "bsfd", "bsf", "fd"),
    ("silu", ["gate"], "bsf", "bsf", ""),
    ("mul", ["silu", "up"], "bsf", "bsf", ""),
    ("down", ["mul"], "bsdf", "bsd", "df"),
    ("x", ["add1", "down"], "bsdP", "bsd", ""),
    ("head", ["x"], "bsvd", "bsv", "vd"),
    ("loss", ["head"], "bs", "bs", ""),
]
_SIZE = {"b": 8, "s": 2048, "d": 4096, "h": 4096, "f": 11008, "v": 32000}


class _Layer:
    def __init__(self, mesh: tuple[int, ...], copies: int) -> None:
        self.mesh, self.copies = mesh, copies
        self.bandwidth = [25e9 * 8**axis for axis in range(len(mesh))]

    def bytes(self, factors: str, layout: Layout) -> float:
        ways = math.prod(n for n, letter in zip(self.mesh, layout, strict=True) if letter not in "RP")
        return 2.0 * math.prod(_SIZE[f] for f in factors) / ways

    def reshard(self, factors: str, weight: bool, have: Layout, want: Layout) -> float:
        local, total = self.bytes(factors, want), 0.0
        for n, speed, old, new in zip(self.mesh, self.bandwidth, have, want, strict=True):
            if old == new:
                continue
            if new == "P":
                return math.inf
            moved = 2.0 if "P" not in old and new == "R" else 1.0
            if old == "R":
                moved = 0.0 if weight else n
            elif old == "P":
                moved = 2.0 if new == "R" else 2.0 * n
            total += (n - 1) / n * local * moved / speed + 20e-6
        return total

    def operator(self, splits: str, weight: str, strategy: Layout) -> float:
        ways = math.prod(n for n, letter in zip(self.mesh, strategy, strict=True) if letter not in "RP")
        tokens, inner = _SIZE["b"] * _SIZE["s"], [_SIZE[f] for f in weight]
        seconds = (6.0 * tokens * math.prod(inner) if len(inner) == 2 else 50.0 * tokens * 4096) / ways / 3e14
        if len(inner) == 2:
            for n, speed, letter in zip(self.mesh, self.bandwidth, strategy, strict=True):
                if letter == weight[0]:
                    a = self.bytes("bs" + weight[1], tuple(c if c in "bs" + weight[1] else "R" for c in strategy))
                    seconds += 2 * (n - 1) / n * a / speed
                if letter in "bs":
                    seconds += (n - 1) / n * self.bytes(weight, tuple(c if c in weight else "R" for c in strategy)) / speed
        return seconds


def transformer_layer(mesh: tuple[int, ...], copies: int = 32) -> Problem:
    """A layer folded onto itself (its output is its own input) with a head; each mesh axis may shard any factor."""
    layer = _Layer(mesh, copies)
    nodes: list[Node] = []
    index: dict[str, int] = {}
    left: dict[str, list[Layout]] = {}
    factors: dict[str, str] = {}
    wants: dict[str, list[tuple[str, list[Layout]]]] = {}
    for name, _, _, result, weight in _BLOCK:
        factors[name] = result
        if weight:
            factors[name + ".weight"] = weight
    for name, operands, splits, result, weight in _BLOCK:
        count = 1 if name in ("head", "loss") else copies
        strategies = list(itertools.product(splits + "R", repeat=len(mesh)))
        if weight:
            layouts = list(itertools.product(weight + "R", repeat=len(mesh)))
            index[name + ".weight"], left[name + ".weight"] = len(nodes), layouts
            memory = np.array([8.0 * count * layer.bytes(weight, rest) for rest in layouts])
            nodes.append(Node(name + ".weight", np.zeros(len(layouts)), memory))
        index[name] = len(nodes)
        left[name] = [tuple(c if c in result + "RP" else "P" for c in strategy) for strategy in strategies]
        cost = count * np.array([layer.operator(splits, weight, strategy) for strategy in strategies])
        nodes.append(Node(name, cost, np.zeros(len(strategies))))
        for operand in [*operands, *([name + ".weight"] if weight else [])]:
            allowed = factors[operand] + "P"
            want = [tuple(c if c in allowed else "R" for c in strategy) for strategy in strategies]
            wants.setdefault(operand, []).append((name, want))
    tensors = []
    for name, users in wants.items():
        rests, count = name.endswith(".weight"), 1 if name.startswith("head") else copies
        rows, columns = sorted(set(left[name])), sorted({layout for _, want in users for layout in want})
        cost = np.array([[layer.reshard(factors[name], rests, row, column) for column in columns] for row in rows])
        gathered = np.array([[layer.bytes(factors[name], c) * (r != c) for c in columns] for r in rows])
        kept = np.array([0.0 if rests else count * layer.bytes(factors[name], column) for column in columns])
        uses = tuple(Use(index[user], np.array([columns.index(layout) for layout in want])) for user, want in users)
        have = np.array([rows.index(layout) for layout in left[name]])
        tensors.append(Tensor(name, index[name], have, uses, count * cost, np.broadcast_to(kept, cost.shape), gathered))
    return Problem(tuple(nodes), tuple(tensors))
