"""How long planning takes with the whole space, and with the space of the 1D and 2D schemes alone."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import replace

from autotp.planner import plan_captured
from autotp.plans.families import Family, family
from autotp.plans.options import Options
from benchmarks.models import gpt
from benchmarks.tables import command, machine, table
from costmodel import Topology
from passes.capture import capture

RUNS = 5


def _words(axes: int) -> list[str]:
    return ["".join(word) for word in itertools.product("bw", repeat=axes) if word.count("w") < 3]


#: The 1D and 2D schemes, mixed per operator: an axis splits the batch, or columns and rows of weights and, between, tokens.
MIXED = Family("1D and 2D, mixed", "", roles=_words, between=frozenset({"token"}))
AUTO = family("auto")
SEPARATE = [family(name) for name in ("data", "zero3", "megatron-1d", "megatron-sp", "tensor3d", "atp")]

SPACES = {
    "whole space": [AUTO],
    "1D and 2D schemes, mixed": [MIXED],
    "1D and 2D families, one by one": SEPARATE,
    "meshes of one and two axes": [replace(AUTO, axes=2)],
}


def make() -> str:
    """Plans a GPT with each space and compares the planning times."""
    model, inputs = gpt(8, 4096, 32, 32000, 64, 2048)
    captured = capture(model, inputs)
    rows = []
    for devices in (16, 64):
        topology = Topology.load("dgx-a100").resized(devices)
        spent: dict[str, list[float]] = {name: [] for name in SPACES}
        step: dict[str, float] = {}
        for _ in range(RUNS):
            for name, families in SPACES.items():
                begun = time.perf_counter()
                plans = [plan_captured(captured, topology, Options(chosen, schedule="none")) for chosen in families]
                spent[name].append(time.perf_counter() - begun)
                step[name] = min(plan.predicted.step_seconds for plan in plans)
        medians = {name: statistics.median(seconds) for name, seconds in spent.items()}
        whole = medians["whole space"]
        for name, seconds in medians.items():
            rows.append([devices, name, f"{seconds:.2f}", f"{whole / seconds:.2f}", f"{step[name] * 1e3:.2f}"])
    return f"""# Planning time

Made by `python -m benchmarks.planning_time --write` on {machine()}.

A GPT of 8 layers of hidden size 4096, batch 64 × 2048, on DGX A100 machines; capturing the graph (the same for all)
is not counted. Medians of {RUNS} runs, the spaces in turn. *Mixed*: every mesh axis either splits the batch or serves
columns and rows of weights, and each operator picks for itself; the 2.5D and 3D schemes, and SUMMA, are outside.
*One by one*: {", ".join(chosen.name for chosen in SEPARATE)}, each planned by itself.

{table(["devices", "space", "planning, s", "whole space takes × as long", "predicted step, ms"], rows)}"""


if __name__ == "__main__":
    command("planning_time", "planning-time.md", make)
