"""Custom autograd functions, and hooks on gradients: what a captured graph holds, and what capture refuses."""

import copy
import operator
import random
import threading
import types

import numpy as np
import pytest
import torch
from thinned import SCHEDULES, thinned
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import prune
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import autotp
from autotp.errors import AutotpError
from passes.capture import CaptureError, capture
from passes.rules.table import name_of


class Scaled(torch.autograd.Function):
    """Several results, one without a gradient and one that is no tensor; its gradient is not that of its forward."""

    @staticmethod
    def forward(ctx, x, scale, weight, unused=None):
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        largest = x.argmax(-1)
        ctx.mark_non_differentiable(largest)
        return x.sin() * weight, largest, scale

    @staticmethod
    def backward(ctx, gradient, *_):
        x, weight = ctx.saved_tensors
        return 3 * ctx.scale * gradient * weight * x.cos(), None, (gradient * x).flatten(0, -2).sum(0), None


class Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale=2.0):
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale * 10, None


class NamedApart(torch.autograd.Function):
    @staticmethod
    def forward(x, scale=2.0):
        return x * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        with torch.no_grad():
            ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale * 10, None


@pytest.mark.parametrize("function", [Named.apply, NamedApart.apply, lambda *a, **k: Named.apply(*a, **k)])
def test_arguments_by_keyword(function):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()

        def forward(self, x):
            return self.last(function(self.first(x), scale=5.0)).sum()

    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 8, dtype=torch.float64)
    plan = autotp.plan(model, autotp.Topology.flat(2), (x,), strategy="data")
    found = autotp.simulate(copy.deepcopy(model), plan, (x,))
    ours = found(x)
    torch.testing.assert_close(ours, model(x))
    ours.backward()
    model(x).backward()
    for mine, theirs in zip(found.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


class Straight(torch.autograd.Function):
    """Has a separate ``setup_context``, as torch's newer functions do."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x):
        y, largest, scale = Scaled.apply(self.up(x), 0.7, self.weight)
        y = Scaled.apply(y, 0.3, self.weight)[0]
        return (scale * self.down(Straight.apply(4 * y))).square().mean() + 0.1 * largest.double().mean()


def quantised():
    torch.manual_seed(0)
    return Quantised().double(), torch.randn(8, 4, 8, dtype=torch.float64)


class Rerun(torch.autograd.Function):
    """Saves only its input; the backward pass runs the layers again, which also adds to their own gradients."""

    @staticmethod
    def forward(ctx, x, layers, scale):
        ctx.layers, ctx.scale = layers, scale
        ctx.save_for_backward(x)
        return x + scale * layers[1](layers[0](x).tanh())

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            (x + ctx.scale * ctx.layers[1](ctx.layers[0](x).tanh())).backward(gradient)
        return 2 * x.grad, None, None


class Residual(nn.Module):
    """Layers that a function is given and that are also called directly, one of them with a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(16, 8))])
        self.layers[1][0].eval()

    def forward(self, x):
        h = Rerun.apply(self.first(x), self.layers, 0.5)
        return (self.last(h) + self.layers[1](self.layers[0](h))).square().mean()


def residual():
    torch.manual_seed(0)
    return Residual().double(), torch.randn(8, 4, 8, dtype=torch.float64)


def tied():
    """The two layers that the function is given share one weight."""
    model, x = residual()
    model.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]).double()
    model.layers[1].weight = model.layers[0].weight
    return model, x


