"""Step times beside DDP, FSDP2 and torch's tensor parallel: python -m benchmarks.peers [--write] (a quarter of an hour)

On every interconnect `autotp calibrate` runs first; the planner then chooses for the machine that it measured. Needs root,
for network namespaces with rate-limited links.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotp.planner import plan_captured
from autotp.plans.options import Options
from benchmarks.allocator import allocator, keeping_memory
from benchmarks.cluster import Cluster
from benchmarks.models import trained
from benchmarks.predictions import INTERCONNECTS, emulated
from benchmarks.tables import command, machine, table
from costmodel import Topology
from passes.capture import capture

MODELS = ("decoder", "unet")
PEERS = ("DDP", "FSDP2", "TP")
#: DDP that does what `auto` does for a step's loss, so that the rest of the step is compared.
ALIKE = "DDP, global loss"
#: The columns, in order.
SHOWN = ("DDP", ALIKE, "FSDP2", "TP")
#: `auto` as planned for a run without overlap, and then run with it.
SERIAL = "planned without"
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One model on one interconnect; seconds by way, and the plan that the planner chose."""

    interconnect: str
    model: str
    plan: str
    times: dict[str, float]


def measure(interconnect: str, models: Sequence[str]) -> list[Row]:
    """Every model on one interconnect."""
    topology = emulated(interconnect)
    rows = []
    with tempfile.TemporaryDirectory() as scratch, Cluster(topology) as cluster:
        place = Path(scratch)
        cluster.run(["-m", "autotp", "calibrate", "--output", str(place / "machine.toml")], timeout=600)
        found = Topology.load(place / "machine.toml")
        for model in models:
            module, args = trained(model)
            captured = capture(module, args)
            plans = place / model
            plans.mkdir()
            plan, other = (
                plan_captured(captured, found, Options("auto", panels=1, schedule=schedule))
                for schedule in ("overlap", "none")
            )
            plan.save(plans / "auto.json")
            if other.hash != plan.hash:
                other.save(plans / f"{SERIAL}.json")
            out = place / f"{model}.json"
            words = ["-m", "benchmarks.peer_steps", model, str(plans), str(out), "--rounds", str(ROUNDS), "--peers"]
            cluster.run([*words, *(peer for peer in SHOWN if peer != "TP" or model == "decoder")], timeout=900)
            chunks = "".join(f", {count} chunks of {kind}" for kind, count in plan.chunks.items())
            said = f"{'×'.join(map(str, plan.mesh_shape))}{chunks}"
            rows.append(Row(interconnect, model, said, json.loads(out.read_text())))
            print(rows[-1], file=sys.stderr)
    return rows


def overhead() -> list[list[str]]:
    """Steps of one process over the eager model's, and of two over DTensor's tensor parallel, links unlimited."""
    rows = []
    for model, ranks, chosen, peers in (
        ("decoder", 1, "auto", []),
        ("unet", 1, "auto", []),
        ("decoder", 2, "megatron-1d", ["TP"]),
    ):
        with tempfile.TemporaryDirectory() as scratch:
            place = Path(scratch)
            module, args = trained(model)
            topology = Topology.load("cpu").resized(ranks)
            captured = capture(module, args)
            (place / "plans").mkdir()
            plan = plan_captured(captured, topology, Options(chosen, panels=1, chunks={}, schedule="overlap"))
            plan.save(place / "plans" / f"{chosen}.json")
            out = place / "times.json"
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            words += ["-m", "benchmarks.peer_steps", model, str(place / "plans"), str(out)]
            words += ["--rounds", "5", "--peers", *peers]
            subprocess.run(words, check=True, env=os.environ | keeping_memory() | {"OMP_NUM_THREADS": "1"})
            times = json.loads(out.read_text())
            other = peers[0] if peers else "eager"
            ratio = times[chosen] / times[other]
            rows.append([model, str(ranks), chosen, other, f"{times[chosen]:.3f}", f"{times[other]:.3f}", f"{ratio:.2f}"])
            print(rows[-1], file=sys.stderr)
    return rows


def make() -> str:
    """Ratios over what a user would pick instead."""
    rows = [row for interconnect in INTERCONNECTS for row in measure(interconnect, MODELS)]
    return report(rows, overhead())


def report(rows: Sequence[Row], over: Sequence[Sequence[str]]) -> str:
    """The document."""
    shown = []
    for row in rows:
        times = row.times
        ratios = [f"{times[peer] / times['auto']:.2f}" if peer in times else "" for peer in SHOWN]
        ratios.append(f"{times[SERIAL] / times['auto']:.2f}" if SERIAL in times else "same")
        shown.append([row.interconnect, row.model, row.plan, f"{times['auto']:.3f}", *ratios])
    header = ["interconnect", "model", "mesh that auto chose", "auto, s", "DDP", ALIKE, "FSDP2", "tensor parallel", SERIAL]
    costs = ["model", "processes", "plan", "beside", "its seconds", "the other's", "ratio"]
    pairs = [(row, peer, row.times[peer] / row.times["auto"]) for row in rows for peer in PEERS if peer in row.times]
    slower = [f"{peer} with the {row.model} on {row.interconnect} ({ratio:.2f})" for row, peer, ratio in pairs if ratio < 1]
    others = [row.times[SERIAL] / row.times["auto"] for row in rows if SERIAL in row.times]
    differ = (
        f", in {len(others)} of {len(rows)}; that takes {statistics.median(others):.2f} times as long (median)"
        if others
        else ""
    )
    alike = [row.times[ALIKE] / row.times["auto"] for row in rows]
    said = f"`auto` is slower in {len(slower)} of {len(pairs)}: than {', '.join(slower)}" if slower else "None is quicker"
    return f"""# Beside DDP, FSDP2 and tensor parallel by hand

Made by `python -m benchmarks.peers --write`, as root, on {machine()}, {allocator()}.

Seconds of a step (forward and backward) of the plan that `auto` chooses for the interconnect as calibrated, communication
overlapped, and how many times as long the same step takes with `DistributedDataParallel`, with `fully_shard` around every
block, and with `parallelize_module` (columns, then rows) by hand. All compute the same loss over the same global batch;
medians of six steps, taken in turns. `auto` gives every rank the loss of the global batch, DDP and FSDP2 that of the
rank's own part, which is a message less, and one for which every rank waits; "{ALIKE}" is DDP with that message. Four
ranks share two cores here: what one rank's communication takes of a core, it takes from another rank's computing, so
overlap wins less than on devices that only compute. "{SERIAL}" is the plan that `auto` chooses if nothing is to be hidden,
run with overlap like the other, where it is another{differ}.

{table(header, shown)}
{said}. Where DDP, too, gives the loss of the global batch, its step takes {min(alike):.2f} to {max(alike):.2f} times as
long as that of `auto` (median {statistics.median(alike):.2f}).

What the distributed graph costs by itself: one process beside the eager model, and two processes with unlimited links
beside DTensor's tensor parallel.

{table(costs, over)}"""


if __name__ == "__main__":
    command("peers", "peers.md", make)
