"""Parameters and inputs that a model changes in place are changed as by the model; see also the program of that name."""

from __future__ import annotations

import copy

import pytest
import torch
from thinned import thinned
from torch import nn
from writing import WRITING, three_steps

import autotp
from passes.capture import CaptureError

WAYS = [("auto", (2,)), ("zero3", (4,)), ("megatron-1d", (4,)), ("tensor3d", (2, 2)), ("3d", (2, 2, 2))]


@pytest.mark.parametrize(
    ("kind", "strategy", "mesh", "schedule"),
    thinned([(k, s, m, c) for k in WRITING for s, m in WAYS for c in ("overlap", "none")], first=14),
)
def test_three_steps(kind, strategy, mesh, schedule):
    torch.manual_seed(1)
    model, args, devices = kind().double(), WRITING[kind], torch.Size(mesh).numel()
    asked = {"strategy": strategy, "mesh": mesh, "schedule": schedule}
    plan = autotp.plan(model, autotp.Topology.flat(devices), args, **asked)
    three_steps(model, args, lambda model: autotp.simulate(model, plan, args))
    assert autotp.verify(model, plan, args)


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask, self.head = nn.Parameter(torch.zeros(8, 8), requires_grad=False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask.masked_fill_(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf).mul_(2)
        return ((self.head(x) + self.mask).softmax(-1) ** 2).sum()


def test_infinite_values_stay_infinite():
    torch.manual_seed(0)
    model, x = _Masked(), torch.randn(8, 8)
    expected = [copy.deepcopy(model)(x)]
    simulated = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), (x,)), (x,))
    expected.append(expected[0])
    for want in expected:
        assert torch.allclose(simulated(x), want)
    assert model.mask.isinf().sum() == 28


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        x.add_(y * 0 + 1)
        return (x * y * z * self.weight).sum()


def test_inputs_whose_change_would_be_lost_are_refused():
    x, y, z = torch.ones(4, 8), torch.ones(4, 8), torch.ones(8)
    model = _Scaled()
    plan = autotp.plan(model, autotp.Topology.flat(2), (x, y, z))
    simulated = autotp.simulate(model, plan, (x, y, z))
    with pytest.raises(autotp.AutotpError, match="x: the model changes this input in place, and y lies in the same memory"):
        simulated(x, x, z)
    with pytest.raises(autotp.AutotpError, match="x: the model changes this input in place, and y needs a gradient"):
        simulated(x, y.clone().requires_grad_(), z)
    simulated(x.clone(), y, torch.ones(8, requires_grad=True)).backward()
    with pytest.raises(autotp.AutotpError, match="x: the model changes this input in place, and x needs a gradient"):
        simulated(x.clone().requires_grad_() * 1, y, z)
    assert torch.equal(x, torch.ones(4, 8))
    simulated(x, y, z)
    assert torch.equal(x, torch.full((4, 8), 2.0))


class _Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(self.weight)


def test_writes_that_autograd_follows_are_refused():
    with pytest.raises(CaptureError, match="changes input 'x' in place, and a gradient flows there"):
        autotp.plan(_Weighed(), autotp.Topology.flat(2), (torch.ones(4, 8),))


def test_a_change_of_a_copy_in_another_dtype_is_refused():
    kind = next(kind for kind in WRITING if kind.__name__ == "Clamped")
    with pytest.raises(CaptureError, match="changes weight in place, and the precision gives it a copy in another dtype"):
        autotp.plan(kind(), autotp.Topology.flat(2), (torch.ones(8, 8),), precision="bf16-mixed")