def gradients_of(module, model, x):
    """The loss, and the gradients after the backward pass, including those that are side effects."""
    model.zero_grad()
    loss = module(x)
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("strategy", "mesh", "chunks"),
    thinned(
        [("data", (2,), {}), ("megatron-1d", (2,), {"batch": 2}), ("zero3", (2, 2), {}), ("3d", (2, 2, 2), {"rows": 2})],
        first=2,
    ),
)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("build", [quantised, residual, tied])
def test_a_function_has_the_gradient_that_the_model_wrote(build, strategy, mesh, chunks, schedule):
    model, x = build()
    loss, wanted = gradients_of(model, model, x)
    assert all(gradient.abs().max() > 1e-6 for gradient in wanted)
    devices = torch.tensor(mesh).prod().item()
    plan = autotp.plan(model, autotp.Topology.flat(devices), (x,), strategy=strategy, mesh=mesh, chunks=chunks)
    ours = autotp.simulate(model, plan, (x,), schedule=schedule)
    for _ in range(2):
        found, theirs = gradients_of(ours, model, x)
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)
        for got, want in zip(theirs, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_a_plan_lists_it_and_is_the_same_for_another_instance():
    (model, x), (other, _) = quantised(), quantised()
    plan = autotp.plan(model, autotp.Topology.flat(2), (x,), strategy="auto", mesh=(2,))
    graph = capture(other, (x,)).graph_module.graph
    functions = [node for node in graph.nodes if "function" in name_of(node)]
    names = [node.args[1] for node in functions]
    assert len(functions) == 3 and names[0] != names[1], "the arguments that are no tensors belong to the call"
    assert {node.name for node in functions} <= {op.name for op in plan.operators}
    assert any("function" in str(name) for name in plan.replicated)
    autotp.simulate(other, plan, (x,))(x).backward()


def test_no_trace_is_left_of_the_capture():
    base, register = torch.autograd.function._SingleLevelFunction, torch.Tensor.register_hook
    model, x = quantised()
    capture(model, (x,))
    with pytest.raises(CaptureError):
        capture(model, (torch.randn(3, 5, dtype=torch.float64),))
    assert "apply" not in vars(base) and torch.Tensor.register_hook is register


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.randn_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Calls(nn.Module):
    """Applies a function to the result of a layer, before the next layer."""

    def __init__(self, does):
        super().__init__()
        self.first, self.second, self.does = nn.Linear(8, 8), nn.Linear(8, 8), does

    def forward(self, x):
        return self.second(self.does(self.first(x)))


def hooked(h):
    h.register_hook(lambda gradient: 2 * gradient)
    return h


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (Noisy.apply, "Noisy draws random numbers"),
        (lambda h: InPlace.apply(h + 1), "InPlace changes its input, or a buffer, in place"),
        (
            lambda h: Rerun.apply(h, [nn.BatchNorm1d(8), nn.Identity()], 1.0),
            "Rerun changes its input, or a buffer, in place",
        ),
        (hooked, "the model, or a mode .*, registers a hook on a tensor's gradient"),
    ],
)
def test_what_a_graph_would_lose_is_refused(does, message):
    with pytest.raises(CaptureError, match=message):
        capture(Calls(does), (torch.randn(4, 8),))


def test_backward_hooks_of_modules_are_refused():
    model = Calls(torch.tanh)
    model.second.register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(CaptureError, match="module 'second' has a backward hook"):
        capture(model, (torch.randn(4, 8),))


def test_forward_hooks_of_modules_are_refused_but_for_those_that_compute():
    model = Calls(torch.tanh)
    model.second.register_forward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(CaptureError, match="module 'second' has a forward hook"):
        capture(model, (torch.randn(4, 8),))
    with pytest.warns(FutureWarning, match="weight_norm"):
        normed = torch.nn.utils.weight_norm(torch.nn.Linear(8, 8))
    assert any("weight_norm" in str(node.target) for node in capture(normed, (torch.randn(4, 8),)).graph_module.graph.nodes)


class Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x):
        return run(x)

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


def test_functions_that_are_given_a_callable_are_refused():
    with pytest.raises(CaptureError, match="Given, a torch.autograd.Function, is given a callable"):
        capture(Calls(lambda h: Given.apply(torch.tanh, h)), (torch.randn(4, 8),))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        h = self.first(x)
        h = h + checkpoint(lambda t: self.second(t).tanh(), h, use_reentrant=self.reentrant)
        return self.third(h).square().mean()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_in_a_model_is_what_it_runs(reentrant):
    torch.manual_seed(0)
    model, x = Checkpointed(reentrant).double(), torch.randn(4, 8, dtype=torch.float64)
    plan = autotp.plan(model, autotp.Topology.flat(2), (x,), strategy="megatron-1d", mesh=(2,))
    assert not plan.replicated
    gradients = []
    for each in (model, autotp.simulate(model, plan, (x,))):
        model.zero_grad()
        each(x).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_a_message_names_the_model():
    with pytest.raises(AutotpError, match="Calls: "):
        capture(Calls(Noisy.apply), (torch.randn(4, 8),))


