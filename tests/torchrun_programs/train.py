"""Three AdamW steps of a distributed model, compared with the plain model, in float64."""

import argparse

import torch
import torch.distributed as dist
from float64 import double, float64_mode
from models import MODELS
from torch.utils._pytree import tree_leaves, tree_map_only

import autotp


def loss_of(output):
    first = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return first if first.dim() == 0 else (first**2).mean()


def close(got, want, scale, name):
    error = (got - want).abs().max().item()
    assert error <= 1e-9 * scale, f"{name}: off by {error:.3g} at scale {scale:.3g}"


def main(name, strategy, mesh, panels, backend, device, recompute):
    dist.init_process_group(backend)
    with float64_mode():
        plain, args, kwargs = double(MODELS[name])
        model, _, _ = double(MODELS[name])
        plain, model = plain.to(device), model.to(device)
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        options = {"strategy": strategy, "mesh": mesh, "panels": panels, "recompute": recompute}
        parallel = autotp.parallelize(model, None, args, kwargs, **options)
        assert bool(parallel.plan.recomputed) == (recompute != "none")
        assert isinstance(parallel, torch.fx.GraphModule)
        assert panels is None or sum(op.panels == panels for op in parallel.plan.operators) >= 2
        assert dist.get_world_size() == 1 or any(op.scheme != "replicated" for op in parallel.plan.operators)
        assert {p.to_local().device.type for p in parallel.parameters()} == {device}
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (plain, parallel)]
        for step in range(3):
            outputs = []
            for m, optimizer in zip((plain, parallel), optimizers, strict=True):
                outputs.append(m(*args, **kwargs))
                optimizer.zero_grad()
                loss_of(outputs[-1]).backward()
            assert type(outputs[0]) is type(outputs[1])
            expected = dict(plain.named_parameters())
            largest = max(p.grad.abs().max().item() for p in expected.values() if p.grad is not None)
            for n, p in parallel.named_parameters():
                if expected[n].grad is not None:
                    scale = max(expected[n].grad.abs().max().item(), 1e-3 * largest)
                    close(p.grad.full_tensor(), expected[n].grad, scale, f"gradient of {n} in step {step}")
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (plain, parallel)]
            close(norms[1].full_tensor(), norms[0], norms[0].item(), "gradient norm")
            for optimizer in optimizers:
                optimizer.step()
            close(loss_of(outputs[1]).detach(), loss_of(outputs[0]).detach(), 1.0, f"loss in step {step}")
        for n, p in parallel.named_parameters():
            close(p.full_tensor(), expected[n], max(expected[n].abs().max().item(), 1e-2), f"parameter {n}")
        assert {*dict(parallel.named_parameters())} == {*expected}
    if dist.get_rank() == 0:
        print("exact")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("strategy")
    parser.add_argument("mesh", type=lambda text: tuple(int(n) for n in text.split("x")))
    parser.add_argument("panels", type=int, nargs="?")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--recompute", default="none")
    main(**vars(parser.parse_args()))
