"""Models that change parameters and inputs in place, and three steps of one compared with its distributed form."""

import copy

import torch
from comparing import close
from torch import nn
from torch.nn import functional as F

__all__ = ["WRITING", "Recent", "three_steps", "whole"]


class FirstActivation(nn.Module):
    """An in-place activation that comes first changes the input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))

    def forward(self, x):
        return (self.layers(x) ** 2).mean()


class Labels(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, ids, labels):
        labels[labels == 3] = -100
        return F.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), labels.flatten())


class LargestNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8, max_norm=1.0), nn.Linear(8, 4)

    def forward(self, ids):
        return (self.head(self.embedding(ids)) ** 2).mean()


class Clamped(nn.Module):
    """The in-place operator's result is still the parameter."""

    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(8, 16)), nn.Linear(16, 8)

    def forward(self, x):
        with torch.no_grad():
            weight = self.weight.clamp_(-0.5, 0.5)
        return (self.head(x @ weight) ** 2).mean()


class Rows(nn.Module):
    """A view taken before a write shows the new values, and still leads to the parameter."""

    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(8, 16)), nn.Linear(16, 8)

    def forward(self, x):
        turned = self.weight.t()
        with torch.no_grad():
            self.weight[0] = 0
            self.weight.mul_(0.9)
        return (self.head(x @ turned.t()) ** 2).mean() + self.weight[0].sum()


class Codebook(nn.Module):
    """A frozen parameter that follows a moving mean, and is read before and after the update."""

    def __init__(self):
        super().__init__()
        self.codes, self.head = nn.Parameter(torch.randn(8, 16), requires_grad=False), nn.Linear(16, 8)

    def forward(self, x):
        found = x @ self.codes
        self.codes.mul_(0.9)
        with torch.no_grad():
            self.codes.add_(x.t() @ found, alpha=0.01)
        return (self.head(found) ** 2).mean() + (self.codes * self.head.weight).sum()


class _Recent(nn.Module):
    """Plain attributes and buffers that each call replaces, writes into, or swaps; returns a value from before the call."""

    def __init__(self):
        super().__init__()
        self.calls, self.mean, self.kept = (
            torch.zeros((), dtype=torch.int64),
            torch.zeros(8).double(),
            torch.zeros(3, 8).double(),
        )
        self.register_buffer("one", torch.zeros(8).double())
        self.register_buffer("other", torch.ones(8).double(), persistent=False)

    def forward(self, x):
        self.calls += 1
        before, now = self.mean, x.detach().mean(0)
        self.mean = 0.5 * before + now / self.calls
        self.kept.add_(1)
        self.kept[1:] = self.kept[:-1].clone()
        self.kept[0] = now
        self.one, self.other = self.other, self.one + now
        return x * self.one + self.kept.sum(0), before


class Recent(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.recent, self.last = nn.Linear(8, 8), _Recent(), torch.zeros(8).double()

    def forward(self, x):
        made, mean = self.recent(self.head(x))
        before, self.last = self.last, made.detach()[0]
        return (made**2).mean() + (made * mean).mean() + (before * mean).sum()


def _rows():
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).double(),)


def _tokens(count):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(10, (4, 6), generator=generator) for _ in range(count))


#: Model -> example inputs.
WRITING = {
    FirstActivation: _rows(),
    Labels: _tokens(2),
    LargestNorm: _tokens(1),
    Clamped: _rows(),
    Rows: _rows(),
    Codebook: _rows(),
    Recent: _rows(),
}


def three_steps(model, args, distribute):
    """Checks that losses, gradients, parameters and inputs equal the model's own in three optimizer steps.

    Args:
        model: is not changed.
        args: of every call, which gets copies of them.
        distribute: returns the distributed form of a model.
    """
    plain = copy.deepcopy(model)
    module = distribute(copy.deepcopy(model))
    both = [(plain, torch.optim.SGD(plain.parameters(), lr=0.1)), (module, torch.optim.SGD(module.parameters(), lr=0.1))]
    for _ in range(3):
        seen = []
        for each, optimizer in both:
            given = [tensor.clone() for tensor in args]
            optimizer.zero_grad()
            loss = each(*given)
            loss.backward()
            gradients = [p.grad for p in each.parameters() if p.grad is not None]
            seen.append([whole(t).clone() for t in (loss, *given, *gradients)])
            optimizer.step()
            seen[-1] += [whole(p).clone() for p in each.parameters()]
        for number, (want, got) in enumerate(zip(*seen, strict=True)):
            close(got, want, want.detach().double().abs().max().item(), f"{type(model).__name__}, tensor {number}")


def whole(tensor):
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
