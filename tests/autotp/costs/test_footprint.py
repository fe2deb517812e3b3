"""Predicted memory compared with the memory that a step allocates, measured operator by operator."""

from __future__ import annotations

import dataclasses
import gc
import math

import pytest
import torch
from thinned import thinned
from torch import nn

import autotp
from autotp import FAMILIES
from benchmarks.allocated import Allocated
from benchmarks.memory import allocated, compared
from benchmarks.models import trained


@pytest.mark.exact
@pytest.mark.parametrize("name", ["unet", "gpt", "llama"])
def test_without_overlap_predictions_are_what_a_step_allocates(name):
    model, args = trained(name)
    rows = compared(model, args, list(FAMILIES), [(2, 2)])
    assert len(rows) == len(FAMILIES)
    for family, mesh, predicted, found in rows:
        assert predicted == pytest.approx(found, rel=0.04), (family, mesh)


@pytest.mark.slow
def test_a_plan_under_a_memory_bound_keeps_it_when_run():
    model, args = trained("gpt")
    topology = autotp.Topology.load("dgx-h100").resized(4)
    free = autotp.plan(model, topology, args, mesh=(2, 2))
    bound = 0.85 * free.predicted.memory_bytes
    tight = autotp.plan(model, topology, args, mesh=(2, 2), memory=bound)
    assert tight.predicted.memory_bytes <= bound
    assert allocated(model, args, tight) <= 1.02 * bound
    assert allocated(model, args, tight, "overlap") <= bound


CASES = [
    ("gpt", "zero3", (4,), "none", None, 1),
    ("gpt", "zero3", (4,), "full", None, 4),  # products in panels are recomputed too
    ("unet", "tensor3d", (2, 2), "none", "bf16-mixed", 1),  # a skip connection: of its tensor, only slices are read
    ("gpt", "tensor3d", (2, 2), "full", "bf16-mixed", 1),
    ("gpt", "summa-2d", (2, 2), "selective", None, 4),
    ("llama", "megatron-sp", (4,), "selective", None, 1),
    ("llama", "summa-2d", (2, 2), "none", "bf16-mixed", 1),
    ("unet", "tensor3d", (2, 2), "selective", "bf16-mixed", 1),
    ("unet", "megatron-sp", (2, 2), "full", None, 1),
    ("vit", "megatron-1d", (2, 2), "full", "bf16-mixed", 1),
    ("vit", "zero3", (4,), "none", None, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family", "mesh", "recompute", "precision", "panels"), thinned(CASES, first=3))
def test_no_schedule_holds_more_than_its_plan_says_where_that_is_all_there_is(
    name, family, mesh, recompute, precision, panels
):
    model, args = trained(name)
    topology = autotp.Topology.load("dgx-h100").resized(math.prod(mesh))
    options = {"strategy": family, "mesh": mesh, "recompute": recompute, "precision": precision, "panels": panels}
    plan = autotp.plan(model, topology, args, **options)
    plan = dataclasses.replace(plan, memory_bound=plan.predicted.memory_bytes)
    found = allocated(model, args, plan, "overlap")
    assert 0.92 * plan.predicted.memory_bytes <= found <= plan.predicted.memory_bytes


@pytest.mark.exact
@pytest.mark.parametrize(
    ("name", "family", "mesh", "precision"),
    [(*case[:3], case[4]) for case in CASES if case[3] == "none" and case[1] != "tensor3d"],
)
def test_parameters_that_are_gathered_once_are_held_until_they_are_read(name, family, mesh, precision):
    model, args = trained(name)
    topology = autotp.Topology.load("dgx-h100").resized(math.prod(mesh))
    options = {"strategy": family, "mesh": mesh, "recompute": "none", "precision": precision, "panels": 1}
    alone = options | {"schedule": "none"}
    once, twice = (autotp.plan(model, topology, args, **alone, reshard_after_forward=way) for way in (False, True))
    assert once.gathered_once and not twice.gathered_once
    more = once.predicted.memory_bytes - twice.predicted.memory_bytes
    assert more > 0.03 * twice.predicted.memory_bytes
    assert allocated(model, args, once) - allocated(model, args, twice) == pytest.approx(more, rel=0.01)
    plan = autotp.plan(model, topology, args, **options, reshard_after_forward=False)
    plan = dataclasses.replace(plan, memory_bound=plan.predicted.memory_bytes)
    assert 0.92 * plan.predicted.memory_bytes <= allocated(model, args, plan, "overlap") <= plan.predicted.memory_bytes


@pytest.mark.exact
def test_messages_are_as_large_as_the_memory_allows():
    model, args = trained("gpt")
    topology = autotp.Topology.load("dgx-h100").resized(4)
    plan = autotp.plan(model, topology, args, strategy="zero3", mesh=(4,))
    tight = dataclasses.replace(plan, memory_bound=plan.predicted.memory_bytes)
    least, most = (allocated(model, args, each, "overlap") for each in (tight, plan))
    assert least <= plan.predicted.memory_bytes < most


@pytest.mark.slow
def test_inference_holds_neither_gradients_nor_what_a_backward_pass_needs():
    model, args = trained("gpt")
    topology = autotp.Topology.load("dgx-h100").resized(2)
    train = autotp.plan(model, topology, args, strategy="megatron-1d", mesh=(2,))
    infer = autotp.plan(model, topology, args, strategy="megatron-1d", mesh=(2,), mode="inference")
    parameters = sum(p.nbytes for p in model.parameters())
    assert parameters / 2 < infer.predicted.memory_bytes < train.predicted.memory_bytes / 3


def test_what_is_watched_is_what_is_alive():
    watch = Allocated()
    weight = nn.Parameter(torch.zeros(256, 256))
    watch.add(weight)
    watch.add(weight.view(-1))
    assert watch.live == weight.numel() * 4
    with watch:
        a = weight * 2
        b = a.view(-1)[:10]
        assert watch.live == 2 * weight.numel() * 4
        del a
        gc.collect()
        assert watch.live == 2 * weight.numel() * 4, "a view keeps the storage"
        del b
        gc.collect()
    assert watch.live == weight.numel() * 4
    assert watch.peak == 2 * weight.numel() * 4
