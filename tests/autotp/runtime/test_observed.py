"""Observed modules in lockstep: in every call, their hooks see what those of the plain model see."""

import copy
import math

import pytest
import torch
from float64 import double, float64_mode
from models import MODELS
from thinned import SCHEDULES, thinned
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import autotp
from passes.capture import CaptureError, capture

SIX = {"rtol": 1e-9, "atol": 1e-12}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8)

    def forward(self, x, *, scale=1.0):
        return self.down(self.act(self.up(x))) * scale


class Net(nn.Module):
    """Calls one module twice, writes to results of modules in place, and skips another module in evaluation."""

    def __init__(self, how=None):
        super().__init__()
        self.blocks, self.norm, self.extra, self.head = (
            nn.ModuleList([Block(), Block()]),
            nn.LayerNorm(8),
            Block(),
            nn.Linear(8, 4),
        )
        self.how = how

    def forward(self, x):
        for block in self.blocks:
            if self.how == "no_grad":
                with torch.no_grad():
                    found = block(x, scale=2.0)
            elif self.how is not None:
                found = checkpoint(block, x, use_reentrant=self.how == "reentrant")
            else:
                found = block(x, scale=2.0)
            x = self.norm(x + found)
            x.add_(1)
        return self.head(self.extra(x) if self.training else x)


def watched(model, names, before=True):
    """Hooks the modules; returns the list that collects copies of what the hooks are given, in order."""
    seen = []

    def hook(name, kind):
        def look(_, *given):
            seen.append((name, kind, tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, given)))

        return look

    for name in names:
        if before:
            model.get_submodule(name).register_forward_pre_hook(hook(name, "before"), with_kwargs=True)
        model.get_submodule(name).register_forward_hook(hook(name, "after"))
    return seen


def check(mine, theirs):
    mine, theirs = tree_leaves(mine), tree_leaves(theirs)
    assert [type(each) for each in mine] == [type(each) for each in theirs]
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, **SIX)
        else:
            assert a == b


def both(model, x, observe, names, schedule="overlap", mesh=(4,), **options):
    """The simulated and the plain model, and what hooks see on each of them."""
    plain = copy.deepcopy(model)
    plan = autotp.plan(model, autotp.Topology.flat(math.prod(mesh)), (x,), mesh=mesh, observe=observe, **options)
    ours = autotp.simulate(model, autotp.Plan.from_json(plan.to_json()), (x,), schedule=schedule)
    return ours, plain, watched(ours, names), watched(plain, names)


def net(how=None):
    torch.manual_seed(0)
    return Net(how).double(), torch.randn(8, 8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("none", {"strategy": "tensor3d", "mesh": (2, 2)}),
        pytest.param("overlap", {"strategy": "megatron-sp", "mesh": (2, 2)}, marks=pytest.mark.exact),
        pytest.param("overlap", {"strategy": "zero3", "recompute": "full"}, marks=pytest.mark.slow),
        pytest.param("overlap", {"strategy": "data", "mesh": (2,), "chunks": {"batch": 2}}, marks=pytest.mark.exact),
        pytest.param("none", {"strategy": "megatron-1d", "chunks": {"rows": 2}}, marks=pytest.mark.exact),
        pytest.param("overlap", {"strategy": "megatron-1d", "outputs": "dtensor"}, marks=pytest.mark.exact),
    ],
)
def test_hooks_see_what_the_plain_models_see(schedule, options):
    """In training, in evaluation, without gradients and with other shapes; hooks do not change gradients."""
    model, x = net()
    names = ["blocks.0", "blocks.1", "blocks.0.up", "blocks.1.act", "norm", "extra"]
    observe = ["blocks.*", "blocks.?.up", "blocks.1.act", "norm", "extra"]
    ours, plain, mine, theirs = both(model, x, observe, names, schedule, **options)
    for each in (ours, plain):
        each(x).square().mean().backward()
        with torch.no_grad():
            each(x[:5])
            each.eval()(x)
    check(mine, theirs)
    assert len(ours.programs) == 3 and [name for name, _, _ in theirs].count("norm") == 12
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **SIX, msg=name)


@pytest.mark.parametrize("how", thinned(["no_grad", "checkpoint", "reentrant"], 3, whole=True))
def test_modules_in_blocks_of_torch(how):
    model, x = net(how)
    ours, plain, mine, theirs = both(model, x, ["blocks.*"], ["blocks.0", "blocks.1"], strategy="megatron-1d")
    with (
        torch.no_grad() if how != "no_grad" else torch.enable_grad()
    ):  # in eager mode, hooks in a checkpoint run again in the backward pass
        check([each(x) for each in (ours,)], [plain(x)])
    check(mine, theirs)
    assert len(mine) == 4


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_of_what_was_observed(schedule):
    """The loss has the plain model's gradients; a hook on an observed value would miss some gradients: an error."""
    model, x = net()
    ours, plain, *_ = both(model, x, ["blocks.0"], [], schedule, strategy="megatron-1d")
    kept = {}
    for each in (ours, plain):
        each.blocks[0].register_forward_hook(lambda _, given, made, each=each: kept.update({each: made}))
        loss = each(x).square().mean()
        (loss + kept[each].sin().sum()).backward()
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **SIX, msg=name)
    loss = ours(x).square().mean()
    kept[ours].register_hook(lambda gradient: None)
    with pytest.raises(autotp.AutotpError, match="what module 'blocks.0' is given or returns has a hook .* output 0 is"):
        loss.backward()


