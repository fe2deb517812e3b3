"""A guess at the machine that this process runs on, from torchrun's environment and the driver's files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from ..errors import TopologyError
from ..text.numbers import MOST_DEVICES, whole_of
from .device import Device
from .links import Level

__all__ = ["DRIVER", "Preset", "local_topology"]

#: Where the GPU driver lists its devices.
DRIVER = Path("/proc/driver/nvidia/gpus")
_GIB = 2**30
# First match wins, so the longer names of one family come before the shorter.
_PRESET_OF_GPU = (
    ("GB200", "gb200-nvl72"),
    ("B200", "dgx-b200"),
    ("H200", "h200"),
    ("H100-80GB-HBM3", "dgx-h100"),
    ("A100-SXM", "dgx-a100"),
    ("V100-SXM", "dgx-v100"),
)


class Preset(Protocol):
    """The properties of a preset that are used here, such as those of a `costmodel.Topology`."""

    @property
    def device(self) -> Device:
        """The device of every rank."""

    @property
    def levels(self) -> tuple[Level, ...]:
        """Innermost first."""

    @property
    def library(self) -> str:
        """The library whose algorithms the collectives use."""


def local_topology(
    environ: Mapping[str, str], load: Callable[[str], Preset], driver: Path = DRIVER
) -> tuple[Device, tuple[Level, ...], str]:
    """Device, levels and library of the job that this process belongs to; see `costmodel.Topology.local`.

    Inside a node there is one level. With one CUDA GPU per local rank, it is that of the GPU's preset
    (``pcie-a100``, the slowest one, if the model is unknown); otherwise that of the preset ``cpu``, and
    each rank has an equal share of the node's cores (at most ``OMP_NUM_THREADS`` of them) and memory. With
    several nodes, the second level is that of the GPU's preset, or of ``ethernet-10g`` between CPU nodes.

    All ranks must plan for the same machine: if the nodes differ, pass rank 0's topology to all.

    Args:
        environ: environment variables: ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE`` (torchrun sets both; they default to 1
            and ``WORLD_SIZE``), ``OMP_NUM_THREADS`` and ``CUDA_VISIBLE_DEVICES``.
        load: returns the preset with a name.
        driver: where the GPU driver lists its devices.

    Returns:
        The device, one or two levels that hold ``WORLD_SIZE`` devices, and the library.

    Raises:
        TopologyError: a variable is not a positive integer, or the ranks do not fill whole nodes.
    """
    world = _count(environ, "WORLD_SIZE", 1)
    ranks = _count(environ, "LOCAL_WORLD_SIZE", world)
    if world % ranks:
        raise TopologyError(
            f"environment: WORLD_SIZE={world} is not a multiple of LOCAL_WORLD_SIZE={ranks}; "
            "start the same number of ranks on every node"
        )
    gpus = _gpus(environ, driver)
    if len(gpus) >= ranks:
        model = load(next((preset for key, preset in _PRESET_OF_GPU if key in gpus[0]), "pcie-a100"))
        device, between = model.device, model.levels[1]
    else:
        model = load("cpu")
        device, between = _share(model.device, environ, ranks), load("ethernet-10g").levels[0]
    levels: tuple[Level, ...] = (dataclasses.replace(model.levels[0], size=ranks),)
    if world > ranks:
        levels += (dataclasses.replace(between, size=world // ranks),)
    return device, levels, model.library


def _count(environ: Mapping[str, str], key: str, default: int) -> int:
    return whole_of(environ.get(key, str(default)), f"environment: {key}", most=MOST_DEVICES, error=TopologyError)


def _gpus(environ: Mapping[str, str], driver: Path) -> list[str]:
    """The models of the visible GPUs."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = []
    for entry in sorted(driver.glob("*/information")):
        lines = entry.read_text(errors="replace").splitlines()
        # Driver files say "NVIDIA A100-SXM4-80GB" and "Tesla V100-SXM2-32GB", with or without dashes.
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("Model")), "")
        names.append(model.replace(" ", "-"))
    if visible is None:
        return names
    shown = [item for item in visible.split(",") if item.strip() and item.strip() != "-1"]
    return names[: len(shown)]


def _share(core: Device, environ: Mapping[str, str], ranks: int) -> Device:
    """The share of this node that one of ``ranks`` ranks gets, if the preset's device is one core."""
    threads = min((os.cpu_count() or 1) / ranks, _count(environ, "OMP_NUM_THREADS", os.cpu_count() or 1))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return dataclasses.replace(
        core,
        flops={dtype: rate * threads for dtype, rate in core.flops.items()},
        # In whole GiB: nodes that differ only in a few pages reserved by the firmware must get the same plan.
        memory=float(max(total // _GIB, 1) * _GIB / ranks),
    )
