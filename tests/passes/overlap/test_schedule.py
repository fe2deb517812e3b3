"""List scheduling: what is hidden behind what, within limits, and one order of launches on all ranks."""

import dataclasses

import pytest
import torch
from overlapping import prepared, random_durations
from torch import fx

import autotp
from autotp.runtime.durations import overlap_of
from passes.graph import annotate
from passes.overlap.launch import launch, wait
from passes.overlap.schedule import Limits, Task, schedule
from passes.world.world import LocalWorld


def launched(graph):
    return [(n.args[1], str(n.args[3:])) for n in graph.nodes if n.target is launch]


@pytest.mark.exact
def test_every_rank_launches_in_one_order():
    """Ranks that measure different times would choose different orders, so the order of one rank is used by all."""
    graphs, _ = prepared("tensor3d", (2, 2), {"batch": 2})
    places = ((0, 0), (0, 1), (1, 0), (1, 1))
    assert len({prepared("tensor3d", (2, 2), {"batch": 2}, raw=True)[0](at).signature for at in places}) == 1
    devices = [graphs(at) for at in places]
    own = [each.orders(each.slots(random_durations(i), Limits())) for i, each in enumerate(devices)]
    alone = [launched(each.modules(order, LocalWorld((2, 2)))[0].graph) for each, order in zip(devices, own, strict=True)]
    assert any(other != alone[0] for other in alone[1:]), "otherwise the test checks nothing"
    agreed = [[launched(half.graph) for half in each.modules(own[0], LocalWorld((2, 2)))] for each in devices]
    assert all(other == agreed[0] for other in agreed[1:])
    assert agreed[0][0]


def test_different_graphs_have_different_signatures():
    one, two = prepared(raw=True)[0]((0,)), prepared(chunks={"batch": 2}, raw=True)[0]((0,))
    assert one.signature != two.signature


def test_a_chunk_computes_while_another_communicates():
    spans = {}
    for chunks in (1, 2):

        def durations(node, chunks=chunks):
            if node.target is launch:
                return Task(1.0 / chunks, "axes 0")
            return Task(0.5 / chunks if "mm" in str(node.target) else 0.0)

        slots = schedule(prepared(chunks={"batch": chunks})[0]((0,)).forward, durations)
        spans[chunks] = max(slot.end for slot in slots)
    assert spans[2] < 0.8 * spans[1], spans


def test_no_more_collectives_are_under_way_than_allowed():
    graphs, plan = prepared("zero3", (2,), {"batch": 2})
    made = graphs((0,))
    slow = autotp.Topology.flat(2, bandwidth="1 MB/s", latency="1 ms")
    durations = overlap_of(dataclasses.replace(plan, topology=slow)).durations
    for most in (1, 3):
        under_way = peak = 0
        for slot in schedule(made.backward, durations, Limits(collectives=most)):
            under_way += (slot.node.target is launch) - (slot.node.target is wait)
            peak = max(peak, under_way)
        assert peak == most


def backward_of(layers, gathered=False):
    """A backward pass by hand: each layer's gradient is reduced on one link, and the result on another."""
    graph = fx.Graph()
    value, part, big = (graph.placeholder(name) for name in ("x", "part", "big"))
    annotate(big, held=10.0)
    sums = []
    for i in range(layers):
        gradient = graph.call_function(torch.sin, (value,), name=f"gradient_{i}")
        here = graph.call_function(wait, (graph.call_function(launch, (gradient,), name=f"inner_{i}"),))
        sums.append(graph.call_function(wait, (graph.call_function(launch, (here,), name=f"outer_{i}"),)))
        value = graph.call_function(torch.cos, (value,), name=f"chain_{i}")
    value = graph.call_function(torch.add, (value, big), name="last")
    if gathered:
        part = graph.call_function(wait, (graph.call_function(launch, (part,), name="gather"),))
        value = graph.call_function(torch.mul, (value, part), name="product")
    graph.output((value, *sums))
    return graph


def by_name(seconds, bytes_):
    def durations(node):
        kind = node.name.partition("_")[0]
        lane = kind if node.target is launch else "compute"
        return Task(seconds.get(kind, 0.0), lane, bytes_.get(kind, 0.0))

    return durations


def test_a_link_is_fed_by_what_has_arrived_on_another():
    durations = by_name({"gradient": 1.0, "chain": 1.0, "inner": 0.5, "outer": 4.0}, {})
    slots = {slot.node.name: slot for slot in schedule(backward_of(6), durations)}
    assert slots["outer_0"].begin <= 3.0, "as soon as the computing that goes on when it arrives is done"
    assert max(slot.end for slot in slots.values()) <= 3.0 + 6 * 4.0 + 1e-9, "and from then on the link is never idle"


def test_a_collective_that_there_is_no_memory_for_holds_nothing_else_up():
    seconds = {"gradient": 1.0, "chain": 1.0, "inner": 0.5, "outer": 2.0, "gather": 50.0, "product": 100.0}
    durations = by_name(seconds, {"gather": 10.0, "gradient": 0.5, "chain": 0.5})
    slots = {slot.node.name: slot for slot in schedule(backward_of(6, True), durations, Limits(slack=0.1))}
    assert slots["gather"].begin >= slots["last"].end, "nothing may be held beside what `last` reads"
    assert slots["outer_0"].begin <= 3.0


def test_what_is_sent_takes_memory_until_it_has_arrived():
    """Another collective starts early only if there is memory for it beside what is in transit."""
    graph = fx.Graph()
    sent = graph.call_function(torch.sin, (graph.placeholder("x"),), name="sent")
    first = graph.call_function(launch, (sent,), name="gather")
    short = graph.call_function(torch.sum, (sent,), name="short")
    one = graph.call_function(wait, (first,), name="arrived")
    other = graph.call_function(wait, (graph.call_function(launch, (short,), name="outer"),))
    graph.output((graph.call_function(torch.add, (one, other), name="last"),))
    durations = by_name({"gather": 5.0, "outer": 5.0}, {"sent": 10.0, "gather": 1.0, "outer": 10.0})
    for slack, early in ((0.0, False), (1.0, True)):
        order = [slot.node.name for slot in schedule(graph, durations, Limits(slack=slack))]
        assert (order.index("outer") < order.index("arrived")) == early, order
