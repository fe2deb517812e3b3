"""Scheduled graphs: for any order and any chunks, the numbers are the model's."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapping import gradients, planned, random_durations, same, tokens
from thinned import SCHEDULES, thinned
from torch import nn

import autotp
from autotp.analysis.trace import predicted
from autotp.runtime.compiled import Overlap
from autotp.runtime.rewrite import rewrite
from autotp.runtime.simulate import Simulated
from passes.overlap.launch import launch, wait
from passes.overlap.schedule import Limits
from passes.world.world import LocalWorld


@pytest.mark.exact
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
    how = Overlap(random_durations(seed), merged, Limits(in_flight, slack=seed % 3 / 2), lambda *_: seed % 2 == 0)
    same(model, Simulated(model, plan, rewrite(model, plan, args), LocalWorld(mesh), lambda _: how), args)


@pytest.mark.parametrize("schedule", SCHEDULES)
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


def test_products_are_not_joined_where_only_some_devices_would():
    """Two devices have four of ten columns each, where a joined product pays, and the last has two, where it does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 10), nn.GELU(), nn.Linear(10, 16)).double()
    args = (torch.randn(4, 16, dtype=torch.float64),)
    plan = dataclasses.replace(planned(model, args, "megatron-1d", (3,)), chunks={"batch": 2})
    ours = autotp.simulate(model, plan, args, schedule="overlap")
    same_gradients = gradients(model, ours(*args).square().sum())
    (found,) = ours._compiled.values()
    assert found is not None
    products = [n for n in found.graphs.backward.nodes if n.target is torch.ops.aten.mm.default]
    assert len(products) == 6, "of either layer's weight and chunk, and of the activations between them"
    for name, gradient in gradients(model, model(*args).square().sum()).items():
        torch.testing.assert_close(same_gradients[name], gradient, rtol=1e-9, atol=1e-12)


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


def test_other_durations_give_another_schedule():
    model, args = tokens()
    plan = planned(model, args, "data")
    made = rewrite(model, plan, args)
    counts = []
    for enough in (None, lambda kind, axes, total: 1e9):
        how = Overlap(random_durations(len(counts)), enough)
        ours = Simulated(model, plan, made, LocalWorld((2,)), lambda _, how=how: how)
        same(model, ours, args)
        (found,) = ours._compiled.values()
        counts.append(len(found.graphs.backward.nodes))
    assert counts[0] != counts[1], "collectives were merged the second time alone"


class Two(nn.Module):
    """Returns two tensors and None."""

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


class Teacher(nn.Module):
    """Returns an output, detached aliases of it and of a parameter, and its input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return y, y.detach(), y.detach()[:2].view(-1), self.linear.bias.detach(), x


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_detached_has_no_gradient(schedule):
    torch.manual_seed(0)
    model, args = Teacher().double(), (torch.randn(4, 8, dtype=torch.float64),)
    ours = autotp.simulate(model, planned(model, args, "data"), args, schedule=schedule)
    wanted, found = model(*args), ours(*args)
    assert [each.requires_grad for each in found] == [each.requires_grad for each in wanted]
    for mine, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-12)
    found[1].numpy()
    with pytest.raises(RuntimeError, match="does not require grad"):
        found[2].sum().backward()
    assert schedule == "none" or all(ours._compiled.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_of_what_other_outputs_are_made_of_are_refused(schedule):
    torch.manual_seed(0)
    model, args = Two().double(), (torch.randn(4, 8, dtype=torch.float64),)
    model.forward = lambda x: given(model.stem(x), x)

    def given(y, x):
        return y, model.left(y).sum(), y.detach().sum() + model.right(x).sum()

    ours = autotp.simulate(model, planned(model, args, "data"), args, schedule=schedule)
    for wanted in ((1,), (0, 1)):
        found = ours(*args)
        found[0].retain_grad()
        with pytest.raises(
            autotp.AutotpError, match="output 0 has a hook or retains its gradient, and output 1 is computed from"
        ):
            sum(found[i].sum() for i in wanted).backward()
    found = ours(*args)
    found[0].retain_grad()
    (found[0].sum() + found[2]).backward()
    assert found[0].grad.eq(1).all()


class Hidden(nn.Module):
    """A hidden state that the graph need not compute, as it is a copy or a view; returned, or set on the module."""

    def __init__(self, hide, left):
        super().__init__()
        self.stem, self.head, self.hide, self.left = nn.Linear(8, 8), nn.Linear(8, 4), hide, left

    def forward(self, x):
        hidden = self.hide(self.stem(x))
        loss = self.head(hidden.view(4, 8)).square().sum()
        if self.left:
            self.hidden = hidden
        return loss, x if self.left else hidden, self.stem(x).view(2, 2, 8)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    "hide",
    thinned(
        [lambda y: y, lambda y: y.view(2, 2, 8), torch.clone, lambda y: y * 1.0, lambda y: y + 0],
        first=2,
        whole=True,
    ),
    ids=range(5),
)
def test_gradients_of_what_is_a_copy_or_a_view_are_refused_too(hide, left, schedule):
    torch.manual_seed(0)
    model, args = Hidden(hide, left).double(), (torch.randn(4, 8, dtype=torch.float64),)
    ours = autotp.simulate(model, planned(model, args, "data"), args, schedule=schedule)
    loss, hidden, _ = ours(*args)
    (ours.hidden if left else hidden).retain_grad()
    with pytest.raises(autotp.AutotpError, match="output 0 is computed from it"):
        loss.backward()
    loss, _, beside = ours(*args)
    beside.retain_grad()  # nothing is computed from it
    (loss + beside.sum()).backward()
    assert beside.grad.eq(1).all()


class Signed(nn.Module):
    """Reads only the signs of a parameter: its gradient is zeros rather than None, which an optimizer sees."""

    def __init__(self):
        super().__init__()
        self.size, self.sign = nn.Parameter(torch.rand(8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return (x * torch.copysign(self.size, self.sign)).sum()


@pytest.mark.parametrize("strategy", ["data", "zero3"])
def test_a_gradient_of_zeros_is_one(strategy):
    torch.manual_seed(0)
    model, args = Signed().double(), (torch.randn(4, 8, dtype=torch.float64),)
    model(*args).backward()
    assert model.sign.grad is not None
    model.zero_grad()
    autotp.simulate(model, planned(model, args, strategy), args, schedule="overlap")(*args).backward()
    assert model.sign.grad is not None and not model.sign.grad.any()


class Either(Signed):
    """Returns two losses, one of which reads the signs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).sum(), super().forward(x)


