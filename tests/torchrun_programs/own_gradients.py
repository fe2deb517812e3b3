"""Gradients of different parameters share no memory: otherwise, changing one in place (clipping, adding) changes others."""

import copy

import torch
import torch.distributed as dist
from torch import nn

import autotp


class Flat(nn.Module):
    """Adds a flat parameter to a weight: their gradients are views of one tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(36))

    def forward(self, x):
        return x @ (self.a + self.b.view(6, 6))


class Equal(nn.Module):
    """Two parameters of one shape, to which autograd gives one gradient tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return x @ (self.a + self.b)


class Returned(nn.Module):
    """A parameter that is also an output: its gradient is the caller's tensor."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return x @ self.a + 1, self.a


def trained(module, x):
    """The gradients after two backward passes and clipping, and the outputs' gradients that were passed."""
    outputs = module(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    given = [torch.ones_like(output) for output in outputs]
    for _ in range(2):
        torch.autograd.backward(outputs, given, retain_graph=True)
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    found = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in module.parameters()]
    return found, given


def main():
    ranks = dist.get_world_size()
    topology, x = autotp.Topology.flat(ranks), torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).double()
    for kind in (Flat, Equal, Returned):
        torch.manual_seed(1)
        model = kind().double()
        expected, _ = trained(copy.deepcopy(model), x)
        for strategy in ("data", "zero3"):
            plan = autotp.plan(model, topology, (x,), strategy=strategy, mesh=(ranks,))
            for schedule in ("overlap", "none"):
                parallel = autotp.parallelize(model, None, (x,), plan=plan, schedule=schedule)
                assert (parallel._programs.first.schedules is None) == (schedule == "none")
                found, given = trained(parallel, x)
                for mine, wanted in zip(found, expected, strict=True):
                    torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12, msg=f"{kind} {strategy} {schedule}")
                assert all(bool((each == 1).all()) for each in given), "the caller's own tensors stay"
    unscheduled = autotp.plan(model, topology, (x,), strategy="data", mesh=(ranks,), schedule="none")
    assert autotp.parallelize(model, None, (x,), plan=unscheduled)._programs.first.schedules is None, "as the plan was made"
