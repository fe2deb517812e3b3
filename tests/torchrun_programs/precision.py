"""Mixed precision under torchrun: FSDP2 beside a distributed module, and a GradScaler on its DTensors."""

import copy
import math

import torch
import torch.distributed as dist
from fsdp import sharded
from models import llama
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