@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_is_none_where_autograd_comes_from_another_output(which):
    torch.manual_seed(0)
    model, args = Either().double(), (torch.randn(4, 8, dtype=torch.float64),)
    ours = autotp.simulate(model, planned(model, args, "data"), args, schedule="overlap")
    found = []
    for each in (model, ours):
        model.zero_grad()
        each(*args)[which].backward()
        found.append({name: p.grad is None for name, p in model.named_parameters()})
    assert found[0] == found[1] and any(found[0].values())


class Copies(nn.Module):
    """Returns a loss of an intermediate result, copies of the result that callers write to, and the result."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = torch.sigmoid(self.linear(x))
        return h.square().sum(), h.clone(), h * 1, h


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_of_intermediate_results_are_the_callers_own(schedule):
    torch.manual_seed(0)
    model, args = Copies().double(), (torch.randn(4, 8, dtype=torch.float64),)
    ours = autotp.simulate(model, planned(model, args, "data"), args, schedule=schedule)
    found = []
    for each in (model, ours):
        loss, one, other, result = each(*args)
        with torch.no_grad():
            one.add_(100)
            other.add_(100)
        found.append([result.detach().clone(), *gradients(model, loss).values()])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


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
    """Reads a buffer, then updates it."""

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
    """A gradient that is partial on the mesh and on a virtual axis is summed over chunks first, then communicated once."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    from passes.layouts.reshard import Step, steps, sums_first

    walk = steps((8, 4), (Partial(), Partial()), (Shard(0), Replicate()), (2, 2))
    assert [s.kind for s in walk] == ["reduce_scatter", "all_reduce"]
    first, second = sums_first(walk, 1)
    assert (first.kind, first.axes) == ("all_reduce", (1,)) and (second.kind, second.axes) == ("reduce_scatter", (0,))
    (both,) = steps((8, 4), (Partial(), Partial()), (Replicate(), Replicate()), (2, 2))
    assert [s.axes for s in sums_first([both], 1)] == [(1,), (0,)]
    assert sums_first([Step("all_gather", (0,), 0)], 1) == [Step("all_gather", (0,), 0)]


def test_an_all_reduce_writes_where_its_operand_was_only_if_nobody_reads_that_any_more():
    """A summand is sent twice: the result of one message must not overwrite the operand of the other."""
    from passes.overlap.inplace import inplace
    from passes.overlap.launch import launches
    from passes.overlap.primitives import all_reduce, reduce_scatter

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


