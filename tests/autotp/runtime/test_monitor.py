"""Numerical problems that are found in what all ranks have seen."""

import dataclasses
import types

import pytest
import torch
from torch.distributed.tensor import Replicate

from autotp.runtime.programs.monitor import Monitor, Seen, problem


def seen(total, part=(), copies=2, what="operator linear in blocks.0", norm=1.0, **others):
    return Seen(what, part, copies, total, norm, 16, 1e-6, **others)


def test_replicas_are_equal_up_to_rounding():
    assert problem([[seen(3.0)], [seen(3.0 + 9e-7)]], numbers=True) == ""
    found = problem([[seen(1.0), seen(3.0)], [seen(1.0), seen(3.1)]], numbers=True)
    assert found.startswith("operator linear in blocks.0 differs between ranks 0 and 1") and "3.1" in found
    apart = [[seen(float(rank), (rank // 2,))] for rank in (0, 1, 2, 3)]
    assert "differs between ranks 0 and 1" in problem(apart, numbers=True)
    assert problem([[seen(float(rank // 2), (rank // 2,))] for rank in range(4)], numbers=True) == ""


def test_partial_sums_are_added_once():
    """A bias that every rank adds before its partial sums are reduced is counted more than once, which is reported."""
    partial = [seen(total, (rank,), 1) for rank, total in enumerate((1.0, 2.0))]
    once = [[seen(3.0, before=part)] for part in partial]
    assert problem(once, numbers=False) == ""
    twice = [[seen(4.0, before=part)] for part in partial]
    assert "adds up to 3 before its reshard and to 4 after it" in problem(twice, numbers=False)
    scattered = [
        [seen(total, (rank,), 1, before=part)] for rank, (total, part) in enumerate(zip((0.5, 2.5), partial, strict=True))
    ]
    assert problem(scattered, numbers=False) == ""


def test_the_first_that_is_no_number_is_named():
    nan, mask = seen(1.0, nan=True), seen(1.0, infinite=True)
    ranks = [[mask, nan, seen(1.0)], [mask, seen(1.0), seen(1.0)]]
    assert problem(ranks, numbers=True) == "operator linear in blocks.0 has elements that are NaN, on rank 0"
    assert "only one has elements that are infinite or NaN" in problem(ranks, numbers=False)
    assert problem([[mask], [mask]], numbers=True) == ""
    assert "differs between ranks 0 and 1" in problem([[mask], [dataclasses.replace(mask, total=2.0)]], numbers=True)
    gradient = dataclasses.replace(mask, gradient=True)
    assert "infinite or NaN, on rank 0, 1" in problem([[gradient], [gradient]], numbers=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_what_replicas_of_a_million_elements_may_differ_by(dtype):
    """Rounding in the last place is no difference; one element in ten with the wrong sign is."""
    monitor = Monitor(types.SimpleNamespace(mesh_shape=(2,), hosted=((0,),)), None)
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(1000, 1000, dtype=torch.float64, generator=generator)
    rounded = tensor * (1 + torch.finfo(dtype).eps * (torch.rand(tensor.shape, generator=generator) - 0.5))
    wrong = torch.where(torch.rand(tensor.shape, generator=generator) < 0.1, -tensor, tensor)

    def compared(*parts):
        return problem([[monitor._measured("x", part.to(dtype), (Replicate(),))] for part in parts], numbers=True)

    assert compared(tensor, rounded) == ""
    assert "x differs between ranks 0 and 1" in compared(tensor, wrong)
    wrong[0, 0] = torch.inf
    assert "only one" in compared(tensor, wrong)
    assert "differs" in compared(tensor.clone().index_fill_(0, torch.tensor([0]), torch.inf), wrong)
