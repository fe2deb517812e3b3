"""Marks that tracing leaves on nodes, which tell the modules that they come from."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx import traceback

from passes.overlap.trace import _Marking


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        raise ValueError("it fails")


def _fails(x: torch.Tensor) -> torch.Tensor:
    return _Fails.apply(x)


def test_a_backward_pass_that_fails_takes_no_mark_of_a_later_trace():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(_fails, (x,)))
    marked = _Marking(fx.GraphModule(torch.nn.Module(), graph))
    with traceback.preserve_node_meta():
        end = marked.run(torch.ones(2, requires_grad=True))
        marked.mark_backward([end])
        with pytest.raises(ValueError, match="it fails"):
            end.sum().backward()
    assert "custom" not in traceback.current_meta
    with traceback.annotate({"later": 1}):
        del marked, end
        gc.collect()
        assert traceback.current_meta["custom"] == {"later": 1}
