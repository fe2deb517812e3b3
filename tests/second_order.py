"""A model for gradients of gradients, and losses that contain gradients."""

import torch
from torch import nn


class Critic(nn.Module):
    """Convolutions, a normalisation, attention and a linear output."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.heads = nn.Linear(8, 24)
        self.end = nn.Linear(8, 1)

    def forward(self, x):
        h = torch.tanh(self.norm(self.conv(x))).flatten(2).mT
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.heads(h).chunk(3, -1))
        h = (q @ k.mT).softmax(-1) @ v
        return self.end(h.transpose(1, 2).flatten(2).mean(1))


def critic():
    torch.manual_seed(0)
    return Critic().double(), torch.randn(8, 2, 4, 4, dtype=torch.float64)


def penalised(model, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x).mean() + (slope.flatten(1).norm(2, -1) - 1).square().mean()


def slopes(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def agree(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
