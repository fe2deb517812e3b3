"""Checks that a captured graph computes what the model itself computes, which a comparison of two graphs cannot show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autotp.analysis.conditioning import apart, weighed
from passes.capture import Captured
from passes.torch_internals import reparametrize_module, tree_leaves, tree_map

__all__ = ["compared_with_model"]


def compared_with_model(
    model: nn.Module,
    captured: Captured,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    values: Mapping[str, Any],
    weights: Mapping[int, Tensor],
    gradients: Mapping[str, Tensor],
    least: Mapping[str, float],
) -> Iterator[tuple[str, str, float, bool]]:
    """Runs the model, and compares its results with those of its captured graph. Changes neither the model nor its inputs.

    Args:
        model: the model that was captured.
        captured: its graph.
        args, kwargs: inputs.
        values: the values of the graph's nodes, by name.
        weights: number of the output -> the weights of its elements in the loss whose gradients are compared.
        gradients: name of the parameter -> the gradient of that loss, by the graph.
        least: name of the parameter -> a lower bound on the magnitude that the error of its gradient is relative to.

    Yields:
        (name of a node or parameter, what is compared, the largest difference over the largest magnitude, whether it is a
        gradient).
    """
    state = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    own = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, (tuple(args), kwargs or {}))
    *_, output = captured.graph_module.graph.nodes
    given: Any = output.args[0]
    # Neither functional_call() nor grad(): a checkpoint calls the model again in the backward pass, and may forbid grad().
    with reparametrize_module(model, {**state, **buffers}, tie_weights=True):
        returned, modules = model(*own[0], **own[1]), list(model.modules())
        results = tree_leaves((returned, [left.of(modules) for left in captured.left]))
        pairs = zip(given[: captured.outputs], results, strict=True)
        found = [(i, n, r) for i, (n, r) in enumerate(pairs) if isinstance(n, fx.Node) and isinstance(r, Tensor)]
        loss = [weighed(result, weights[number]).double() for number, _, result in found if number in weights]
        left = dict(model.named_buffers())  # the forward pass may have replaced some
        now = {name: tensor.detach().clone() for name, tensor in captured.values({**state, **left}, *own).items()}
        trains = any(part.requires_grad for part in loss)
        if trains:
            try:
                torch.stack(loss).sum().backward()
            except RuntimeError:  # the model only supports evaluation
                trains = False
    for number, node, result in found:
        yield node.name, f"output {number}", _error(values[node.name], result), False
    for name, node in zip(captured.mutations, given[captured.returned :], strict=True):
        yield node.name, f"the new value of {captured.title(name)}", _error(values[node.name], now[name]), False
    for name, leaf in state.items() if trains else ():
        mine, gradient = gradients.get(name), leaf.grad
        if gradient is not None or mine is not None:
            zero = torch.zeros_like(leaf)
            both = zero if mine is None else mine, zero if gradient is None else gradient
            yield name, f"the gradient of {name}", _error(*both, least.get(name, 0.0)), True


def _error(mine: Tensor, models: Tensor, least: float = 0.0) -> float:
    mine, models = mine.detach(), models.detach()
    if mine.shape != models.shape or mine.dtype != models.dtype:
        return torch.inf
    return apart(mine, models, least)
