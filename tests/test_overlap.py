"""Scheduling, chunks and buckets: whatever the order and the cuts, the numbers are the model's."""

import dataclasses
import random

import pytest
import torch
from float64 import float64_mode
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import autotp
from autotp.durations import overlap_of
from autotp.overlapped import Overlap
from autotp.rewrite import rewrite
from autotp.simulate import Simulated
from passes.launches import launch, wait
from passes.overlap import halves
from passes.schedule import Limits, Work, schedule
from passes.world import LocalWorld


class Block(nn.Module):
    """Normalisation, attention-free mixing and a residual, with everything a chunk may stumble over."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Tokens(nn.Module):
    """Blocks and a loss that ignores some labels: its mean divides by what is left, over all chunks and devices."""

    def __init__(self, width=8, words=16):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def tokens():
    torch.manual_seed(0)
    with float64_mode():
        model = Tokens().double()
    ids = torch.randint(0, 16, (8, 4))
    labels = ids.clone()
    labels[3, :] = -100
    labels[0, 1] = -100
    return model, (ids, labels)


def planned(model, args, strategy="megatron-1d", mesh=(2,), **more):
    topology = autotp.Topology.flat(torch.tensor(mesh).prod().item(), bandwidth="1 GB/s", latency="10 us")
    return autotp.plan(model, topology, args, strategy=strategy, mesh=mesh, panels=1, **more)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def same(model, ours, args):
    want, got = model(*args), ours(*args)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    wanted = gradients(model, want)
    for name, gradient in gradients(model, got).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12, msg=name)


def random_durations(seed):
    """Durations that have nothing to do with anything: a schedule must be right for all of them."""
    chance = random.Random(seed)
    known = {}

    def durations(node):
        if node not in known:
            known[node] = Work(chance.random(), f"lane {chance.randrange(3)}", chance.random())
        return dataclasses.replace(known[node], lane=known[node].lane if node.target is launch else "compute")

    return durations


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    strategy=st.sampled_from(["megatron-1d", "megatron-sp", "data", "zero3", "tensor3d", "3d"]),
    batch=st.sampled_from([1, 2, 4]),
    rows=st.sampled_from([1, 2]),
    in_flight=st.integers(1, 5),
    bytes_=st.sampled_from([None, 0.0, 300.0, 1e9]),
)
def test_any_schedule_chunks_and_buckets(seed, strategy, batch, rows, in_flight, bytes_):
    model, args = tokens()
    mesh = (2, 2) if strategy in ("tensor3d", "3d") else (2,)
    plan = dataclasses.replace(planned(model, args, strategy, mesh), chunks={"batch": batch, "rows": rows})
    merged = None if bytes_ is None else lambda kind, axes, total: bytes_
    how = Overlap(random_durations(seed), merged, Limits(in_flight, slack=seed % 3 / 2))
    same(model, Simulated(model, rewrite(model, plan, args), LocalWorld(mesh), how), args)


@pytest.mark.parametrize("schedule", ["none", "overlap"])
def test_chunks_with_either_schedule(schedule):
    model, args = tokens()
    plan = dataclasses.replace(planned(model, args), chunks={"batch": 2})
    same(model, autotp.simulate(model, plan, args, schedule=schedule), args)


def test_uneven_shards_are_scheduled_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 7), nn.GELU(), nn.Linear(7, 10)).double()
    args = (torch.randn(6, 10, dtype=torch.float64),)
    plan = planned(model, args, "megatron-1d", (3,))
    ours = autotp.simulate(model, plan, args, schedule="overlap")
    assert not ours.rewritten.even
    want = model(*args)
    got = ours(*args)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    wanted = gradients(model, want.square().sum())
    for name, gradient in gradients(model, got.square().sum()).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12)
    assert all(found is not None for found in ours._compiled.values())


def test_dropout_draws_what_the_sharded_graph_draws():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)).double().train()
    args = (torch.randn(4, 8, dtype=torch.float64),)
    plan = planned(model, args)
    results = []
    for kind in ("none", "overlap"):
        ours = autotp.simulate(model, plan, args, schedule=kind)
        ours.world.seed(7)
        results.append([ours(*args) for _ in range(2)])
    assert not torch.equal(results[0][0], results[0][1]), "every pass draws anew"
    for eager, scheduled in zip(*results, strict=True):
        torch.testing.assert_close(scheduled, eager, rtol=1e-12, atol=1e-12)


def test_frozen_parameters_and_inference():
    model, args = tokens()
    plan = planned(model, args)
    model.embed.weight.requires_grad_(False)
    ours = autotp.simulate(model, plan, args, schedule="overlap")
    ours(*args).backward()
    assert model.embed.weight.grad is None and model.head.weight.grad is not None
    with torch.no_grad():
        assert not ours(*args).requires_grad
    backward = [len(found.graphs.backward.nodes) for found in ours._compiled.values()]
    assert sorted(backward)[0] == 1, "inference has a forward graph alone"


def prepared(strategy="megatron-1d", mesh=(2,), chunks=None, enough=None, raw=False):
    model, args = tokens()
    plan = dataclasses.replace(planned(model, args, strategy, mesh), chunks=chunks or {})
    ours = autotp.simulate(model, plan, args)
    made = rewrite(model, plan, args)
    state = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    whole = {name: state[fqn] for name, fqn in made.captured.parameters.items()}
    whole |= dict(zip(made.captured.inputs, args, strict=True))

    def graphs(at):
        from passes.layout import take

        parts = {n: take(t.detach(), made.sharding.resting.get(n, made.whole), mesh, at) for n, t in whole.items()}
        found = halves(made.graph_module, mesh, at, parts, frozenset(made.captured.parameters))
        return found if raw else found.overlapped(found.buckets(enough))

    return graphs, plan


def launched(graph):
    return [(n.args[1], str(n.args[3:])) for n in graph.nodes if n.target is launch]


def test_every_rank_launches_in_one_order():
    """Ranks that time things differently would choose different orders; the order of one of them serves all."""
    graphs, _ = prepared("tensor3d", (2, 2), {"batch": 2})
    places = ((0, 0), (0, 1), (1, 0), (1, 1))
    assert len({prepared("tensor3d", (2, 2), {"batch": 2}, raw=True)[0](at).signature for at in places}) == 1
    devices = [graphs(at) for at in places]
    own = [each.orders(each.slots(random_durations(i), Limits())) for i, each in enumerate(devices)]
    alone = [launched(each.modules(order, LocalWorld((2, 2)))[0].graph) for each, order in zip(devices, own, strict=True)]
    assert any(other != alone[0] for other in alone[1:]), "this test could not tell"
    agreed = [[launched(half.graph) for half in each.modules(own[0], LocalWorld((2, 2)))] for each in devices]
    assert all(other == agreed[0] for other in agreed[1:])
    assert agreed[0][0]


def test_signatures_tell_graphs_apart():
    one, two = prepared(raw=True)[0]((0,)), prepared(chunks={"batch": 2}, raw=True)[0]((0,))
    assert one.signature != two.signature


def test_a_chunk_computes_while_another_communicates():
    spans = {}
    for chunks in (1, 2):

        def durations(node, chunks=chunks):
            if node.target is launch:
                return Work(1.0 / chunks, "axes 0")
            return Work(0.5 / chunks if "mm" in str(node.target) else 0.0)

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
    """A backward pass by hand: each layer's gradient is summed up on one link, and what came of it on another."""
    graph = fx.Graph()
    value, part, big = (graph.placeholder(name) for name in ("x", "part", "big"))
    big.meta["held"] = 10.0
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
        return Work(seconds.get(kind, 0.0), lane, bytes_.get(kind, 0.0))

    return durations