class Counts(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.inner, self.way = nn.Linear(4, 4), way
        self.register_buffer("calls", torch.tensor(0))
        self.other, self.config = nn.Linear(4, 4), types.SimpleNamespace(aux=0.0)
        self.step, self.seen, self.aux, self.inner.kept, self._lazy = 0, [], 0.0, {"last": None}, None

    def forward(self, x, again=1):
        if self.way.startswith("again") and again:
            self.step += "step" in self.way
            return self(self.inner(x), 0)
        if self.way == "step":
            self.step += 1
        elif self.way == "aux":
            self.aux = self.inner(x).square().mean()
        elif self.way == "kept":
            self.inner.kept["last"] = x
        elif self.way == "new":
            self._new = x
            self.calls += 1
        elif self.way == "fresh":
            self.seen = []
            self.seen.append(checkpoint(self.inner, x, use_reentrant=False).sum())
        elif self.way == "summed":
            self.aux = self.aux + x.mean()
        elif self.way == "lazy" and self._lazy is None:
            self._lazy = x.mean()
        elif self.way == "grown":
            self.seen.append(x.mean())
        elif self.way == "shared":
            self._new = [self.inner.weight]
        elif self.way == "partly":
            self._new = (x.mean(), 1)
        elif self.way == "before":
            self.aux, scale = self.inner(x).mean(), 1 if isinstance(self.aux, float) else 2
            return scale * self.inner(x)
        elif self.way == "object":
            self.config.aux = x.mean()
        elif self.way == "modules":
            self.inner, self.other = self.other, self.inner
        elif self.way == "seen":
            self.seen.append(1)
        elif self.way == "frozen":
            self.inner.requires_grad_(False)
        elif self.way == "random":
            return self.inner(x) * random.random()
        elif self.way == "numpy":
            return self.inner(x) * float(np.random.rand())
        return self.inner(x) / (1 + self.step)


@pytest.mark.parametrize(
    ("way", "named"),
    [
        ("step", "Counts: forward changes step, which the graph does not: every call"),
        ("seen", "Counts: forward changes seen,"),
        ("before", "Counts: forward changes aux,"),
        ("object", "Counts: forward changes config,"),
        ("modules", "Counts: forward changes the modules of the model,"),
        ("frozen", "Counts: forward changes which parameters of inner are frozen,"),
        ("summed", "Counts: forward changes aux,"),
        ("lazy", "Counts: forward changes _lazy,"),
        ("grown", "Counts: forward changes seen,"),
        ("shared", "Counts: forward changes _new,"),
        ("partly", "Counts: forward changes _new,"),
        ("random", "Counts: forward changes the random numbers of Python's random,"),
        ("numpy", "Counts: forward changes the random numbers of numpy,"),
        ("again", None),
        ("again, step", "Counts: forward changes step,"),
        ("", None),
    ],
)
def test_what_changes_in_python_is_warned_of(way, named, caplog):
    """The graph has one value of such state, and capture leaves the model unchanged."""
    model = Counts(way)
    with caplog.at_level("WARNING", "autotp.capture"):
        capture(model, (torch.randn(2, 4),))
    assert (model.step, model.seen, model.aux, model.inner.kept) == (0, [], 0.0, {"last": None})
    assert not hasattr(model, "_new") and vars(model.config) == {"aux": 0.0}
    assert [record.getMessage().startswith(named) for record in caplog.records] == [True] * (named is not None)


class Momentum(nn.Module):
    """A teacher that follows a student in every call, which also sets a tensor on the module."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        hidden = self.student(x)
        self.aux = hidden.mean()
        return (hidden - self.teacher(x)).square().mean()


def test_what_is_asked_of_a_model_leaves_its_parameters_as_they_are():
    torch.manual_seed(0)
    model, x = Momentum().double(), torch.randn(4, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    ours = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), (x,)), (x,))
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    for rows in (4, 2, 4):  # the second program is captured from a copy without memory
        torch.testing.assert_close((ours(x[:rows]), ours.aux), (plain(x[:rows]), plain.aux), rtol=1e-9, atol=0)
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-9, atol=0)


class Late(nn.Module):
    """Buffers that the first call creates, beside one that each call changes."""

    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6) if norm else nn.Identity()
        self.register_buffer("mask", None)

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.arange(6.0, dtype=x.dtype)
        if isinstance(self.norm, nn.BatchNorm1d) and not hasattr(self, "places"):  # else torch.export has no place
            self.register_buffer("places", torch.arange(3.0, dtype=x.dtype), persistent=False)
        return self.norm(self.linear(x)) * self.mask


@pytest.mark.parametrize("norm", [False, True])
def test_a_buffer_that_forward_makes_is_written_to_no_other(norm):
    torch.manual_seed(0)
    model, x = Late(norm).double(), torch.randn(4, 4, dtype=torch.float64)
    plain, given = copy.deepcopy(model), x.clone()
    ours = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), (x,)), (x,))
    for _ in range(3):
        torch.testing.assert_close(ours(x), plain(given), rtol=1e-9, atol=0)
    assert torch.equal(x, given)
    for name, buffer in model.norm.named_buffers():
        torch.testing.assert_close(buffer, plain.norm.get_buffer(name), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "transformed", [torch.vmap(Straight.apply), torch.func.grad(lambda x: Straight.apply(x).square().sum())]
)
def test_transforms_of_functions_with_gradients_of_their_own_are_refused(transformed):
    class Model(nn.Linear):
        def forward(self, x):
            return transformed(super().forward(x))

    with pytest.raises(CaptureError, match="hides the gradient of Straight"):
        capture(Model(4, 4), (torch.randn(4, 4),))


def _dual(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent


def _backward(model, x):
    given = x.detach().requires_grad_()
    model(given).sum().backward()
    return given.grad


def _saved(model, x):
    y = torch.nn.functional.dropout(model(x))
    return torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.parametrize(
    ("derivative", "why"),
    [(_dual, "forward_ad"), (_backward, "forward calls backward"), (_saved, "call torch.func.grad")],
)
def test_derivatives_that_have_no_graph_say_what_to_call(derivative, why):
    class Model(nn.Linear):
        def forward(self, x):
            return derivative(super().forward, x.clone().requires_grad_())

    with pytest.raises(CaptureError, match=why):
        capture(Model(4, 4), (torch.randn(4, 4),))


def test_derivatives_of_rows_that_do_not_fill_their_memory():
    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(torch.vmap(torch.func.jacfwd(torch.sin))(x[:, ::2]).sum(1))

    model, x = Model(4, 4).double(), torch.randn(4, 8, dtype=torch.float64)
    plan = autotp.plan(model, autotp.Topology.flat(2), (x,), strategy="megatron-1d", mesh=(2,))
    torch.testing.assert_close(autotp.simulate(model, plan, (x,))(x), model(x), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("way", "path"), [("aux", "aux"), ("kept", "inner.kept"), ("new", "_new"), ("fresh", "seen")])
@pytest.mark.parametrize("outputs", thinned(["whole", "dtensor"], whole=True))
def test_tensors_that_forward_leaves_are_there(way, path, outputs, caplog):
    torch.manual_seed(0)
    model, x = Counts(way).double(), torch.randn(4, 4, dtype=torch.float64)
    options = {"outputs": outputs} if outputs == "whole" or way != "new" else {"observe": ["inner"]}
    with caplog.at_level("WARNING", "autotp.capture"):
        captured = capture(model, (x,), **options)
    assert [left.path for left in captured.left] == [path] and not captured.changed and not caplog.records
    assert not model.calls
    plan = autotp.plan(model, autotp.Topology.flat(2), (x,), strategy="megatron-1d", mesh=(2,))
    assert autotp.verify(copy.deepcopy(model), plan, (x,)).departure is None
    gradients = []
    for each in (autotp.simulate(copy.deepcopy(model), plan, (x,)), model):
        for factor in (1, 2):
            loss = each(factor * x).sum()
        (left,) = tree_leaves(operator.attrgetter(path)(each))
        gradients.append((left, *torch.autograd.grad(loss + left.sum(), each.inner.parameters())))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


class Borrows(nn.Module):
    """Computes with parameters that belong to no module."""

    def __init__(self, prompt):
        super().__init__()
        self.inner, self.scales, self.prompt = nn.Linear(4, 4), [nn.Parameter(2 * prompt.detach())], lambda: prompt
        self.leaf = torch.ones_like(prompt).requires_grad_()

    def forward(self, x):
        return self.inner(x) * self.scales[0] * self.leaf * self.prompt()


@pytest.mark.parametrize(("strategy", "schedule"), [("auto", "none"), ("megatron-1d", "overlap"), ("zero3", "overlap")])
def test_parameters_of_no_module_have_gradients(strategy, schedule):
    torch.manual_seed(0)
    prompt, x = nn.Parameter(torch.ones(4).double()), torch.randn(4, 4, dtype=torch.float64)
    model = Borrows(prompt).double()
    plan = autotp.plan(model, autotp.Topology.flat(2), (x,), strategy=strategy, mesh=(2,))
    trained = [*model.scales, model.leaf, prompt, model.inner.weight]
    expected = torch.autograd.grad(model(x).square().sum(), trained)
    found = torch.autograd.grad(autotp.simulate(model, plan, (x,), schedule=schedule)(x).square().sum(), trained)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x, padding):
        return self.encoder(x, src_key_padding_mask=padding)


@pytest.mark.parametrize("padded", [True, False])
def test_zeros_of_a_fast_path_are_warned_of(padded, caplog):
    model, x = Padded().eval(), torch.randn(2, 4, 8)
    with caplog.at_level("WARNING", "autotp.capture"):
        capture(model, (x, torch.zeros(2, 4, dtype=torch.bool) if padded else None))
        capture(model.train(), (x, torch.zeros(2, 4, dtype=torch.bool)))
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "TransformerEncoder: without gradients"
    ] * padded


class Sets(nn.Module):
    """Changes its tensors, also in other ways than by assignment."""

    def __init__(self, way):
        super().__init__()
        self.way, self.inner, self.fixed = way, nn.Linear(4, 4), torch.ones(4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        y = self.inner(x)
        if self.way == "assigned":
            self.count = self.count + 1
        elif self.way == "entry":
            self._buffers["count"] = self.count + 1
        else:
            one = {"result": y, "parameter": self.inner.weight, "buffer": self.count, "attribute": self.fixed}[self.way]
            one.data = one + 1
        return y + self.count + self.fixed


@pytest.mark.parametrize("way", ["assigned", "entry"])
def test_a_buffer_that_is_set_is_changed(way, caplog):
    with caplog.at_level("WARNING", "autotp.capture"):
        captured = capture(Sets(way), (torch.randn(2, 4),))
    assert list(captured.mutations) == ["b_count"]
    assert not [record for record in caplog.records if record.name == "autotp.capture"]


class Becomes(nn.Module):
    """Replaces its tensor by one of another dtype or shape."""

    def __init__(self, held, function, registered):
        super().__init__()
        self.inner, self.function = nn.Linear(4, 4), function
        if registered:
            self.register_buffer("held", held)
        else:
            self.held = held

    def forward(self, x):
        made = self.inner(x)
        self.held = self.function(self.held, made.detach())
        return made + self.held[:1]


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_a_tensor_of_another_kind_is_refused_if_the_next_call_needs_it(registered, nested, caplog):
    for held in (torch.zeros(4, dtype=torch.int64), torch.zeros(1)):
        model = Becomes(held, lambda held, made: held * 0.9 + made.mean(0), registered)
        with pytest.raises(
            CaptureError, match=r"forward makes (0\.)?held torch.float32 of shape \(4,\), from what was there"
        ):
            capture(nn.Sequential(model) if nested else model, (torch.randn(2, 4),))
    model = Becomes(torch.ones(2, 4), lambda _, made: torch.ones(len(made), 4), registered)
    with caplog.at_level("WARNING", "autotp.capture"):
        capture(nn.Sequential(model) if nested else model, (torch.randn(3, 4),))
    said = [record.getMessage().split(",")[0] for record in caplog.records if record.name == "autotp.capture"]
    changes = "Sequential: forward changes 0.held" if nested else "Becomes: forward changes held"
    assert said == [changes] * registered  # a plain attribute keeps what the call assigns


class Replaces(nn.Module):
    """Replaces a buffer in ways that are equivalent to no change in place."""

    def __init__(self, way):
        super().__init__()
        self.inner, self.way = nn.Linear(4, 4), way
        self.register_buffer("held", torch.zeros(1).expand(4) if way == "expanded" else torch.zeros(4))
        self.register_buffer("other", self.held if way == "tied" else torch.ones(4))

    def forward(self, x):
        y = self.inner(x) + self.held + self.other
        new = {"parameter": self.inner.bias.detach(), "buffer": self.other}.get(self.way, y.detach().sum(0))
        self.held = new
        return y


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("parameter", "it lies in the memory of inner.bias from then on"),
        ("buffer", "it lies in the memory of other from then on"),
        ("tied", "other is the same tensor, which stays as it was"),
        ("expanded", "whose elements share memory"),
    ],
)
def test_buffers_that_are_replaced_are_apart_from_others(way, said):
    with pytest.raises(CaptureError, match=f"Replaces: forward replaces buffer held, .*{said}"):
        capture(Replaces(way), (torch.randn(2, 4),))


def test_random_numbers_that_a_model_sets_are_refused_if_it_draws_any():
    class Seeds(nn.Module):
        def forward(self, x, draws):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(7)
                return x @ (torch.randn(4, 4) if draws else torch.ones(4, 4))

    with pytest.raises(CaptureError, match=r"forward sets torch's random numbers \(test_custom.py:\d+\) and draws some"):
        capture(Seeds(), (torch.randn(2, 4), True))
    state = torch.get_rng_state()
    assert not capture(Seeds(), (torch.randn(2, 4), False)).changed
    torch.set_rng_state(state)


@pytest.mark.parametrize("way", ["result", "parameter", "buffer", "attribute"])
def test_new_data_of_a_tensor_is_refused(way):
    model = Sets(way)
    with pytest.raises(CaptureError, match=r"x.data = y.*x.copy_\(y\) under torch.no_grad"):
        capture(model, (torch.randn(2, 4),))
    assert model.fixed.device.type == "cpu"


class Masked(nn.Module):
    """Writes to the ``data`` of tensors, as masked convolutions do."""

    def __init__(self, way):
        super().__init__()
        self.linear, self.way = nn.Linear(4, 6), way
        self.register_buffer("mask", torch.ones(6, 4).tril())

    def forward(self, x):
        weight = self.linear.weight
        if self.way == "again":
            weight.data *= self.mask
        elif self.way == "normed":
            weight.data.div_(weight.data.norm(dim=1, keepdim=True))
        elif self.way == "part":
            torch.nn.functional.relu(weight.data[1:], inplace=True)
        elif self.way == "copied":
            torch.mul(weight.data, self.mask, out=weight.data)
        y = self.linear(x)
        if self.way == "late":
            weight.data.mul_(self.mask)
        elif self.way == "computed":
            y.data.relu_()
        elif self.way == "buffer":
            self.mask.data.mul_(0.9).add_(y.data.mean())
        elif self.way == "kept":
            y = y @ self.mask
            self.mask.data.mul_(0.9)
        return y * y.data.abs().max()


@pytest.mark.parametrize("way", ["again", "normed", "part", "copied", "buffer"])
def test_data_is_changed_in_place(way):
    model, x = Masked(way).double(), torch.randn(6, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    simulated = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), (x,), strategy="tensor3d"), (x,))
    for each in (plain, simulated):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(x).sin().sum().backward()
            optimizer.step()
    for mine, its in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", ["late", "computed", "kept"])
def test_data_that_autograd_may_have_kept_is_not_changed(way):
    with pytest.raises(CaptureError, match="forward writes to x.data where x is computed, or has been used"):
        capture(Masked(way), (torch.randn(6, 4),))


class Shares(nn.Module):
    """Its modules share a list, and one of them is registered under two names."""

    def __init__(self):
        super().__init__()
        self.inner, self.losses = nn.Linear(4, 4), []
        self.inner.losses, self.again = self.losses, self.inner

    def forward(self, x):
        self.losses.clear()
        y = self.again(self.inner(x))
        self.inner.losses.append(y.mean())
        return y + sum(self.losses)


def test_lists_that_modules_share_stay_shared(caplog):
    model = Shares()
    with caplog.at_level("WARNING", "autotp.capture"):
        captured = capture(model, (torch.randn(2, 4),))
    assert model.losses is model.inner.losses and model.losses == []
    assert [left.path for left in captured.left] == ["losses", "inner.losses"] and not caplog.records


def test_what_runs_in_inference_mode_has_no_gradient():
    torch.manual_seed(0)
    model, x = Counts("").double(), torch.randn(4, 4, dtype=torch.float64)
    inner = model.inner.forward
    model.inner.forward = torch.inference_mode()(lambda x: inner(x))
    model.forward = lambda x: model.other(x) + model.inner(x).clone()
    plan = autotp.plan(model, autotp.Topology.flat(2), (x,), strategy="data", mesh=(2,))
    for each in (autotp.simulate(model, plan, (x,)), model):
        model.zero_grad()
        each(x).sum().backward()
        assert model.inner.weight.grad is None or not model.inner.weight.grad.any()
        assert model.other.weight.grad.any()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_functions_with_gradients_of_their_own_run_in_inference_mode(schedule):
    class Twice(nn.Linear):
        def forward(self, x):
            return Named.apply(super().forward(Named.apply(super().forward(x))))

    model, x = Twice(4, 4).double(), torch.randn(4, 4).double()
    plan = autotp.plan(model, autotp.Topology.flat(2), (x,), strategy="data", mesh=(2,), schedule=schedule)
    simulated = autotp.simulate(model, plan, (x,), schedule=schedule)
    with torch.inference_mode():
        torch.testing.assert_close(simulated(x), model(x))


def test_what_torch_changes_for_itself_is_not_warned_of(caplog):
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.utils.weight_norm(nn.Linear(4, 4)), nn.GRU(4, 4))
    prune.random_unstructured(model[0], "bias", 0.5)
    with caplog.at_level("WARNING", "autotp.capture"):
        captured = capture(model, (torch.randn(2, 4),))
    assert not captured.changed and not caplog.records


class Ranges(nn.Module):
    """Ranges between parameters: torch gives the parameters no gradient from them, though the results require one."""

    def __init__(self):
        super().__init__()
        self.low, self.high = (nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in (0.5, 2.0))
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        bins = torch.linspace(self.low, self.high, 4) + torch.logspace(self.low, 2, 4, base=2.0)
        return (self.linear(x) - bins) * self.high


def test_ranges_end_gradients():
    model, x = Ranges(), torch.rand(4, 4, dtype=torch.float64)
    simulated = autotp.simulate(model, autotp.plan(model, autotp.Topology.load("cpu").resized(2), (x,)), (x,))
    for each in (model, simulated):
        each(x).square().sum().backward()
    assert model.low.grad is None and simulated.low.grad is None
    torch.testing.assert_close(simulated.high.grad, model.high.grad)
    torch.testing.assert_close(simulated.linear.weight.grad, model.linear.weight.grad)


def test_other_threads_take_derivatives_while_a_model_is_captured():
    found = []

    def derive():
        x = torch.ones(3, requires_grad=True)
        x.square().sum().backward()
        found.append((x.grad.tolist(), torch.func.grad(lambda y: y.square().sum())(torch.ones(3)).tolist()))

    class Model(nn.Linear):
        def forward(self, x):
            other = threading.Thread(target=derive)
            other.start()
            other.join()
            return super().forward(x)

    capture(Model(4, 4), (torch.randn(4, 4),))
    assert found and all(each == ([2.0, 2.0, 2.0], [2.0, 2.0, 2.0]) for each in found)
