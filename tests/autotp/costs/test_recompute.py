"""Which operators a recomputation mode selects, its predicted memory, and when the planner recomputes."""

import pytest
import torch
from thinned import SCHEDULES, thinned
from torch import nn
from torch.nn import functional as F

import autotp
from autotp.costs.recompute import recomputed_by
from autotp.planner import prepare
from benchmarks.memory import allocated
from benchmarks.models import trained
from passes.capture import capture


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))).transpose(0, 1)).transpose(0, 1)


class Model(nn.Module):
    def __init__(self, width=16, layers=2, drop=0.0):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, width), nn.Linear(width, 32)
        self.blocks, self.drop = nn.ModuleList(Block(width) for _ in range(layers)), drop

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = F.dropout(block(x), self.drop, self.training)
        return self.head(x).logsumexp(-1).mean()


#: The operators that are recomputed in the two blocks.
FIRST = ("layer_norm", "linear", "gelu", "permute")
SECOND = ("layer_norm_1", "linear_2", "gelu_1", "permute_2")


def chosen(way, model=None):
    found = prepare(capture(model or Model(), (torch.zeros(4, 8, dtype=torch.long),)))
    return {node.name: repeats for node, repeats in recomputed_by(found, way).items()}


def test_nothing():
    assert chosen("none") == {}


def test_all_in_blocks_but_what_leaves_them():
    found = chosen("full")
    assert all(found.values())
    # The sums leave the blocks. What only views of kept results show is not read again.
    assert set(found) == {*FIRST, *SECOND}


def test_all_but_products_and_lookups():
    found = chosen("selective")
    assert not any(found.values())
    assert {"layer_norm", "gelu", "layer_norm_1", "gelu_1"} <= set(found)
    assert not any(name.startswith(("linear", "embedding")) for name in found)


def test_modules_by_name():
    assert set(chosen(["blocks.1"])) == set(SECOND)
    with pytest.raises(autotp.AutotpError, match="no operator is in a module 'block'.*blocks.0"):
        chosen(["block"])


@pytest.mark.parametrize("way", ["some", 3, [1]])
def test_what_is_no_way_is_refused(way):
    with pytest.raises(autotp.AutotpError, match="recompute=.*auto, none, selective, full"):
        autotp.plan(Model(), autotp.Topology.flat(2), (torch.zeros(4, 8, dtype=torch.long),), recompute=way)


@pytest.mark.exact
@pytest.mark.parametrize("way", thinned(["full", "selective"], whole=True))
@pytest.mark.parametrize("name", thinned(["unet", "gpt", "llama"], first=1, whole=True))
def test_predictions_are_within_a_tenth_of_what_a_step_allocates(name, way):
    model, args = trained(name)
    topology = autotp.Topology.load("dgx-h100").resized(4)
    for strategy, mesh in (("data", (4,)), ("zero3", (2, 2))):
        plan = autotp.plan(model, topology, args, strategy=strategy, mesh=mesh, schedule="none", recompute=way)
        assert plan.predicted.memory_bytes == pytest.approx(allocated(model, args, plan), rel=0.1), strategy


@pytest.mark.exact
def test_auto_recomputes_where_memory_is_short():
    model, args = trained("gpt")
    topology = autotp.Topology.load("dgx-h100").resized(4)
    ample = autotp.plan(model, topology, args, strategy="data", mesh=(4,))
    assert not ample.recomputed
    bound = 0.85 * ample.predicted.memory_bytes
    tight = autotp.plan(model, topology, args, strategy="data", mesh=(4,), memory=bound)
    assert tight.recomputed and tight.predicted.memory_bytes <= bound
    assert tight.predicted.step_seconds > ample.predicted.step_seconds
    with pytest.raises(autotp.MemoryBoundError):
        autotp.plan(model, topology, args, strategy="data", mesh=(4,), memory=bound, recompute="none")


def test_a_plan_remembers_what_it_recomputes(tmp_path):
    args = (torch.zeros(4, 8, dtype=torch.long),)
    topology = autotp.Topology.flat(2)
    kept, full = (autotp.plan(Model(), topology, args, mesh=(2,), recompute=way) for way in ("none", "full"))
    full.save(tmp_path / "plan.json")
    assert autotp.Plan.load(tmp_path / "plan.json").recomputed == full.recomputed != []
    assert kept.hash != full.hash


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_masks_are_repeated(schedule):
    """Other masks in the recomputation would give a gradient that contradicts finite differences of the loss."""
    torch.manual_seed(0)
    model, args = Model(drop=0.5).double(), (torch.randint(0, 32, (4, 8)),)
    gradients = []
    for way in ("full", "none"):
        options = {"strategy": "data", "mesh": (2,), "schedule": schedule, "recompute": way}
        plan = autotp.plan(model, autotp.Topology.flat(2), args, **options)
        torch.manual_seed(1)
        model.zero_grad()
        autotp.simulate(model, plan, args, schedule=schedule)(*args).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert any("dropout" in name or "native_dropout" in name for name in (op.target for op in plan.operators))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_recomputed_products_in_panels_are_exact():
    torch.manual_seed(0)
    model, ids = Model().double(), torch.randint(0, 32, (8, 8))
    topology = autotp.Topology.load("dgx-h100").resized(4)
    plan = autotp.plan(model, topology, (ids,), strategy="zero3", mesh=(4,), panels=2, recompute="full")
    assert any(each.recomputed and each.panels > 1 for each in plan.operators)
    expected = torch.autograd.grad(model(ids), list(model.parameters()))
    simulated = autotp.simulate(model, plan, (ids,))
    simulated(ids).backward()
    for parameter, gradient in zip(simulated.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)
