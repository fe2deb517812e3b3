"""A device's memory during a step, and what recomputation saves and costs, compared with plans that keep more or less."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autotp
from autotp.analysis.memory import explain_memory
from passes.capture import capture

WIDTH, LAYERS = 32, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)).view(-1, 4 * WIDTH))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


TOPOLOGY = autotp.Topology.load("dgx-h100").resized(4)


def build():
    torch.manual_seed(0)
    return Model(), (torch.randn(512, WIDTH),)


def planned(recompute, **options):
    model, args = build()
    options = {"strategy": "data", "mesh": (4,), "schedule": "none", "recompute": recompute} | options
    return capture(model, args), autotp.plan(model, TOPOLOGY, args, **options)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_curve_reaches_the_predicted_memory_and_kinds_add_up(recompute):
    captured, plan = planned(recompute)
    use = explain_memory(captured, plan)
    assert use.peak_bytes == pytest.approx(plan.predicted.memory_bytes)
    assert max(one.bytes for one in use.curve) == use.curve[use.worst].bytes == pytest.approx(use.peak_bytes)
    assert sum(size for *_, size in use.held) == pytest.approx(use.peak_bytes)
    for one in use.curve:
        assert sum(one.kinds.values()) == pytest.approx(one.bytes)
    ahead = [one.operator for one in use.curve if not one.backward]
    behind = [one.operator for one in use.curve if one.backward]
    assert ahead == [op.name for op in plan.operators]
    assert behind == [name for name in reversed(ahead) if name in behind]
    assert any("recomputed" in one.kinds for one in use.curve) == bool(plan.recomputed)


def test_recomputations_are_compared_with_the_plan_that_keeps_them():
    """The results of the wide layer and of its activation, each for a quarter of the rows, in three layers."""
    captured, plan = planned("full")
    found = {one.target: one for one in explain_memory(captured, plan).recomputed}
    assert set(found) == {"aten.linear.default", "aten.gelu.default"}
    wide = LAYERS * 512 // 4 * 4 * WIDTH * 4.0
    for one in found.values():
        assert one.copies == LAYERS
        assert one.saved_bytes == pytest.approx(wide)
        assert one.seconds == one.step_seconds > 0
    # If both are kept, nothing is recomputed: their costs add up to the difference of ``full`` and ``none``.
    _, kept = planned("none")
    more = plan.predicted.step_seconds - kept.predicted.step_seconds
    assert sum(one.seconds for one in found.values()) == pytest.approx(more)


def test_it_agrees_with_plans_of_fewer_modules():
    """To keep the tensors of one block is to plan recomputation of the other blocks only."""
    captured, plan = planned([f"blocks.{i}" for i in range(LAYERS)])
    whole = explain_memory(captured, plan)
    _, fewer = planned(["blocks.0", "blocks.1"])
    assert fewer.predicted.memory_bytes > plan.predicted.memory_bytes - 1
    assert sum(one.copies for one in whole.recomputed) == 2 * LAYERS
    assert explain_memory(captured, fewer).peak_bytes == pytest.approx(fewer.predicted.memory_bytes)


def test_without_recomputation_there_is_nothing_to_compare():
    assert explain_memory(*planned("none")).recomputed == ()


def test_empty_tensors_and_no_operators():
    """Regression: ended in a KeyError for a moment at which nothing is held, and in an IndexError."""
    args = (torch.randn(4, 4),)

    def explained(model):
        return explain_memory(capture(model, args), autotp.plan(model, autotp.Topology.flat(2), args))

    empty = explained(nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 4)))
    assert empty.peak_bytes > 0 and empty.curve
    with pytest.raises(autotp.AutotpError, match="no operators"):
        explained(nn.Identity())


def test_inference_has_a_forward_pass_alone():
    use = explain_memory(*planned("none", mode="inference"))
    assert not any(one.backward for one in use.curve)


def test_the_command_shows_the_curve_and_what_is_made_again(tmp_path, capsys, run_cli):
    _, plan = planned("full")
    plan.save(tmp_path / "plan.json")
    command = ("explain", "--memory", "--plan", tmp_path / "plan.json", "--model", f"{__file__}:build")
    assert run_cli(*command) == 0
    said = capsys.readouterr().out
    assert "held along a step" in said and "█" in said and "recomputed" in said
    assert "at the worst moment" in said and "like it" in said
    assert run_cli(*command, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["peak_bytes"] == pytest.approx(plan.predicted.memory_bytes)
    assert len(shown["recomputed"]) == 2 and len(shown["curve"]) > 2 * LAYERS
    assert {"kind", "name", "bytes"} == set(shown["held"][0])
