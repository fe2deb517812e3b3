"""Accumulated steps: several micro-batches, of which the last alone reduces, give the sum's gradients to 1e-9."""

import contextlib
import dataclasses
import functools

import pytest
import torch
from comparing import close, loss_of
from devices import slow_machine
from float64 import double, float64_mode
from models import MODELS
from torch.utils._pytree import tree_map

import autotp
from autotp.planner import plan_captured
from autotp.plans.options import Options
from autotp.runtime.durations import overlap_of
from autotp.runtime.rewrite import apply
from autotp.runtime.simulate import Simulated
from passes.capture import capture
from passes.world.world import LocalWorld

STEPS, MICRO = 3, 3

#: Every family on both meshes, by turns with and without overlap, and every model.
NAMES = ("gpt2", "llama", "bert", "vit", "unet", "resnet")
FAMILIES = [
    ("llama" if family in ("summa-2d", "tesseract-2.5d", "3d") else NAMES[(i + j) % len(NAMES)], family, mesh, (i + j) % 2)
    for i, family in enumerate(autotp.FAMILIES)
    for j, mesh in enumerate([(4,), (2, 2)])
    if mesh == (2, 2) or family not in ("summa-2d", "tesseract-2.5d", "3d")
]


@functools.cache
def captured(name):
    with float64_mode():
        model, args, kwargs = double(MODELS[name])
        return capture(model, args, kwargs)


def shifted(tree, by):
    """Other values of the same kind: a micro-batch of its own."""

    def shift(leaf):
        if not isinstance(leaf, torch.Tensor) or leaf.dtype is torch.bool:
            return leaf
        return leaf.roll(by, -1) * (1 + by / 10 if leaf.is_floating_point() else 1)

    return tree_map(shift, tree)


def simulated(name, strategy, mesh, overlap, panels=None, chunks=None):
    plan = plan_captured(captured(name), slow_machine(mesh), Options(strategy, mesh=mesh, panels=panels, schedule="none"))
    plan = dataclasses.replace(plan, chunks=chunks or {})
    model, args, kwargs = double(MODELS[name])
    how = overlap_of(plan) if overlap else None
    return Simulated(model, apply(captured(name), plan), LocalWorld(mesh), how), args, kwargs


def micro_batches(module, args, kwargs, count=MICRO):
    """The loss of every micro-batch; all but the last without reductions where the module knows of them."""
    for k in range(count):
        inner = k + 1 < count and hasattr(module, "no_sync")
        with module.no_sync() if inner else contextlib.nullcontext():
            yield loss_of(module(*shifted(args, k), **shifted(kwargs, k)))


def same_gradients(module, plain):
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    largest = max(g.abs().max().item() for g in wanted.values() if g is not None)
    for n, p in module.named_parameters():
        if wanted[n] is None:
            assert p.grad is None or not p.grad.any(), n
        else:
            close(p.grad, wanted[n], max(wanted[n].abs().max().item(), 1e-3 * largest), f"gradient of {n}")


def check(name, strategy, mesh, overlap, panels=None, chunks=None):
    with float64_mode():
        plain, _, _ = double(MODELS[name])
        ours, args, kwargs = simulated(name, strategy, mesh, overlap, panels, chunks)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (plain, ours)]
        for _ in range(STEPS):
            for module in (plain, ours):
                module.zero_grad()
                for loss in micro_batches(module, args, kwargs):
                    assert module is plain or all(p.grad is None for p in module.parameters())
                    loss.backward()
            same_gradients(ours, plain)
            for optimizer in optimizers:
                optimizer.step()
    assert not overlap or all(found is not None for found in ours._compiled.values())
    for (n, want), got in zip(plain.named_parameters(), ours.parameters(), strict=True):
        close(got, want, max(want.abs().max().item(), 1e-2), f"parameter {n} after the steps")


@pytest.mark.parametrize(("name", "strategy", "mesh", "overlap"), FAMILIES, ids=lambda v: str(v).replace(" ", ""))
def test_every_family(name, strategy, mesh, overlap):
    check(name, strategy, mesh, overlap)
