"""Chunks: what must not be cut is not cut, and the plan says so."""

import copy
import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from overlapping import gradients, planned, tokens
from thinned import thinned
from torch import nn

import autotp
from autotp.analysis.explain import priced_plan
from autotp.analysis.inspection import inspect_plan
from autotp.cli.inspect_plan import _rows_shown
from autotp.cli.render import plan_table
from autotp.cli.terminal import make_console
from passes.capture import capture

F64 = {"dtype": torch.float64}


class Images(nn.Module):
    """A convolution, a given layer, another convolution and a loss."""

    def __init__(self, layer):
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.layer = layer
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(F.relu(self.layer(F.relu(self.first(x))))).square().mean()


class Functional(nn.Module):
    def forward(self, x):
        return F.batch_norm(x, None, None, training=True)


LAYERS = {
    "batch norm": lambda: nn.BatchNorm2d(8),
    "batch norm without statistics": lambda: nn.BatchNorm2d(8, track_running_stats=False),
    "functional batch norm": Functional,
    "instance norm": lambda: nn.InstanceNorm2d(8, affine=True),
    "transposed": lambda: nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1, dilation=2),
    "transposed in groups": lambda: nn.ConvTranspose2d(8, 8, 3, stride=2, groups=2),
    "depthwise": lambda: nn.Conv2d(8, 8, 3, groups=8),
    "same": lambda: nn.Conv2d(8, 8, 3, padding="same", dilation=2, groups=2),
}


def exact(model, plan, args, schedule, steps=2):
    """Checks that losses, gradients and buffers over some steps are those of one device."""
    alone = copy.deepcopy(model)
    ours = autotp.simulate(model, plan, args, schedule=schedule)
    for _ in range(steps):
        want, got = alone(*args), ours(*args)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
        wanted, found = gradients(alone, want), gradients(model, got)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12, msg=name)
        with torch.no_grad():
            for module, slopes in ((alone, wanted), (model, found)):
                for name, parameter in module.named_parameters():
                    parameter -= 0.1 * slopes[name]
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-9, atol=1e-12, msg=name)


def images(layer):
    torch.manual_seed(0)
    return Images(LAYERS[layer]()).double(), (torch.randn(8, 4, 6, 6, **F64),)


@pytest.mark.parametrize("layer", thinned(LAYERS, whole=True))
@pytest.mark.parametrize(
    ("strategy", "mesh", "chunks", "schedule"),
    thinned(
        [
            ("data", (2,), {"batch": 2}, "overlap"),
            ("data", (2,), {}, "none"),
            ("megatron-1d", (2,), {"batch": 2, "rows": 2}, "overlap"),
            ("tensor3d", (2, 2), {"batch": 2}, "overlap"),
        ],
        first=1,
        slow=1,
    ),
)
def test_layers_that_look_at_the_whole_batch_or_at_groups(layer, strategy, mesh, chunks, schedule):
    model, args = images(layer)
    plan = dataclasses.replace(planned(model, args, strategy, mesh), chunks=chunks)
    exact(model, plan, args, schedule)


@pytest.mark.parametrize("layer", [nn.Conv2d(8, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 3, groups=2)], ids=str)
def test_images_without_a_batch(layer):
    torch.manual_seed(0)
    model, args = Images(layer).double(), (torch.randn(4, 6, 6, **F64),)
    for strategy in ("data", "megatron-1d"):
        exact(model, planned(model, args, strategy), args, "overlap")


def test_a_plan_says_where_chunks_stop():
    model, args = images("batch norm without statistics")
    plan = planned(model, args, chunks={"batch": 2})
    assert plan.chunks == {"batch": 2} and 0 < plan.chunked["batch"] < len(plan.operators)
    (stopped,) = plan.whole.items()
    assert stopped == ("batch_norm_train", "batch: it needs the whole batch at once")
    console = make_console()
    with console.capture() as shown:
        console.print(plan_table(plan))
    assert f"2 of the batch, in {plan.chunked['batch']} operators of {len(plan.operators)}" in shown.get()
    assert "layer: batch_norm_train  (batch: it needs the whole batch at once)" in shown.get()


def test_inspect_says_where_chunks_stop():
    model, args = images("batch norm")
    plan = planned(model, args, chunks={"batch": 2})
    rows = {row.name: row for row in inspect_plan(plan, priced_plan(capture(model, args), plan))}
    assert rows["batch_norm_train"].whole == "batch: it needs the whole batch at once"
    console = make_console()
    with console.capture() as shown:
        console.print(_rows_shown(list(rows.values())))
    assert shown.get().count("not in chunks of the batch: it needs the whole batch at once") == 1


class NoRule(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.renorm(self.up(x), 2, 0, 1.0)).square().mean()


def test_what_has_no_rule_is_whole_and_reported():
    torch.manual_seed(0)
    model, args = NoRule().double(), (torch.randn(8, 8, **F64),)
    plan = planned(model, args, chunks={"batch": 2})
    assert plan.whole == {"renorm": "batch: it has no rule"}
    exact(model, plan, args, "overlap")


@pytest.mark.slow
def test_chunks_that_cut_nothing_are_not_planned(caplog):
    model, args = tokens()
    for chunks in ({"batch": 3}, {"batch": 16}, {"rows": 3}):
        plan = planned(model, args, chunks=chunks)
        assert plan.chunks == {} and plan.chunked == {}
        assert set(plan.whole.values()) == {f"{next(iter(chunks))}: its parts would be uneven"}
        assert plan.hash == planned(model, args, chunks={}).hash
        assert "nothing comes in" in caplog.text and "uneven" in caplog.text
        caplog.clear()
    both = planned(model, args, chunks={"batch": 2, "rows": 3})
    assert both.chunks == {"batch": 2}
    data = planned(model, args, "data", chunks={"rows": 2})
    assert data.chunks == {} and "nothing communicates" in caplog.text


def test_what_is_reported_is_saved_with_the_plan(tmp_path):
    model, args = images("batch norm")
    plan = planned(model, args, chunks={"batch": 2})
    plan.save(tmp_path / "plan.json")
    found = autotp.Plan.load(tmp_path / "plan.json")
    assert (found.chunks, found.chunked, found.whole) == (plan.chunks, plan.chunked, plan.whole)
    assert json.loads(plan.to_json())["whole"] == {"batch_norm_train": "batch: it needs the whole batch at once"}


@pytest.mark.parametrize("chunks", [2, "batch=2", [("batch", 2)], {"batch": True}, {"batch": 0}, {"columns": 2}], ids=str)
def test_wrong_chunks_are_refused(chunks):
    model, args = tokens()
    with pytest.raises(autotp.AutotpError, match="chunks"):
        planned(model, args, chunks=chunks)


def test_chunks_and_panels_exclude_each_other():
    model, args = tokens()
    machine = autotp.Topology.flat(2, bandwidth="1 GB/s", latency="10 us")
    with pytest.raises(autotp.AutotpError, match="exclude each other"):
        autotp.plan(model, machine, args, chunks={"batch": 2}, panels=4)
