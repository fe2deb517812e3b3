"""Outputs of a model as tensors, a loss of any output, and the distance between tensors."""

import torch
from torch.utils._pytree import tree_leaves


def tensors(output):
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def loss_of(output):
    first = tensors(output)[0]
    return first if first.dim() == 0 else (first**2).mean()


def close(got, want, scale, name):
    error = (got.detach().double() - want.detach().double()).abs().max().item() if want.numel() else 0.0
    assert error <= 1e-9 * max(scale, 1e-300), f"{name}: off by {error:.3g} at scale {scale:.3g}"


def proven_least(plan, least, seed):
    """Checks a plan's step and gap against the least step of an exhaustive search; returns whether it claims optimality."""
    step = plan.predicted.step_seconds
    assert step >= least * (1 - 1e-9), seed
    assert step * (1 - plan.gap) <= least * (1 + 1e-9), seed
    assert not plan.optimal or abs(step - least) <= 1e-9 * least, seed
    return plan.optimal