@pytest.mark.parametrize("between", [False, True])
def test_what_is_sent_is_not_written_to_until_it_has_arrived(between):
    """A sum may overwrite an operand that nobody reads any more; the network reads what was sent until the wait."""
    from passes.overlap.inplace import inplace
    from passes.overlap.launch import launches
    from passes.overlap.primitives import reduce_scatter

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    sent = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2.0))
    scattered = graph.call_function(reduce_scatter, (sent, 0))
    total = graph.call_function(torch.ops.aten.add.Tensor, (sent, x))
    graph.output((scattered, total))
    for node in graph.nodes:
        node.meta["val"] = torch.ones(4)
    found = launches(graph)
    waiting, adding = (next(n for n in found.nodes if n.target is target) for target in (wait, torch.ops.aten.add.Tensor))
    (waiting.prepend if between else waiting.append)(adding)
    inplace(found)
    assert adding.target is (torch.ops.aten.add.Tensor if between else torch.ops.aten.add_.Tensor)


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "l1_loss", "huber_loss"])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_a_loss_takes_the_memory_of_one_number(name, reduction):
    """Some of torch's own loss kernels return it in memory as large as the operand, which stays allocated with the loss."""
    from passes.overlap.inplace import inplace

    graph, operands = torch.fx.Graph(), (torch.rand(4, 8), torch.rand(4, 8))
    target = getattr(torch.ops.aten, name).default
    loss = graph.call_function(target, (graph.placeholder("x"), graph.placeholder("y"), reduction))
    loss.meta["val"] = target(*operands, reduction)
    graph.output(loss)
    inplace(graph)
    made = torch.fx.GraphModule({}, graph)(*operands)
    torch.testing.assert_close(made, target(*operands, reduction), rtol=0, atol=0)
    assert made.untyped_storage().nbytes() == made.numel() * made.element_size()
    assert len(graph.nodes) == 4 or name in ("mse_loss", "smooth_l1_loss", "soft_margin_loss")


def test_bad_chunks_and_schedules_are_refused():
    model, args = tokens()
    plan = planned(model, args)
    with pytest.raises(autotp.AutotpError, match="'rows' is 0"):
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


class Thin(nn.Module):
    """Dims that two devices split into two elements and one, and a product whose result depends on that."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 3)
        self.norm, self.last = nn.LayerNorm(5), nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        return (self.second(torch.nn.functional.gelu(self.norm(self.first(x)))) @ self.last).square().mean()


def test_graphs_that_differ_are_reported_before_they_run(caplog):
    torch.manual_seed(0)
    model, args = Thin().double(), (torch.randn(12, 2, 5, dtype=torch.float64),)
    plan = planned(model, args, "tensor3d", (2, 2))
    assert plan.schedule == "overlap" and "may run without: devices have parts of one element" in caplog.text
    with pytest.raises(autotp.AutotpError, match="no schedule: dims are split unevenly"):
        predicted(model, plan, args)
    ours = autotp.simulate(model, plan, args, schedule="overlap")
    same(model, ours, args)
    assert list(ours._compiled.values()) == [None]


def test_autocast_is_said_to_have_no_overlap(caplog):
    model, args = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), (torch.randn(8, 8),)
    ours = autotp.simulate(model, planned(model, args, "data"), args, schedule="overlap")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [ours(*args) for _ in range(2)]
    assert not ours._compiled and results[0].dtype == torch.bfloat16
    assert caplog.text.count("no overlap of computing and communicating under torch.autocast") == 1


class Recurrent(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.cell, self.end = nn.GRU(8, 8, 2, batch_first=True, dropout=dropout), nn.Linear(8, 8)

    def forward(self, x):
        return self.end(self.cell(x)[0]).square().mean()


def test_a_recurrent_network_draws_only_if_it_drops(caplog):
    torch.manual_seed(0)
    args = (torch.randn(8, 4, 8, dtype=torch.float64),)
    model = Recurrent(0.0).double()
    plan = planned(model, args, "data")
    assert plan.schedule == "overlap" and "draw" not in caplog.text
    ours = autotp.simulate(model, plan, args)
    same(model, ours, args)
    assert all(ours._compiled.values())
    model = Recurrent(0.5).double()
    assert planned(model, args, "data").schedule == "none" and "gru draw random numbers" in caplog.text
    assert planned(model.eval(), args, "data").schedule == "overlap"


class Steep(nn.Module):
    """Returns a loss, and distances whose derivative is infinite where they are 0."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.stem(x)
        y = self.head(h)
        return y.square().mean(), (h[:, None] - h[None]).square().sum(-1).sqrt(), y.sum(-1)


@pytest.mark.parametrize(
    ("strategy", "mesh"), [("data", (2,)), ("zero3", (2,)), ("megatron-1d", (2,)), ("tensor3d", (2, 2))]
)
@pytest.mark.parametrize("used", thinned([(0, 2), (0,), (2,)], first=1, slow=2, whole=True))
def test_what_flows_to_no_loss_is_not_run(strategy, mesh, used):
    torch.manual_seed(0)
    model, args = Steep().double(), (torch.randn(8, 8, dtype=torch.float64),)
    ours = autotp.simulate(model, planned(model, args, strategy, mesh), args, schedule="overlap")
    found = []
    for each in (model, ours):
        outputs = each(*args)
        found.append(gradients(model, sum((i + 1) * outputs[i].sum() for i in used)))
    assert all(ours._compiled.values()), "it was scheduled"
    for name, want in found[0].items():
        torch.testing.assert_close(found[1][name], want, rtol=1e-9, atol=1e-12, msg=name)
