"""Compiles one graph of torch's operators with Inductor."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from passes.overlap.trace import current_device
from passes.torch_internals import FakeTensorMode, FileLock, TracingContext, cpp_compiler, has_triton, inductor, tracing

__all__ = ["compiled", "unavailable"]


def unavailable(device: torch.device) -> str:
    """Why graphs cannot be compiled for a device; empty if they can."""
    if device.type != "cpu":
        return "" if has_triton() else "triton is not installed, or does not know this device"
    try:
        cpp_compiler()
    except RuntimeError as error:
        return str(error)
    return ""


def compiled(graph: fx.Graph, lock: str) -> Callable[[list[Any]], Sequence[Any]]:
    """Compiles a graph that maps operands to a tuple of results.

    Args:
        graph: functional, with static shapes; the fake tensor of every placeholder has the strides of its operand.
        lock: a name of the graph. One of the processes on a machine compiles it; the others find it in torch's cache.

    Returns:
        A function of a list of the operands, which it empties; it returns the results.
    """
    backend = inductor()
    operands = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    device = next((each.device for each in operands if each.device.type != "cpu"), torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in operands]
        module = make_fx(fx.Interpreter(fx.GraphModule({}, graph)).run, backend.decompositions())(*fakes)
    os.makedirs(backend.cache_dir(), exist_ok=True)
    with (
        FileLock(os.path.join(backend.cache_dir(), f"autotp-{lock}.lock")),
        current_device(operands),
        tracing(TracingContext(mode)),
        torch.no_grad(),
    ):
        backend.prepare(module, input_device=device)
        # Results keep their traced strides even if others would be faster, as nodes outside of the region rely on them.
        results: Any = module.graph.output_node()
        results.meta["user_visible_output_idxs"] = range(len(results.args[0]))
        backend.record_strides(module)
        found: Callable[[list[Any]], Sequence[Any]] = backend.compile(module, fakes)
        return found
