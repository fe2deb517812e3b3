"""A model that checkpoints its blocks, distributed: its gradients are the model's, and its masks are repeated."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autotp


class Model(nn.Module):
    def __init__(self, reentrant, drop):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(drop)
        self.blocks = nn.ModuleList(nn.ModuleList((nn.Linear(16, 32), nn.Linear(32, 16))) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for up, down in self.blocks:

            def block(x, up=up, down=down):
                return down(self.drop(F.gelu(up(x))).sin())

            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x).square().mean()


def gradients(model, x, recompute):
    torch.manual_seed(1)
    parallel = autotp.parallelize(model, None, (x,), strategy="megatron-1d", recompute=recompute)
    assert bool(parallel.plan.recomputed) == (recompute == "auto")
    parallel(x).backward()
    return [parameter.grad.full_tensor() for parameter in parallel.parameters()]


def main():
    for reentrant in (False, True):
        torch.manual_seed(0)
        model, x = Model(reentrant, 0.0).double(), torch.randn(8, 16, dtype=torch.float64)
        model(x).backward()
        for got, parameter in zip(gradients(model, x, "auto"), model.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad, rtol=1e-9, atol=1e-14)
        dropping = Model(reentrant, 0.5).double()
        for got, want in zip(gradients(dropping, x, "auto"), gradients(dropping, x, "none"), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-16)
