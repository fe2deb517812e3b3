"""How far rounding alone moves what a model computes, measured by moving its weights and inputs by one unit in the last
place.

Another order of summation is as correct as the model's own, and gives what the model gives for weights that differ in their
last places. Where such a move changes a result by more than a tolerance, comparing with that tolerance says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from autotp.analysis.compare import difference, largest
from passes.graph import differentiable

__all__ = ["apart", "moved", "nudged", "rounding", "weighed"]

_DRAWS = 3


def moved(
    run: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
    state: Mapping[str, Tensor],
    *,
    seed: int = 0,
    least: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """How far each result moves when the state is moved by one unit in the last place, up or down at random.

    Args:
        run: gives named results (values, gradients) of a state; it must give the same ones for the same state, and leave
            the state as it is.
        state: weights and inputs by name. What is not floating point is not moved.
        seed: of the moves.
        least: name of the result -> magnitude that it counts as no smaller than.

    Returns:
        Name of the result -> the largest change in any draw, over the result's largest magnitude. An integer result that
        changes at all has moved by 1.
    """
    least = least or {}
    # A copy: a result may be part of the state, or be written to in the next run.
    before = {name: value.detach().clone() for name, value in run(state).items()}
    generator = torch.Generator().manual_seed(seed)
    found = dict.fromkeys(before, 0.0)
    for _ in range(_DRAWS):
        after = run({name: nudged(tensor, generator) for name, tensor in state.items()})
        for name, value in before.items():
            found[name] = max(found[name], apart(after[name].detach(), value, least.get(name, 0.0)))
    return found


def nudged(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A copy in which every element is moved by one unit in its last place, up or down at random.

    Zeros, which have no last place, and what is not finite stay; so do tensors of other numbers than floating-point ones.
    """
    source = tensor.detach()
    if source.is_complex():
        made = torch.view_as_complex(nudged(torch.view_as_real(source.resolve_conj()).contiguous(), generator))
    elif source.is_floating_point():
        # On the CPU: kernels of accelerators support fewer formats.
        value = source.cpu()
        towards = torch.randint(0, 2, value.shape, generator=generator).to(value.dtype).mul_(2).sub_(1) * math.inf
        other = torch.nextafter(value, towards)
        made = torch.where((value != 0) & value.isfinite() & other.isfinite(), other, value).to(source.device)
    else:
        made = source.clone()
    return made.requires_grad_(tensor.requires_grad)


def weighed(output: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of an output, of its real part where it is complex: a loss."""
    total = (output * weights).sum()
    return total.real if total.is_complex() else total


def apart(given: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """The largest difference over the largest magnitude or ``least``; 1 for integers that are not the same."""
    if not differentiable(expected):
        return 0.0 if torch.equal(given, expected) else 1.0
    return difference(given, expected, max(largest(expected), least)) if expected.numel() else 0.0


def rounding(dtype: torch.dtype) -> float:
    """How many times its move a result may be off by rounding.

    A move rounds every weight once. Summing in another order rounds every operator's result again, and its partial sums: in
    the test models in float64 and float32 that is about as much (0.6 times in the median), and at most 11 times, where one
    sum is over a vocabulary of 50,257. Kernels sum halves in float32, so there the order does less.
    """
    return 4.0 if dtype in (torch.float16, torch.bfloat16) else 16.0
