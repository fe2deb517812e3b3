"""Which collectives are merged into one message."""

import dataclasses
import math

import pytest
import torch
from overlapping import planned, tokens, traced, traced_tokens
from torch import nn

import autotp
from autotp.costs.prices import Prices
from autotp.runtime.durations import enough
from passes.overlap.bucket import buckets, merge
from passes.overlap.primitives import COLLECTIVE_OF, axes_of


@pytest.mark.parametrize(("contention", "count"), [(1.0, 1.0), (0.5, 3.0), (0.0, 18**0.5)])
def test_buckets_are_as_many_as_are_worth_their_latency(contention, count):
    """18 of 19 latencies are spent on bytes, a share of which computation may hide."""
    device = dataclasses.replace(autotp.Topology.load("cpu").device, contention=contention)
    prices = Prices(autotp.Topology.flat(2, bandwidth="1 GB/s", latency="100 us", device=device), (2,))
    nothing = prices.collective("all_reduce", (0,), 0.0)[0]
    total = 18 * nothing / (prices.collective("all_reduce", (0,), 1e9)[0] - nothing) * 1e9
    largest = enough("all_reduce", (0,), math.inf, prices)
    assert total / 18 < largest < total
    assert enough("all_reduce", (0,), total, prices) == pytest.approx(total / count, rel=1e-5)
    assert enough("all_reduce", (0,), total, prices, spare=total / 10) == pytest.approx(total / 20)


def test_buckets_keep_dependent_collectives_apart():
    graph = traced_tokens("data", {}).joint.graph
    before = sum(n.target in COLLECTIVE_OF for n in graph.nodes)
    chosen = buckets(graph, lambda kind, axes, total: 1e9)
    merge(graph, chosen)
    fewer = sum(len(members) - 1 for members in chosen)
    after = sum(n.target in COLLECTIVE_OF for n in graph.nodes)
    assert before - after == fewer > 5
    assert after >= 2, "the loss's own sum comes before the gradients'"


class Mixed(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8).double()

    def forward(self, x):
        return self.second(self.first(x).double()).square().mean()


@pytest.mark.parametrize(("strategy", "mesh"), [("data", (4,)), ("zero3", (4,)), ("data", (2, 2))])
def test_a_bucket_is_of_one_kind_group_and_dtype(strategy, mesh):
    model, args = Mixed(), (torch.randn(8, 8),)
    plan = autotp.plan(model, autotp.Topology.flat(4), args, strategy=strategy, mesh=mesh, panels=1, chunks={})
    found = traced(model, args, plan)
    sets = [
        [list(half.nodes)[place] for place in members]
        for half, chosen in zip((found.cut.forward, found.cut.backward), found.buckets(lambda *_: 1e9), strict=True)
        for members in chosen
    ]
    assert any(len(members) > 1 for members in sets)
    for members in sets:
        assert len({(n.target, axes_of(n.target, n.args), n.args[0].meta["val"].dtype) for n in members}) == 1
    dtypes = {n.args[0].meta["val"].dtype for members in sets for n in members}
    assert dtypes == {torch.float32, torch.float64}


def test_collectives_of_two_groups_travel_apart():
    model, args = tokens()
    whole = dataclasses.replace(
        autotp.FAMILIES["megatron-1d"], roles=lambda _: ["dw"]
    )  # gradients are all-reduced, not reduce-scattered
    found = traced(model, args, planned(model, args, whole, (2, 2)))
    nodes = list(found.cut.backward.nodes)
    groups = [{axes_of(nodes[i].target, nodes[i].args) for i in members} for members in found.buckets(lambda *_: 1e9)[1]]
    assert all(len(each) == 1 for each in groups)
    reduced = {axes_of(n.target, n.args) for n in nodes if COLLECTIVE_OF.get(n.target) == "all_reduce"}
    assert len(reduced) > 1, "otherwise the test checks nothing"


def test_what_is_sent_on_travels_in_one_message_where_nothing_hides():
    """Gradients that are scattered within nodes and then between them are merged, as many as memory allows."""
    model, args = tokens()
    found = traced(model, args, planned(model, args, "zero3", (2, 2)))
    nodes = list(found.cut.backward.nodes)
    sent = [n for n in nodes if COLLECTIVE_OF.get(n.target) == "reduce_scatter"]
    assert len(sent) > 8 and len({axes_of(n.target, n.args) for n in sent}) == 2

    def most(bytes_):
        sets = found.buckets(lambda *_: 1e6, lambda *_: (0.0, 1.0, bytes_))[1]
        return [sum(nodes[i].args[0].meta["val"].nbytes for i in members) for members in sets]

    assert max(most(2**12)) <= 2**12 < max(most(1e9))


@pytest.mark.slow
def test_buckets_do_not_hold_up_what_another_chunk_waits_for():
    for chunks in ({}, {"batch": 2}):
        found = traced_tokens("megatron-1d", chunks)
        for half, sets in zip((found.cut.forward, found.cut.backward), found.buckets(lambda *_: 1e9), strict=True):
            nodes = list(half.nodes)
            for members in sets:
                first = products(nodes[members[0]], "all_input_nodes")
                same = all(products(nodes[place], "all_input_nodes") == first for place in members)
                assert same or not any(products(nodes[place], "users") for place in members)
    assert any(len(members) > 1 for members in found.buckets(lambda *_: 1e9)[1]), "the gradients of norms"


def products(node, step):
    """The matrix products that a node depends on (``all_input_nodes``) or that depend on it (``users``)."""
    seen, pending = set(), [node]
    while pending:
        near = set(getattr(pending.pop(), step)) - seen
        seen |= near
        pending += near
    return {each for each in seen if "mm" in str(each.target)}
