"""Measures contention alone, under torchrun: -m benchmarks.contention OUT.json (see `autotp.measure_contention`)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autotp.measure import FULL, Clock
from autotp.measure_contention import time_contention
from benchmarks.steps import finish
from passes.world import ProcessWorld


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = ProcessWorld(init_device_mesh("cpu", (dist.get_world_size(),)), [(0,)])
    found = time_contention(world, 0, FULL, Clock(torch.device("cpu")))
    finish(found, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
