"""Which collectives travel together."""

import dataclasses
import math

import pytest
from overlapping import planned, tokens

import autotp
from autotp.durations import enough
from autotp.pricing import Prices
from autotp.rewrite import rewrite
from passes.bucket import buckets, merge
from passes.layout import take
from passes.overlap import halves
from passes.primitives import COLLECTIVES


@pytest.mark.parametrize(("contention", "count"), [(1.0, 1.0), (0.5, 3.0), (0.0, 18**0.5)])
def test_buckets_are_as_many_as_are_worth_their_latency(contention, count):
    """Of 19 latencies 18 are spent on bytes, of which computing may hide a share."""
    device = dataclasses.replace(autotp.Topology.load("cpu").device, contention=contention)
    prices = Prices(autotp.Topology.flat(2, bandwidth="1 GB/s", latency="100 us", device=device), (2,))
    nothing = prices.collective("all_reduce", (0,), 0.0)[0]
    total = 18 * nothing / (prices.collective("all_reduce", (0,), 1e9)[0] - nothing) * 1e9
    largest = enough("all_reduce", (0,), math.inf, prices)
    assert total / 18 < largest < total
    assert enough("all_reduce", (0,), total, prices) == pytest.approx(min(largest, total / count), rel=1e-5)


def prepared(strategy, chunks):
    """A traced graph of the first of two devices, cut in two."""
    model, args = tokens()
    plan = dataclasses.replace(planned(model, args, strategy), chunks=chunks)
    made = rewrite(model, plan, args)
    state = dict(model.named_parameters())
    whole = {name: state[fqn].detach() for name, fqn in made.captured.parameters.items()}
    whole |= dict(zip(made.captured.inputs, args, strict=True))
    parts = {name: take(value, made.sharding.resting.get(name, made.whole), (2,), (0,)) for name, value in whole.items()}
    return halves(made.graph_module, (2,), (0,), parts, frozenset(made.captured.parameters))


def test_buckets_keep_dependent_collectives_apart():
    graph = prepared("data", {}).joint.graph
    before = sum(n.target in COLLECTIVES for n in graph.nodes)
    chosen = buckets(graph, lambda kind, axes, total: 1e9)
    merge(graph, chosen)
    fewer = sum(len(members) - 1 for members in chosen)
    after = sum(n.target in COLLECTIVES for n in graph.nodes)
    assert before - after == fewer > 5
    assert after >= 2, "the loss's own sum comes before the gradients'"


def test_buckets_do_not_hold_up_what_another_chunk_waits_for():
    for chunks in ({}, {"batch": 2}):
        found = prepared("megatron-1d", chunks)
        for half, sets in zip((found.cut.forward, found.cut.backward), found.buckets(lambda *_: 1e9), strict=True):
            nodes = list(half.nodes)
            for members in sets:
                first = products(nodes[members[0]], "all_input_nodes")
                same = all(products(nodes[place], "all_input_nodes") == first for place in members)
                assert same or not any(products(nodes[place], "users") for place in members)
    assert any(len(members) > 1 for members in found.buckets(lambda *_: 1e9)[1]), "the gradients of norms"


def products(node, step):
    """The matrix products that a node comes after (``all_input_nodes``) or before (``users``)."""
    seen, pending = set(), [node]
    while pending:
        near = set(getattr(pending.pop(), step)) - seen
        seen |= near
        pending += near
    return {each for each in seen if "mm" in str(each.target)}
