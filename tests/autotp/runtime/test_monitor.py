"""Numerical problems that are found in what all ranks have seen."""

import dataclasses
import math

from autotp.runtime.programs.monitor import Seen, problem


def seen(total, part=(), copies=2, what="operator linear in blocks.0", norm=1.0, **others):
    return Seen(what, part, copies, total, norm, 16, 1e-6, **others)


def test_replicas_are_equal_up_to_rounding():
    assert problem([[seen(3.0)], [seen(3.0 + 1e-6)]], numbers=True) == ""
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
    nan, mask = seen(math.nan, norm=math.nan), seen(-math.inf, norm=math.inf)
    ranks = [[mask, nan, seen(1.0)], [mask, seen(1.0), seen(1.0)]]
    assert problem(ranks, numbers=True) == "operator linear in blocks.0 has elements that are NaN, on rank 0"
    assert problem(ranks, numbers=False) == ""
    gradient = dataclasses.replace(mask, gradient=True)
    assert "infinite or NaN, on rank 0, 1" in problem([[gradient], [gradient]], numbers=True)
