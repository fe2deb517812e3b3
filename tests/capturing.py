"""Small programs, and the comparison of a captured graph with its model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from passes.capture import Captured, capture


def run(captured: Captured, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Runs the graph on the model's own state; returns the user's outputs, and new buffers by name."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    flat = captured.graph_module(
        *(state[n] for n in captured.parameters.values()),
        *(state[n] for n in captured.buffers.values()),
        *captured.constants.values(),
        *captured.signature.flatten(args, kwargs),
    )
    buffers = dict(zip(captured.mutations, flat[captured.returned :], strict=True))
    return captured.signature.unflatten(flat[: captured.outputs]), {captured.buffers[k]: v for k, v in buffers.items()}


def scalar(output: Any) -> torch.Tensor:
    """A weighted sum of all floating-point leaves of an output that require gradients."""
    floats = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.requires_grad]
    return sum((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in floats)


def compare(model: nn.Module, args: Any, kwargs: Any, captured: Captured, tolerance: float = 1e-12) -> None:
    """Checks that outputs, gradients and changed buffers of the graph equal those of the model."""
    before = {n: b.detach().clone() for n, b in model.named_buffers()}
    got, changed = run(captured, model, args, kwargs)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), f"running the graph changed {name}"
    loss = scalar(got)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) if torch.is_tensor(loss) else None
    wanted = model(*args, **kwargs)
    expected = scalar(wanted)
    assert type(got) is type(wanted)
    for a, b in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        if torch.is_tensor(b):
            assert a.requires_grad == b.requires_grad
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        else:
            assert a == b
    if grads is not None:
        theirs = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
        for (name, _), a, b in zip(model.named_parameters(), grads, theirs, strict=True):
            assert (a is None) == (b is None), name
            if a is not None:
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(changed.get(name, before[name]), buffer, rtol=tolerance, atol=tolerance)


def check(model: nn.Module, *args: Any, **kwargs: Any) -> Captured:
    """Captures a small model in float64, compares it with the model, and returns it."""
    model = model.double()
    captured = capture(model, args, kwargs)
    compare(model, args, kwargs, captured)
    for node in captured.graph_module.graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta
            schema = getattr(node.target, "_schema", None)
            assert schema is None or not schema.is_mutable, f"{node.target} writes"
    return captured


def targets(captured: Captured) -> list[str]:
    """The names of a captured graph's operators, in order."""
    return [str(n.target) for n in captured.graph_module.graph.nodes if n.op == "call_function"]


def program(function: Any, *, size: int = 8) -> nn.Module:
    """A model that computes ``function(self, self.linear(x), ...)``, with a buffer ``state`` of 8 numbers."""

    class Program(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(size, size)
            self.register_buffer("state", torch.arange(8.0))

        def forward(self, x: torch.Tensor, *rest: Any, **named: Any) -> Any:
            return function(self, self.linear(x), *rest, **named)

    return Program()


def image(*shape: int) -> torch.Tensor:
    """Deterministic float64 noise."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