def test_what_the_planner_sees():
    """An observed tensor is an operator whose layout is never partial; without observed tensors, plans are unchanged."""
    model, x = net()
    topology = autotp.Topology.flat(4)
    asked = {"strategy": "megatron-1d", "mesh": (4,)}
    usual = autotp.plan(model, topology, (x,), **asked)
    assert autotp.plan(model, topology, (x,), observe=[], **asked).hash == usual.hash
    seen = autotp.plan(model, topology, (x,), observe=["blocks.0.down"], **asked)
    extra = [op for op in seen.operators if op.name not in usual.assignments]
    assert {op.target for op in extra} == {"aten.alias.default"} and len(extra) == 2
    assert not any("P" in str(op.layouts) for op in extra)
    captured = capture(model, (x,), observe=["blocks.0.down", "blocks.0.act"])
    assert (captured.outputs, captured.returned) == (1, 4), "what one returns, another is given"


def test_mistakes():
    model, x = net()
    topology = autotp.Topology.flat(4)
    for patterns in (["block.*"], ["norm", "blocks.2"], ["blocks.*.*.*"]):
        with pytest.raises(autotp.AutotpError, match="names no module inside Net; (did you mean 'blocks|there are blocks)"):
            autotp.plan(model, topology, (x,), observe=patterns)
    with pytest.raises(autotp.AutotpError, match="observe='norm': give a list"):
        autotp.plan(model, topology, (x,), observe="norm")
    handle = model.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"module 'norm' has a forward hook.*observe=\['norm'\]"):
        autotp.plan(model, topology, (x,), observe=["norm"])
    handle.remove()
    ours, _, _, _ = both(model, x, ["norm"], [], strategy="data")
    handle = ours.head.register_forward_hook(lambda *_: None)
    with pytest.raises(autotp.AutotpError, match=r"head is not observed.*observe=\['head'\]"):
        ours(x)
    handle.remove()
    ours.norm.register_forward_hook(lambda _, given, made: made * 2)
    with pytest.raises(autotp.AutotpError, match="a forward hook of norm returned a Tensor"):
        ours(x)


def test_a_shared_module_has_hooks_under_all_its_names():
    model, x = net()
    model.blocks[1].down = model.blocks[0].down
    ours, plain, mine, theirs = both(model, x, ["blocks.1.down"], ["blocks.0.down"], strategy="data")
    for each in (ours, plain):
        each(x)
    check(mine, theirs)
    assert len(mine) == 4, "before and after two calls"


def test_what_hooks_cannot_be_shown():
    class Boxed(nn.Module):
        def forward(self, box):
            return box.value * 2

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Boxed()

        def forward(self, x):
            box = type("Box", (), {})()
            box.value = x
            return self.inner(box)

    with pytest.raises(CaptureError, match="module 'inner' is given or returns a Box"):
        capture(Outer(), (torch.randn(4),), observe=["inner"])


@pytest.mark.exact
def test_blocks_of_transformers():
    model, args, kwargs = double(MODELS["llama"])
    found = [n for n, module in model.named_modules() if "." in n and n.rpartition(".")[2].isdigit()]
    with float64_mode():
        plain = copy.deepcopy(model)
        observe = [f"{found[0].rpartition('.')[0]}.*"]
        plan = autotp.plan(model, autotp.Topology.flat(2), args, kwargs, strategy="megatron-1d", mesh=(2,), observe=observe)
        ours = autotp.simulate(model, plan, args, kwargs, schedule="overlap")
        # Arguments are not compared: export makes masks that eager models do not.
        mine, theirs = (watched(each, found, before=False) for each in (ours, plain))
        ours(*args, **kwargs)
        plain(*args, **kwargs)
    check(mine, theirs)
    assert len(mine) == len(found) > 0


def test_plans_of_observed_models_are_verified():
    model, x = net()
    plan = autotp.plan(model, autotp.Topology.flat(2), (x,), strategy="megatron-1d", mesh=(2,), observe=["blocks.*"])
    found = autotp.verify(model, plan, (x,))
    assert found.right and list(found.outputs) == ["0"]


@pytest.mark.parametrize("how", [lambda made: made.update(h=made["h"] * 2), lambda made: made["list"].clear()])
def test_hooks_that_put_something_else_into_what_they_are_given_are_refused(how):
    class Part(nn.Linear):
        def forward(self, x):
            return {"h": super().forward(x), "list": [x]}

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Part(8, 8)

        def forward(self, x):
            return self.part(x)["h"].sum()

    model, x = Whole().double(), torch.randn(8, 8, dtype=torch.float64)
    plan = autotp.plan(model, autotp.Topology.flat(2), (x,), observe=["part"])
    ours = autotp.simulate(model, plan, (x,))
    handle = model.part.register_forward_hook(lambda module, args, made: how(made) and None)
    with pytest.raises(autotp.AutotpError, match="a forward hook of part put another value into what it was given"):
        ours(x)
    handle.remove()
    ours(x)


@pytest.mark.slow
def test_hooks_that_transformers_leaves_behind_are_its_own(caplog):
    model, args, kwargs = double(MODELS["llama"])
    simulated = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), args, kwargs), args, kwargs)
    shown = model(*args, **kwargs, output_hidden_states=True)
    torch.testing.assert_close(simulated(*args, **kwargs).loss, shown.loss)
    ours = simulated(*args, **kwargs, output_hidden_states=True)
    torch.testing.assert_close(ours.hidden_states, shown.hidden_states)
    assert "forward changes" not in caplog.text
    model.model.layers[0].register_forward_hook(print)
    with pytest.raises(autotp.AutotpError, match="model.layers.0 is not observed"):
        simulated(*args, **kwargs)
