"""Times the kernels of one device: matrix products, typical operators with their backward pass, memory access, launches.

All ranks measure at the same time, since in a step all of them compute at once and share memory bandwidth, caches and
power. Each figure is the median over the ranks of each rank's median.

On a GPU, calls are recorded in a CUDA graph and replayed: Python launches small kernels more slowly than they run, but runs
ahead of the larger kernels of a step. Operators are timed in the dtype that models are mostly trained in on the device.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from autotp.calibrate.collectives import Clock, Effort
from costmodel.fit import robust

__all__ = [
    "TRAINED",
    "Operator",
    "edges",
    "operators",
    "product_sizes",
    "time_call",
    "time_launch",
    "time_memory",
    "time_product",
]

_CHAIN = 50
#: Bounds on the repetitions of a call.
_FEWEST, _MOST = 5, 50
_REPEATS = 8
#: Calls in a CUDA graph.
_RECORDED = 10
#: Kind of device -> the dtype that models are mostly trained in there.
TRAINED = {"cpu": torch.float32, "cuda": torch.bfloat16}
_ACTIVATIONS = (2**16, 2**18, 2**20)
"""Elements of activations: 0.25, 1 and 4 MiB of float32, as in one rank's shard if some ranks share a small model."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator at one size.

    Attributes:
        kind: one of ``costmodel.KINDS``.
        name: the function's name.
        function: runs ``count`` operators forward.
        inputs: the tensors whose gradients are computed.
        flop: FLOP of one operator's forward pass, as `passes.rules.table` counts them.
        bytes: of one operator's operands and results.
        dims: m, k, n of a matrix product; None for other operators.
        count: the number of operators that run, each on the result of the previous one. As in a step, other operators then
            evict an operator's tensors from the caches before they are read.
    """

    kind: str
    name: str
    function: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]
    flop: float
    bytes: float
    dims: tuple[int, int, int] | None = None
    count: int = 1


def time_call(function: Callable[[], object], clock: Clock, seconds: float) -> float:
    """Seconds of a call: the median over repetitions, each of as many calls as the clock needs to resolve them.

    Args:
        function: the function to time.
        clock: of this rank.
        seconds: the approximate total of all repetitions.
    """
    recorded = 1
    if clock.device.type == "cuda":
        function, recorded = _replayed(function, clock), _RECORDED
    function()
    clock.synchronize()
    begun = time.perf_counter()
    function()
    clock.synchronize()
    each = time.perf_counter() - begun
    calls = max(1, math.ceil(clock.least / max(each, 1e-7)))
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while len(durations) < _FEWEST or (len(durations) < _MOST and time.perf_counter() < end):
        begun = time.perf_counter()
        for _ in range(calls):
            function()
        clock.synchronize()
        durations.append((time.perf_counter() - begun) / calls)
    return robust(durations).seconds / recorded


def _replayed(function: Callable[[], object], clock: Clock) -> Callable[[], None]:
    """A function that replays ``_RECORDED`` calls of a function as a CUDA graph."""
    aside = torch.cuda.Stream(clock.device)
    aside.wait_stream(torch.cuda.current_stream(clock.device))
    with torch.cuda.stream(aside):  # libraries allocate memory in the first call, outside the graph
        function()
    clock.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_RECORDED):
            function()
    return graph.replay  # type: ignore[no-any-return]


def time_launch(clock: Clock, seconds: float) -> float:
    """Seconds of a launch, of which the cost model counts three for an operator with its backward pass."""
    start = torch.ones(16, device=clock.device, requires_grad=True)
    factor, gradient = torch.ones(16, device=clock.device), torch.ones(16, device=clock.device)

    def chain() -> None:
        value: Tensor = start
        for _ in range(_CHAIN // 2):
            value = value * factor + factor
        torch.autograd.grad(value, start, gradient)

    return time_call(chain, clock, seconds) / (3 * _CHAIN)


def time_memory(clock: Clock, seconds: float) -> float:
    """The memory bandwidth in bytes/s, measured by the addition of two tensors that are larger than any cache."""
    elements = 2**28 if clock.device.type == "cuda" else 2**23
    left, right, result = (torch.ones(elements, device=clock.device) for _ in range(3))
    return 3 * 4 * elements / time_call(lambda: torch.add(left, right, out=result), clock, seconds)


def product_sizes(largest: int, smallest: int = 32) -> list[tuple[int, int, int]]:
    """(m, k, n) of the products to time: cubes, and products with one or two short dims, in every orientation."""
    count = int(math.log2(largest / smallest)) + 1
    sides = [smallest * 2**k for k in range(count)]
    shapes = [(side, side, side) for side in sides]
    big, middle = sides[-1], sides[len(sides) // 2]
    for short, long in ((sides[0], middle), (sides[1], big), (sides[2], big)):
        shapes += sorted(set(itertools.permutations((short, long, long))))
    shapes += sorted(set(itertools.permutations((sides[1], sides[1], big))))
    return sorted(set(shapes))


def time_product(dims: tuple[int, int, int], dtype: torch.dtype, clock: Clock, seconds: float) -> float:
    """Seconds of the forward pass of one matrix product."""
    m, k, n = dims
    rows = torch.rand(m, k, device=clock.device).to(dtype)
    weight = torch.rand(n, k, device=clock.device).to(dtype)
    with torch.no_grad():
        return time_call(lambda: F.linear(rows, weight), clock, seconds)


def time_operator(operator: Operator, clock: Clock, seconds: float) -> float:
    """Seconds of the forward and the backward pass of one operator."""
    gradient = torch.ones_like(operator.function())
    each = time_call(lambda: torch.autograd.grad(operator.function(), operator.inputs, gradient), clock, seconds)
    return each / operator.count


def edges(clock: Clock, effort: Effort) -> tuple[int, int]:
    """The shortest and the longest side of the products that are timed."""
    gpu = clock.device.type == "cuda"
    return (128 if gpu else 32), effort.largest_product[gpu]


def operators(device: torch.device) -> Iterator[Operator]:
    """Yields typical operators at the sizes of local shards, one by one so that only the tensors of one are held."""
    for elements in _ACTIVATIONS:
        # Models on GPUs are larger, and so are their shards.
        for make in (_linear, _convolution, _attention, _layer_norm, _group_norm, _softmax, _gelu, _mul, _embedding, _cat):
            yield make(elements * (16 if device.type == "cuda" else 1), device)


def _tensor(device: torch.device, *shape: int) -> Tensor:
    return torch.rand(shape, device=device, dtype=TRAINED[device.type]).requires_grad_()


def _size(*tensors: Tensor) -> float:
    return float(sum(tensor.nbytes for tensor in tensors))


def _repeat(function: Callable[[Tensor, int], Tensor], start: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        value = start
        for number in range(_REPEATS):
            value = function(value, number)
        return value

    return run


def _tensors(device: torch.device, *shape: int) -> tuple[Tensor, ...]:
    return tuple(_tensor(device, *shape) for _ in range(_REPEATS))


def _linear(elements: int, device: torch.device) -> Operator:
    rows = elements // 512
    x, weights = _tensor(device, rows, 512), _tensors(device, 512, 512)
    return Operator(
        "product", "linear", _repeat(lambda y, i: F.linear(y, weights[i]), x), (x, *weights),
        2.0 * rows * 512 * 512, _size(x, weights[0], x), (rows, 512, 512), _REPEATS,
    )  # fmt: skip


def _convolution(elements: int, device: torch.device) -> Operator:
    x, weights = _tensor(device, elements // 2**14, 64, 16, 16), _tensors(device, 64, 64, 3, 3)
    # Only products have dims in the cost model: a convolution runs at the full rate, divided by its slowdown.
    return Operator(
        "convolution", "conv2d", _repeat(lambda y, i: F.conv2d(y, weights[i], padding=1), x), (x, *weights),
        2.0 * elements * 64 * 9, _size(x, weights[0], x), None, _REPEATS,
    )  # fmt: skip


def _attention(elements: int, device: torch.device) -> Operator:
    rows = 128 if device.type == "cpu" else 1024
    shape = (elements // (rows * 256), 4, rows, 64)
    q, keys, values = _tensor(device, *shape), _tensors(device, *shape), _tensors(device, *shape)
    return Operator(
        "attention", "scaled_dot_product_attention",
        _repeat(lambda y, i: F.scaled_dot_product_attention(y, keys[i], values[i]), q), (q, *keys, *values),
        2.0 * (elements // 64) * rows * (64 + 64), _size(q, keys[0], values[0], q), None, _REPEATS,
    )  # fmt: skip


def _layer_norm(elements: int, device: torch.device) -> Operator:
    x, weights, biases = _tensor(device, elements // 512, 512), _tensors(device, 512), _tensors(device, 512)
    return Operator(
        "norm", "layer_norm", _repeat(lambda y, i: F.layer_norm(y, (512,), weights[i], biases[i]), x),
        (x, *weights, *biases), 0.0, _size(x, weights[0], biases[0], x), None, _REPEATS,
    )  # fmt: skip


def _group_norm(elements: int, device: torch.device) -> Operator:
    x, weights, biases = _tensor(device, elements // 2**14, 64, 16, 16), _tensors(device, 64), _tensors(device, 64)
    return Operator(
        "norm", "group_norm", _repeat(lambda y, i: F.group_norm(y, 8, weights[i], biases[i]), x),
        (x, *weights, *biases), 0.0, _size(x, weights[0], biases[0], x), None, _REPEATS,
    )  # fmt: skip


def _softmax(elements: int, device: torch.device) -> Operator:
    x = _tensor(device, elements // 512, 512)
    return Operator(
        "softmax", "softmax", _repeat(lambda y, _: torch.softmax(y, -1), x), (x,), 0.0, _size(x, x), None, _REPEATS
    )


def _gelu(elements: int, device: torch.device) -> Operator:
    x = _tensor(device, elements // 512, 512)
    return Operator("pointwise", "gelu", _repeat(lambda y, _: F.gelu(y), x), (x,), 0.0, _size(x, x), None, _REPEATS)


def _mul(elements: int, device: torch.device) -> Operator:
    x, others = _tensor(device, elements // 512, 512), _tensors(device, elements // 512, 512)
    return Operator(
        "pointwise", "mul", _repeat(lambda y, i: y * others[i], x), (x, *others), 0.0, _size(x, x, x), None, _REPEATS
    )


def _embedding(elements: int, device: torch.device) -> Operator:
    table = _tensor(device, 8192, 256)
    tokens = torch.randint(8192, (elements // 256,), device=device)
    size = _size(table, tokens) + float(table.itemsize * elements)
    return Operator("gather", "embedding", lambda: F.embedding(tokens, table), (table,), 0.0, size)


def _cat(elements: int, device: torch.device) -> Operator:
    left, right = _tensor(device, elements // 512, 512), _tensors(device, elements // 512, 256)
    return Operator(
        "copy", "cat", _repeat(lambda y, i: torch.cat([y[:, :256], right[i]], 1), left), (left, *right),
        0.0, 2 * _size(left), None, _REPEATS,
    )  # fmt: skip
