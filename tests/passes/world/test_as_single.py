"""``dropout="as-single"``: operators draw the numbers of a single process, and leave the generator in the same state."""

import contextlib
import copy
import dataclasses
import itertools

import pytest
import torch
from overlapping import planned
from thinned import SCHEDULES, thinned
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autotp
from passes.layouts.layout import place, take
from passes.world.draws import drawn

F64 = {"dtype": torch.float64}


class Noisy(nn.Module):
    """Random operators on replicated and sharded values, some with unused results, and some that draw nothing."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8, 8)
        self.drops = nn.ModuleList([nn.Dropout(0.4), nn.Dropout2d(0.3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.3)])

    def forward(self, x):
        h = F.dropout(self.conv(x).transpose(2, 3), 0.25)
        F.dropout(h, 0.5)
        for drop in self.drops:
            h = drop(h)
        h = h * h.new_empty((h.shape[0], 1, 1, 1)).bernoulli_(0.9) + torch.rand_like(h) * torch.randn_like(h)
        h = h + torch.empty_like(h).normal_(0, 0.1) + F.gumbel_softmax(h, dim=1) + F.dropout(h, 1.0)
        out = self.linear(h.mean((2, 3))) + torch.randn(8, 3, **F64).sum() * torch.rand(8, **F64)
        return F.dropout(out, 0.5).square().sum()


class Block(nn.Module):
    """Attention with dropout and grouped queries, between two dropouts."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        q = self.q(F.dropout(x, 0.1)).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True, enable_gqa=True)
        return x + F.dropout(self.out(h.transpose(1, 2).flatten(2)), 0.2)


class Attending(nn.Module):
    """Two of these blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def made(kind):
    torch.manual_seed(0)
    model = kind().double().train()
    return model, (torch.randn(8, *((4, 4, 4) if kind is Noisy else (8, 16)), **F64),)


def steps(module, parameters, args, count=3):
    """The losses and gradients of some steps, and the final state of torch's generator."""
    torch.manual_seed(5)
    optimizer, found = torch.optim.SGD(parameters, lr=0.01), []
    for _ in range(count):
        optimizer.zero_grad()
        loss = module(*args)
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in parameters)]
        optimizer.step()
    return found, torch.get_rng_state()


def require_as_single(kind, strategy, mesh=(2,), schedule="none", chunks=None, **options):
    model, args = made(kind)
    wanted, stands = steps(alone := copy.deepcopy(model), list(alone.parameters()), args)
    plan = dataclasses.replace(planned(model, args, strategy, mesh, **options), chunks=chunks or {})
    before = torch.get_rng_state()
    ours = autotp.simulate(model, plan, args, schedule=schedule, dropout="as-single")
    assert torch.equal(torch.get_rng_state(), before), "capturing draws nothing"
    found, left = steps(ours, list(model.parameters()), args)
    for mine, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-9, atol=1e-12)
    assert torch.equal(left, stands), "the generator stands where the model leaves it"
    assert schedule == "none" or all(ours._compiled.values()), "it was scheduled"
    return plan


@pytest.mark.parametrize("kind", [Noisy, Attending])
@pytest.mark.parametrize(
    ("strategy", "mesh", "schedule", "chunks"),
    thinned(
        [
            ("data", (2,), "none", {}),
            ("megatron-1d", (2,), "overlap", {"batch": 2}),
            ("tensor3d", (2, 2), "overlap", {}),
        ],
        first=1,
    ),
)  # fmt: skip
def test_three_steps_draw_what_one_device_draws(kind, strategy, mesh, schedule, chunks):
    require_as_single(kind, strategy, mesh, schedule, chunks)


class Transposed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return F.dropout(self.norm(x.transpose(1, 2)) * 2, 0.5)


class Shuffled(nn.Module):
    def forward(self, x):
        x = F.channel_shuffle(torch.stack([x] * 4, 1).contiguous(memory_format=torch.channels_last), 2)
        return F.dropout(x.copysign(x.roll(1, 2)), 0.5)


