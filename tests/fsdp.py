"""FSDP2 on one process, for precision tests: the numbers that a policy must give."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

__all__ = ["one_process", "sharded"]


@contextmanager
def one_process() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield init_device_mesh("cpu", (1,))
        finally:
            dist.destroy_process_group()


def sharded(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    """Shards a model by FSDP2; batch norms are wrapped separately, as torch has no kernel for them otherwise."""
    alone = dataclasses.replace(policy, param_dtype=None, output_dtype=None)
    for module in list(model.modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            fully_shard(module, mesh=mesh, mp_policy=alone)
    return fully_shard(model, mesh=mesh, mp_policy=policy)
