"""How much rounding alone changes the results of a model: measured by changing its parameters and inputs by one unit in
the last place.

Another order of summation is as correct as the model's own, and gives the results of the model for parameters that differ
in their last places. If such a change alters a result by more than a tolerance, a comparison with that tolerance is
meaningless.
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
    """The relative change of each result when the state is changed by one unit in the last place, up or down at random.

    Args:
        run: computes named results (values, gradients) from a state. It must be deterministic, and must not modify the
            state.
        state: parameters and inputs by name. Only floating-point and complex tensors are changed.
        seed: of the random directions.
        least: name of the result -> a lower bound on the magnitude that its change is relative to.

    Returns:
        Name of the result -> the largest change in any of several draws, over the result's largest magnitude; 1 for an
        integer result that changes at all.
    """
    least = least or {}
    # Copies: a result may alias the state, or be written to in the next run.
    before = {name: value.detach().clone() for name, value in run(state).items()}
    generator = torch.Generator().manual_seed(seed)
    found = dict.fromkeys(before, 0.0)
    for _ in range(_DRAWS):
        after = run({name: nudged(tensor, generator) for name, tensor in state.items()})
        for name, value in before.items():
            found[name] = max(found[name], apart(after[name].detach(), value, least.get(name, 0.0)))
    return found


def nudged(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A copy of a tensor, with every element changed by one unit in its last place, up or down at random.

    Zeros, which have no last place, and non-finite elements are kept, and so are integers.
    """
    source = tensor.detach()
    if source.is_complex():
        made = torch.view_as_complex(nudged(torch.view_as_real(source.resolve_conj()).contiguous(), generator))
    elif source.is_floating_point():
        # On the CPU: kernels of accelerators support fewer dtypes.
        value = source.cpu()
        towards = torch.randint(0, 2, value.shape, generator=generator).to(value.dtype).mul_(2).sub_(1) * math.inf
        other = torch.nextafter(value, towards)
        made = torch.where((value != 0) & value.isfinite() & other.isfinite(), other, value).to(source.device)
    else:
        made = source.clone()
    return made.requires_grad_(tensor.requires_grad)


def weighed(output: Tensor, weights: Tensor) -> Tensor:
    """A loss: the weighted sum of an output, or the real part of that sum if it is complex."""
    total = (output * weights).sum()
    return total.real if total.is_complex() else total


def apart(given: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """The largest difference over the largest magnitude or ``least``, the larger of both; 1 for integers that differ."""
    if not differentiable(expected):
        return 0.0 if torch.equal(given, expected) else 1.0
    return difference(given, expected, max(largest(expected), least)) if expected.numel() else 0.0


def rounding(dtype: torch.dtype) -> float:
    """The largest error of a result that rounding may cause, as a multiple of its change in ``moved``.

    That change rounds every parameter once. Another order of summation rounds every operator's result again, and its
    partial sums: in the test models in float64 and float32, its error is about as large (0.6 times in the median), and at
    most 11 times, where one sum is over a vocabulary of 50,257. Kernels sum 16-bit floats in float32, so that the order
    matters less.
    """
    return 4.0 if dtype in (torch.float16, torch.bfloat16) else 16.0
