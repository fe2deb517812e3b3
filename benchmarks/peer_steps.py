"""Times autotp and its alternatives under torchrun: -m benchmarks.peer_steps MODEL PLANS_DIR OUT.json

A step is a forward and a backward pass over the same global batch; the ways take turns. Before the timing, all ways must
compute the same loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autotp
from benchmarks.models import Decoder, trained
from benchmarks.steps import arguments, finish, medians, step_of

_CLOSE = 1e-4


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--peers", nargs="*", default=["DDP", "FSDP2", "TP"])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, args = trained(chosen.model)
    ways: dict[str, tuple[nn.Module, Sequence[Tensor]]] = {}
    for file in sorted(chosen.plans.glob("*.json")):
        ways[file.stem] = autotp.parallelize(model, args=args, plan=autotp.Plan.load(file), schedule="overlap"), args
    for peer in chosen.peers:
        ways[peer] = PEERS[peer](copy.deepcopy(model), args)
    _compare(ways)
    steps: dict[str, Callable[[], Any]] = {
        name: lambda each=each, given=given: step_of(each, given)  # type: ignore[misc]
        for name, (each, given) in ways.items()
    }
    if dist.get_world_size() == 1:
        steps["eager"] = lambda: step_of(model, args)
    finish(medians(steps, chosen.rounds), chosen.out)


def _compare(ways: dict[str, tuple[nn.Module, Sequence[Tensor]]]) -> None:
    losses = {}
    for name, (each, given) in ways.items():
        loss = each(*given).detach()
        if given[0].shape != next(iter(ways.values()))[1][0].shape:
            dist.all_reduce(loss)
            loss = loss / dist.get_world_size()
        losses[name] = float(loss)
    if max(losses.values()) - min(losses.values()) > _CLOSE * max(losses.values()):
        raise RuntimeError(f"the losses differ: {losses}")


def _part(args: Sequence[Tensor]) -> list[Tensor]:
    """This rank's part of the batch."""
    return [value.chunk(dist.get_world_size())[dist.get_rank()] for value in args]


def _ddp(model: nn.Module, args: Sequence[Tensor]) -> tuple[nn.Module, Sequence[Tensor]]:
    """Data parallelism: gradients are reduced in buckets during the backward pass."""
    return DistributedDataParallel(model), _part(args)


class _GlobalLoss(nn.Module):
    """A data-parallel model that returns the mean loss of all ranks on every rank, with the gradient of the own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        loss: Tensor = self.model(*args)
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        return loss + (whole / dist.get_world_size() - loss.detach())


def _ddp_and_loss(model: nn.Module, args: Sequence[Tensor]) -> tuple[nn.Module, Sequence[Tensor]]:
    """Data parallelism that returns the loss of the global batch on every rank, as `autotp.parallelize` does."""
    parallel, part = _ddp(model, args)
    return _GlobalLoss(parallel), part


def _fsdp(model: nn.Module, args: Sequence[Tensor]) -> tuple[nn.Module, Sequence[Tensor]]:
    """Fully sharded data parallelism, block by block."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, _part(args)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that a user would wrap: the layers of a transformer, or the blocks of a U-Net."""
    if isinstance(model, Decoder):
        return list(model.layers)
    return [child for child in model.children() if any(True for _ in child.children())]


def _tensor_parallel(model: nn.Module, args: Sequence[Tensor]) -> tuple[nn.Module, Sequence[Tensor]]:
    """Manual Megatron-style parallelism: columns, then rows, of attention and of the MLP; the head is replicated."""
    assert isinstance(model, Decoder), "the recipe is for benchmarks.models.Decoder"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    recipe = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()) | dict.fromkeys(("o", "down"), RowwiseParallel())
    for layer in model.layers:
        parallelize_module(layer, mesh, recipe)
        layer.heads //= dist.get_world_size()  # type: ignore[operator]
    return model, args


PEERS: dict[str, Callable[[nn.Module, Sequence[Tensor]], tuple[nn.Module, Sequence[Tensor]]]] = {
    "DDP": _ddp,
    "DDP, global loss": _ddp_and_loss,
    "FSDP2": _fsdp,
    "TP": _tensor_parallel,
}


if __name__ == "__main__":
    main()
