"""Times steps and measures their memory, under torchrun: -m benchmarks.frontier_steps MODEL PLANS_DIR OUT.json

The ways of running one model on one global batch take turns: by each plan, unchanged (data-parallel on several processes),
with `torch.utils.checkpoint` around every block, and partitioned by AOTAutograd under several activation memory budgets.
The memory of a step is the peak of live tensors in bytes, without workspaces.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import min_cut_rematerialization_partition, nop
from torch import Tensor, nn
from torch._functorch import config
from torch._functorch.aot_autograd import aot_module
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.parallel import DistributedDataParallel

import autotp
from benchmarks.allocated import Allocated
from benchmarks.models import trained
from benchmarks.peer_steps import blocks
from benchmarks.steps import arguments, finish, medians, step_of

__all__ = ["BUDGETS", "CHECKPOINT", "PLAIN", "budget"]

PLAIN, CHECKPOINT = "as it is", "checkpoint"
BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)


def budget(share: float) -> str:
    """The name of the way with this activation memory budget."""
    return f"budget {share:g}"


def main() -> None:
    parser = arguments(__doc__)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, args = trained(chosen.model)
    ways: dict[str, tuple[nn.Module, Sequence[Tensor]]] = {}
    for file in sorted(chosen.plans.glob("*.json")):
        ways[file.stem] = autotp.parallelize(model, args=args, plan=autotp.Plan.load(file)), args
    part = [value.chunk(dist.get_world_size())[dist.get_rank()] for value in args]
    ways[PLAIN] = _parallel(copy.deepcopy(model)), part
    ways[CHECKPOINT] = _parallel(_checkpointed(copy.deepcopy(model))), part
    for share in BUDGETS:
        with config.patch(activation_memory_budget=share):
            cut = aot_module(copy.deepcopy(model), nop, nop, partition_fn=min_cut_rematerialization_partition)
            cut(*part).backward()  # traces and partitions the graph while the budget is set
            ways[budget(share)] = _parallel(cut), part
    steps: dict[str, Callable[[], Any]] = {name: partial(step_of, each, given) for name, (each, given) in ways.items()}
    peaks = {name: peak(steps[name], each, given) for name, (each, given) in ways.items()}
    times = medians(steps, chosen.rounds, first=False)
    finish({name: {"bytes": peaks[name], "seconds": times[name]} for name in ways}, chosen.out)


def peak(step: Callable[[], Any], model: nn.Module, args: Sequence[Tensor]) -> float:
    """The peak of live tensors in the second step, in bytes: the maximum over all processes."""
    step()
    watch = Allocated()
    for tensor in (*model.parameters(), *model.buffers(), *args):
        watch.add(tensor)
    with watch:
        step()
    found = torch.tensor(float(watch.peak), dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def _parallel(model: nn.Module) -> nn.Module:
    return model if dist.get_world_size() == 1 else DistributedDataParallel(model)


def _checkpointed(model: nn.Module) -> nn.Module:
    wrapped = set(blocks(model))
    apply_activation_checkpointing(model, check_fn=lambda module: module in wrapped)
    return model


if __name__ == "__main__":
    main()
