"""A small model that is difficult to overlap, its traced and scheduled graphs, and their comparison."""

import dataclasses
import random

import torch
from float64 import float64_mode
from torch import nn

import autotp
from autotp.runtime.rewrite import rewrite
from passes.layouts.layout import take
from passes.overlap import halves
from passes.overlap.launch import launch
from passes.overlap.schedule import Task


class Block(nn.Module):
    """Normalisation, a perceptron and a residual connection: everything that is difficult with chunks."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Tokens(nn.Module):
    """Blocks, and a loss that ignores some labels: its mean divides by the number of all other labels, on all devices."""

    def __init__(self, width=8, words=16):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def tokens():
    torch.manual_seed(0)
    with float64_mode():
        model = Tokens().double()
    ids = torch.randint(0, 16, (8, 4))
    labels = ids.clone()
    labels[3, :] = -100
    labels[0, 1] = -100
    return model, (ids, labels)


def planned(model, args, strategy="megatron-1d", mesh=(2,), **more):
    """Plans for a network on which communication takes time; no panels, unless the planner is given other options."""
    topology = autotp.Topology.flat(torch.tensor(mesh).prod().item(), bandwidth="1 GB/s", latency="10 us")
    return autotp.plan(model, topology, args, strategy=strategy, mesh=mesh, panels=1, **more)


def gradients(model, loss):
    """Clears the gradients of all parameters, computes those of a loss, and returns them by name."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def same(model, ours, args):
    """Checks that outputs and gradients equal the model's."""
    want, got = model(*args), ours(*args)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    wanted = gradients(model, want)
    for name, gradient in gradients(model, got).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12, msg=name)


def random_durations(seed):
    """Random durations of nodes: a schedule must be correct for any durations."""
    chance = random.Random(seed)
    known = {}

    def durations(node):
        if node not in known:
            known[node] = Task(chance.random(), f"lane {chance.randrange(3)}", chance.random())
        return dataclasses.replace(known[node], lane=known[node].lane if node.target is launch else "compute")

    return durations


def prepared(strategy="megatron-1d", mesh=(2,), chunks=None, enough=None, raw=False):
    """(Function of a device's place that returns the scheduled or, if ``raw``, traced graphs of `tokens`; their plan.)"""
    model, args = tokens()
    plan = dataclasses.replace(planned(model, args, strategy, mesh), chunks=chunks or {})
    ours = autotp.simulate(model, plan, args)
    made = rewrite(model, plan, args)
    state = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    whole = {name: state[fqn] for name, fqn in made.captured.parameters.items()}
    whole |= dict(zip(made.captured.inputs, args, strict=True))

    def graphs(at):
        parts = {n: take(t.detach(), made.sharding.resting.get(n, made.whole), mesh, at) for n, t in whole.items()}
        found = halves(made.graph_module, mesh, at, parts, frozenset(made.captured.parameters)).refined()
        return found if raw else found.overlapped(found.buckets(enough))

    return graphs, plan


def traced(model, args, plan):
    """The traced graph of a plan's first device, split into forward and backward."""
    made = rewrite(model, plan, args)
    state, mesh, first = dict(model.named_parameters()), plan.mesh_shape, (0,) * len(plan.mesh_shape)
    whole = {name: state[fqn].detach() for name, fqn in made.captured.parameters.items()}
    whole |= dict(zip(made.captured.inputs, args, strict=True))
    parts = {n: take(value, made.sharding.resting.get(n, made.whole), mesh, first) for n, value in whole.items()}
    return halves(made.graph_module, mesh, first, parts, frozenset(made.captured.parameters)).refined()


def traced_tokens(strategy, chunks):
    """The traced graph of `tokens` on the first of two devices, split into forward and backward."""
    model, args = tokens()
    return traced(model, args, dataclasses.replace(planned(model, args, strategy), chunks=chunks))
