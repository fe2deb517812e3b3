"""Two nodes of two ranks: gradients are reduced within nodes first, then between them, by groups of their own."""

import torch
from overlapping import tokens

import autotp
from costmodel import Level, Topology
from passes.overlap.launch import launch


def main():
    model, args = tokens()
    levels = Level("node", 2, 1e9, 1e-9), Level("network", 2, 1e6, 1e-9)
    topology = Topology("two levels", Topology.load("cpu").device, levels)
    parallel = autotp.parallelize(model, topology, args, strategy="data", mesh=(2, 2), chunks={})
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (parallel, model)]
    for _ in range(3):
        losses = []
        for module, optimizer in zip((parallel, model), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(module(*args))
            losses[-1].backward()
            optimizer.step()
        assert torch.allclose(*losses, rtol=1e-9, atol=0)
    for name, parameter in parallel.named_parameters():
        assert torch.allclose(parameter.full_tensor(), dict(model.named_parameters())[name], rtol=1e-9, atol=1e-12), name
    (made,) = parallel._programs.first.schedules.known.values()
    launched = [(n.args[1], n.args[3]) for n in made.backward.module.graph.nodes if n.target is launch]
    assert {("reduce_scatter", 1), ("all_gather", 1)} <= set(launched), launched
    assert all(kind != "all_reduce" or tuple(axes) == (0,) for kind, axes in launched), launched