def test_other_durations_give_another_schedule_of_the_same_trace(monkeypatch):
    model, args = tokens()
    ours = Simulated(
        model, rewrite(model, planned(model, args, "data"), args), LocalWorld((2,)), Overlap(random_durations(1))
    )
    same(model, ours, args)
    first = ours._schedules
    monkeypatch.setattr("autotp.overlapped.halves", None)
    other = first.rescheduled(Overlap(random_durations(2), lambda kind, axes, total: 1e9))
    ours.__dict__["_schedules"] = other
    same(model, ours, args)
    (one,), (two,) = first.known.values(), other.known.values()
    assert [str(n.target) for n in one.graphs.forward.nodes] == [
        str(n.target) for n in one.again(first.how).graphs.forward.nodes
    ]
    assert len(one.graphs.backward.nodes) != len(two.graphs.backward.nodes), "collectives were merged the second time alone"


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


def test_what_cannot_be_traced_runs_as_it_is(caplog):
    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x + torch.rand_like(x))

    model, args = Noise(), (torch.randn(4, 8),)
    plan = planned(model, args, "data")
    ours = autotp.simulate(model, plan, args, schedule="overlap")
    ours(*args).sum().backward()
    assert list(ours._compiled.values()) == [None]
    assert "no overlap" in caplog.text and "random" in caplog.text


def test_bad_chunks_and_schedules_are_refused():
    model, args = tokens()
    plan = planned(model, args)
    with pytest.raises(autotp.AutotpError, match="'rows': 0"):
        dataclasses.replace(plan, chunks={"rows": 0})
    with pytest.raises(autotp.AutotpError, match="'columns'"):
        dataclasses.replace(plan, chunks={"columns": 2})
    with pytest.raises(autotp.AutotpError, match="'sometimes' is unknown"):
        autotp.simulate(model, plan, args, schedule="sometimes")


