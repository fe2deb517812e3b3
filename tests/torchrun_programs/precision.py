"""Mixed precision under torchrun: FSDP2 compared with a distributed module, and a GradScaler on its DTensors."""

import copy
import math

import torch
import torch.distributed as dist
from fsdp import sharded
from models import llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autotp
from costmodel import Device
from passes.capture import PRECISIONS

DEVICE = Device("halves", {"float32": 1e7, "bfloat16": 2e7, "float16": 2e7}, 1e12, 1e7, 0.0)


def gradients(model):
    found = {n: p.grad for n, p in model.named_parameters()}
    return {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).double() for n, g in found.items()}


def error(found, exact):
    least = 1e-3 * max(g.norm().item() for g in exact.values())
    return max(((found[n] - g).norm() / g.norm()).item() for n, g in exact.items() if g.norm() > least)


def one_rank_overflows():
    """Replicated parameters come first, and a gradient overflows in a shard that rank 0 does not hold."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(8, 8)
    topology = autotp.Topology.load("dgx-a100").resized(dist.get_world_size())
    parallel = autotp.parallelize(model, topology, (x,), strategy="megatron-1d")
    parameters = [*parallel.parameters()]
    assert parameters[0].placements[0].is_replicate() and parameters[-2].placements[0].is_shard()
    for fused in (False, True):
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for scale in (1.0, 1.0):  # the second step is not skipped
            before = [p.full_tensor().clone() for p in parameters]
            scaler.scale(parallel(x).square().mean()).backward()
            if dist.get_rank() and scaler.get_scale() > scale:
                parameters[-2].grad.to_local().view(-1)[0] = math.inf
            overflown = scaler.get_scale() > scale
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == scale
            assert overflown == all(torch.equal(a, p.full_tensor()) for a, p in zip(before, parameters, strict=True))


def main():
    count = dist.get_world_size()
    topology = autotp.Topology.flat(count, bandwidth=1e9, latency=1e-9, device=DEVICE)
    model, args, kwargs = llama()
    double = copy.deepcopy(model).double()
    double(*args, **kwargs).loss.backward()
    exact = gradients(double)
    theirs = sharded(copy.deepcopy(model), init_device_mesh("cpu", (count,)), PRECISIONS["bf16-mixed"])
    theirs(*args, **kwargs).loss.backward()
    for strategy in ("zero3", "megatron-1d"):
        for schedule in ("none", "overlap"):
            options = {"strategy": strategy, "schedule": schedule, "mesh": (count,), "precision": "bf16-mixed"}
            mine = autotp.parallelize(copy.deepcopy(model), topology, args, kwargs, **options)
            mine(*args, **kwargs).loss.backward()
            assert {p.dtype for p in mine.parameters()} == {p.grad.dtype for p in mine.parameters()} == {torch.float32}
            assert error(gradients(mine), exact) <= 1.5 * error(gradients(theirs), exact), (strategy, schedule)
    mine = autotp.parallelize(copy.deepcopy(model), topology, args, kwargs, strategy="zero3", precision="fp16-mixed")
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        before = [p.full_tensor().clone() for p in mine.parameters()]
        loss = mine(*args, **kwargs).loss
        assert math.isfinite(loss.item())
        scaler.scale(loss * (1e12 if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = all(torch.equal(a, p.full_tensor()) for a, p in zip(before, mine.parameters(), strict=True))
        assert same == (step == 1), step
    assert scaler.get_scale() == 2.0**9
