"""Random operators: scheduled graphs draw what sharded graphs draw, and training is not taken for evaluation."""

import dataclasses

import pytest
import torch
from overlapping import gradients, planned
from thinned import SCHEDULES
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import autotp

F64 = {"dtype": torch.float64}


class Noisy(nn.Module):
    """Random operators that draw the same numbers with and without a schedule, between convolutions and a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.linear = nn.Linear(8, 8)
        self.drops = nn.ModuleList([nn.Dropout(0.4), nn.Dropout2d(0.3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.3)])

    def forward(self, x):
        h = self.conv(x)
        for drop in self.drops:
            h = drop(h)
        h = h + torch.rand_like(h) * torch.randn_like(h)
        return self.linear(h.mean((2, 3))) + torch.randn(8, 8, **F64) * torch.rand(8, **F64)


def noisy():
    torch.manual_seed(0)
    return Noisy().double().train(), (torch.randn(8, 4, 4, 4, **F64),)


@pytest.mark.parametrize("chunks", [{}, {"batch": 2}], ids=str)
@pytest.mark.parametrize("strategy", ["data", "megatron-1d"])
def test_a_schedule_draws_what_the_sharded_graph_draws(strategy, chunks):
    model, args = noisy()
    plan = dataclasses.replace(planned(model, args, strategy), chunks=chunks)
    results, slopes = [], []
    for kind in ("none", "overlap"):
        ours = autotp.simulate(model, plan, args, schedule=kind)
        torch.manual_seed(7)
        results.append([ours(*args) for _ in range(2)])
        slopes.append(gradients(model, results[-1][-1].square().sum()))
        assert all(ours._compiled.values()), "it was scheduled"
    assert not torch.equal(results[0][0], results[0][1]), "every pass draws anew"
    for eager, scheduled in zip(*results, strict=True):
        torch.testing.assert_close(scheduled, eager, rtol=1e-12, atol=1e-12)
    for name, slope in slopes[0].items():
        torch.testing.assert_close(slopes[1][name], slope, rtol=1e-9, atol=1e-12)


def dropped(module, value):
    """The result of a random layer alone, scheduled on two devices in two chunks each."""
    model = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), module).double().train()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8)[..., None, None])
    plan = dataclasses.replace(planned(model, (value,), "data"), chunks={"batch": 2})
    return autotp.simulate(model, plan, (value,), schedule="overlap")(value)


def test_whole_channels_are_dropped_and_parts_differ():
    kept = dropped(nn.Dropout2d(0.5), torch.ones(64, 8, 3, 3, **F64)) != 0
    assert torch.equal(kept, kept[..., :1, :1].expand_as(kept)), "a channel is dropped as a whole"
    channels = kept[..., 0, 0]
    assert 0.4 < channels.double().mean() < 0.6
    parts = channels.view(4, 16, 8)
    assert not any(torch.equal(parts[i], parts[j]) for i in range(4) for j in range(i)), "devices and chunks draw their own"


@pytest.mark.parametrize("layer", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_alpha_dropout_keeps_mean_and_variance(layer):
    torch.manual_seed(1)
    found = dropped(layer(0.3), torch.randn(4096, 8, 2, 2, **F64))
    assert abs(found.mean()) < 0.03 and abs(found.std() - 1) < 0.03


class Unknown(nn.Module):
    """Draws by a tensor of probabilities, which cannot be scheduled."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x + torch.bernoulli(x.sigmoid()))


def test_what_cannot_be_traced_runs_as_it_is_and_is_planned_so(caplog):
    model, args = Unknown(), (torch.randn(4, 8),)
    plan = planned(model, args, "data", schedule="overlap")
    assert plan.schedule == "none" and "planned without overlap: bernoulli" in caplog.text
    caplog.clear()
    ours = autotp.simulate(model, plan, args, schedule="overlap")
    ours(*args).sum().backward()
    assert list(ours._compiled.values()) == [None]
    assert "no overlap" in caplog.text and "random" in caplog.text


class Noise(nn.Module):
    """Adds random noise in training and in evaluation."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) + torch.randn_like(x)


def test_noise_of_both_modes_is_drawn_in_both():
    model, args = Noise().double().train(), (torch.randn(4, 8, **F64),)
    ours = autotp.simulate(model, planned(model, args), args)
    assert not torch.equal(ours(*args), ours(*args)) and not torch.equal(ours.eval()(*args), ours(*args))


class Sometimes(nn.Module):
    """Attention with dropout in training."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        return self.attend(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layer", [nn.RReLU, nn.Dropout1d, Sometimes])
def test_what_draws_in_training_only(layer, training):
    """Whichever mode is planned, the other works too; evaluation computes what the plain model does."""
    model, args = nn.Sequential(nn.Linear(8, 8), layer()).double().train(training), (torch.randn(4, 8, 8, **F64),)
    ours = autotp.simulate(model, planned(model, args, "data"), args)
    assert not torch.equal(ours.train()(*args), ours(*args))
    with torch.no_grad():
        found = ours.eval()(*args)
        torch.testing.assert_close(found, model.eval()(*args), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_checkpoint_drops_again_what_was_dropped(schedule, reentrant):
    torch.manual_seed(0)
    model, args = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).double().train(), (torch.randn(4, 8, **F64),)
    ours = autotp.simulate(model, planned(model, args, "data"), args, schedule=schedule)
    x = args[0].clone().requires_grad_()
    for _ in range(2):  # the first call is traced under the checkpoint's hooks
        model.zero_grad()
        out = checkpoint(ours, x, use_reentrant=reentrant)
        out.sum().backward()
        torch.testing.assert_close(model[0].bias.grad, 2.0 * (out != 0).sum(0).double(), rtol=1e-12, atol=0)
        assert all(ours._compiled.values())


@pytest.mark.parametrize("dropout", ["sharded", "as-single"])
def test_torchs_generator_decides_what_is_drawn(dropout):
    model, args = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).double().train(), (torch.randn(4, 8, **F64),)
    ours = autotp.simulate(model, planned(model, args, "data"), args, dropout=dropout)
    torch.manual_seed(7)
    first, state, second = ours(*args), torch.get_rng_state(), ours(*args)
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(ours(*args), second), "where its state was restored"
    torch.manual_seed(7)
    assert torch.equal(ours(*args), first), "where it was seeded"


class Masked(nn.Module):
    """Attention with a boolean mask and a negligible dropout probability."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.inner(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        earlier = torch.ones(6, 6, dtype=torch.bool).tril()
        return nn.functional.scaled_dot_product_attention(q, k, v, earlier, dropout_p=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_attention_that_drops_follows_a_mask_of_booleans(schedule):
    torch.manual_seed(0)
    model, args = Masked().double().train(), (torch.randn(4, 6, 8, **F64),)
    ours = autotp.simulate(model, planned(model, args, "data"), args, schedule=schedule)
    torch.testing.assert_close(ours(*args), model(*args), rtol=1e-9, atol=1e-12)


def test_contexts_of_the_first_call_leave_the_schedule_alone():
    model, args = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double(), (torch.randn(4, 8, **F64),)
    for context in (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(), torch.from_numpy),
        FlopCounterMode(display=False),
        torch.autograd.set_detect_anomaly(True),
    ):
        ours = autotp.simulate(model, planned(model, args, "data"), args, schedule="overlap")
        with context:
            got = gradients(model, ours(*args).sum())
        assert ours._compiled and all(ours._compiled.values()), context
        for name, want in gradients(model, model(*args).sum()).items():
            torch.testing.assert_close(got[name], want, rtol=1e-12, atol=0)