def test_chunks_are_saved_with_the_plan(tmp_path):
    model, args = tokens()
    plan = dataclasses.replace(planned(model, args), chunks={"batch": 2, "rows": 1})
    plan.save(tmp_path / "plan.json")
    found = autotp.Plan.load(tmp_path / "plan.json")
    assert found.chunks == {"batch": 2, "rows": 1}
    assert found.hash != dataclasses.replace(plan, chunks={}).hash
    assert dataclasses.replace(plan, chunks={"batch": 1}).hash == dataclasses.replace(plan, chunks={}).hash


class Two(nn.Module):
    """Two outputs, and one that is no tensor."""

    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.stem(x)
        return self.left(y), self.right(y), None


@pytest.mark.parametrize("strategy", ["data", "megatron-1d"])
def test_an_output_that_no_loss_uses_leaves_no_gradient(strategy):
    torch.manual_seed(0)
    model, args = Two().double(), (torch.randn(4, 8, dtype=torch.float64),)
    ours = autotp.simulate(model, planned(model, args, strategy), args, schedule="overlap")
    left, right, nothing = ours(*args)
    assert nothing is None
    left /= 2  # outputs may be changed in place, as the model's may
    left.sum().backward()
    assert model.right.weight.grad is None
    want, _, _ = model(*args)
    got = model.left.weight.grad.clone()
    model.zero_grad()
    (want / 2).sum().backward()
    torch.testing.assert_close(got, model.left.weight.grad, rtol=1e-9, atol=1e-12)
    assert right.requires_grad


def test_two_backward_passes_of_one_forward_pass():
    model, args = tokens()
    ours = autotp.simulate(model, planned(model, args), args, schedule="overlap")
    loss = ours(*args)
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name], rtol=1e-12, atol=1e-15)


class Average(nn.Module):
    """Uses a buffer, and then updates it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        y = self.linear(x) * self.scale
        self.scale = 0.5 * self.scale + 0.5
        return (y * y).sum()


def test_a_buffer_that_is_updated_after_use():
    torch.manual_seed(0)
    model, args = Average().double(), (torch.randn(4, 8, dtype=torch.float64),)
    same(model, autotp.simulate(model, planned(model, args, "data"), args, schedule="overlap"), args)


def test_inputs_may_want_gradients_and_be_transposed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    x = torch.randn(8, 4, dtype=torch.float64).t().requires_grad_()
    ours = autotp.simulate(
        model, planned(model, (torch.randn(4, 8, dtype=torch.float64),)), (x.detach(),), schedule="overlap"
    )
    (want,) = torch.autograd.grad(model(x).square().sum(), x)
    (got,) = torch.autograd.grad(ours(x).square().sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_sums_over_chunks_come_before_the_network():
    """A gradient that is partial on the mesh and on a virtual axis crosses the network once."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    from passes.reshard import Step, steps
    from passes.virtual import sums_first

    walk = steps((8, 4), (Partial(), Partial()), (Shard(0), Replicate()), (2, 2))
    assert [s.kind for s in walk] == ["reduce_scatter", "all_reduce"]
    first, second = sums_first(walk, 1)
    assert (first.kind, first.axes) == ("all_reduce", (1,)) and (second.kind, second.axes) == ("reduce_scatter", (0,))
    (both,) = steps((8, 4), (Partial(), Partial()), (Replicate(), Replicate()), (2, 2))
    assert [s.axes for s in sums_first([both], 1)] == [(1,), (0,)]
    assert sums_first([Step("all_gather", (0,), 0)], 1) == [Step("all_gather", (0,), 0)]


def test_an_all_reduce_writes_where_its_operand_was_only_if_nobody_reads_that_any_more():
    """One summand is sent twice: the first message may not be overwritten by the second's result."""
    from passes.inplace import inplace
    from passes.launches import launches
    from passes.primitives import all_reduce, reduce_scatter

    def made(order):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.ones(4)
        summand = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2.0))
        sends = {
            "sum": lambda: graph.call_function(all_reduce, (summand, [0], "sum")),
            "scatter": lambda: graph.call_function(reduce_scatter, (summand, 0)),
        }
        graph.output(tuple(sends[name]() for name in order))
        for node in graph.nodes:
            node.meta.setdefault("val", torch.ones(4))
        found = launches(graph)
        inplace(found)
        return [n.args[1] for n in found.nodes if n.target is launch]

    assert made(["sum"]) == ["all_reduce_"]
    assert made(["scatter", "sum"]) == ["reduce_scatter", "all_reduce_"], "waited for before the next begins"
    assert made(["sum", "scatter"]) == ["all_reduce", "reduce_scatter"]