@pytest.mark.parametrize(
    "model", [*map(Transposed, (nn.BatchNorm1d(6), nn.BatchNorm1d(6).eval(), nn.LogSigmoid())), Shuffled()], ids=str
)
def test_kernels_lay_their_results_out_otherwise_than_exported(model):
    model, x = model.double(), torch.randn(4, 5, 6, **F64)
    ours = autotp.simulate(copy.deepcopy(model), planned(model, (x,), "data", (2,)), (x,), dropout="as-single")
    torch.manual_seed(1)
    wanted = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(ours(x), wanted, rtol=1e-9, atol=1e-12)


def test_what_is_recomputed_is_drawn_again():
    assert require_as_single(Attending, "data", schedule="overlap", recompute="full").recomputed


def test_queries_are_sharded():
    pinned = ("blocks.?:scaled_dot_product_attention=s@x",)
    plan = require_as_single(Attending, "auto", schedule="overlap", constraints=pinned)
    assert "s" in plan.assignments["scaled_dot_product_attention"]


@pytest.mark.parametrize("layout", [(place(0), place(1)), (place(1), place(1)), (place(1, 3), place(2))], ids=str)
def test_a_device_has_its_part_of_what_is_drawn_even_where_parts_differ_in_size(layout):
    graph, whole = fx.Graph(), torch.arange(7.0 * 12 * 5).view(7, 12, 5)
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.dropout.default, (x, 0.5, True))
    x.meta["val"] = node.meta["val"] = whole
    for at in itertools.product(range(2), range(3)):
        assert torch.equal(drawn(node, layout, (2, 3)).part(whole, at), take(whole, layout, (2, 3), at))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_draw_one_after_the_other(schedule):
    model, args = made(Attending)
    plan = planned(model, args, "data", accumulate=2)
    ours = autotp.simulate(model, plan, args, schedule=schedule, dropout="as-single")
    slopes = []
    for module, syncing in ((ours, ours.no_sync), (model, contextlib.nullcontext)):
        model.zero_grad()
        torch.manual_seed(3)
        with syncing():
            module(*args).backward()
        module(*args).backward()
        slopes.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-12)


def test_a_checkpoint_around_the_module_drops_again_what_was_dropped():
    model, args = made(Attending)
    wanted, _ = steps(alone := copy.deepcopy(model), list(alone.parameters()), args)
    ours = autotp.simulate(model, planned(model, args, "data"), args, dropout="as-single")
    found, _ = steps(lambda x: checkpoint(ours, x, use_reentrant=False), list(model.parameters()), args)
    for mine, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-9, atol=1e-12)


class Leaky(nn.Module):
    """Draws as many numbers as there are negative values."""

    def __init__(self):
        super().__init__()
        self.linear, self.leaky = nn.Linear(8, 8), nn.RReLU()

    def forward(self, x):
        return self.leaky(self.linear(x))


def test_what_cannot_be_drawn_as_one_device_does_is_refused():
    model, args = Leaky().train(), (torch.randn(4, 8),)
    plan = planned(model, args, "data")
    with pytest.raises(autotp.AutotpError, match=r"as one|as-single.*rrelu.*use dropout='sharded'"):
        autotp.simulate(model, plan, args, dropout="as-single")
    with pytest.raises(autotp.AutotpError, match="choose 'sharded' or 'as-single'"):
        autotp.simulate(model, plan, args, dropout="single")
    assert not torch.equal((ours := autotp.simulate(model, plan, args))(*args), ours(*args))
    autotp.simulate(model.eval(), planned(model, args, "data"), args, dropout="as-single")(*args)


def test_what_fills_permuted_memory_in_another_order_is_refused():
    class Permuted(nn.Module):
        def forward(self, x):
            return x * torch.empty_like(x.transpose(0, 1)).bernoulli_(0.5).transpose(0, 1)

    x = torch.rand(4, 6, **F64)
    plan = autotp.plan(Permuted(), autotp.Topology.flat(2), (x,), mesh=(2,), mode="inference")
    with pytest.raises(autotp.AutotpError, match=r"dropout='as-single' cannot draw .*aten.bernoulli.p"):
        autotp.simulate(Permuted(), plan, (x,), dropout="as-single")
    autotp.simulate(Permuted(), plan, (x,))(x)
