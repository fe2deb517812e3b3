"""Step times compared with DDP, FSDP2 and torch's tensor parallelism: python -m benchmarks.peers [--write] (15 minutes)

On every interconnect, `autotp calibrate` runs first, and the planner then plans for the measured machine. Needs root, for
network namespaces with rate-limited links.
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
#: DDP that returns the global loss, like `auto`, so that only the rest of the step is compared.
GLOBAL_LOSS = "DDP, global loss"
#: The columns of the table, in order.
SHOWN = ("DDP", GLOBAL_LOSS, "FSDP2", "TP")
#: The plan of `auto` for a run without overlap, but run with overlap.
SERIAL = "planned without"
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """The results of one model on one interconnect: the chosen plan, and way -> seconds of a step."""

    interconnect: str
    model: str
    plan: str
    times: dict[str, float]


def measure(interconnect: str, models: Sequence[str]) -> list[Row]:
    """Measures every model on one interconnect."""
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
    """Rows that compare 1 process with the eager model, and 2 on unlimited links with DTensor's tensor parallelism."""
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
    """Compares step times with DDP, FSDP2 and torch's tensor parallelism."""
    rows = [row for interconnect in INTERCONNECTS for row in measure(interconnect, MODELS)]
    return report(rows, overhead())


def report(rows: Sequence[Row], over: Sequence[Sequence[str]]) -> str:
    """The text of the document."""
    shown = []
    for row in rows:
        times = row.times
        ratios = [f"{times[peer] / times['auto']:.2f}" if peer in times else "" for peer in SHOWN]
        ratios.append(f"{times[SERIAL] / times['auto']:.2f}" if SERIAL in times else "same")
        shown.append([row.interconnect, row.model, row.plan, f"{times['auto']:.3f}", *ratios])
    header = [
        "interconnect",
        "model",
        "mesh that auto chose",
        "auto, s",
        "DDP",
        GLOBAL_LOSS,
        "FSDP2",
        "tensor parallel",
        SERIAL,
    ]
    costs = ["model", "processes", "plan", "compared with", "its seconds", "the other's", "ratio"]
    pairs = [(row, peer, row.times[peer] / row.times["auto"]) for row in rows for peer in PEERS if peer in row.times]
    slower = [f"{peer} with the {row.model} on {row.interconnect} ({ratio:.2f})" for row, peer, ratio in pairs if ratio < 1]
    others = [row.times[SERIAL] / row.times["auto"] for row in rows if SERIAL in row.times]
    differ = (
        f", in {len(others)} of {len(rows)}; that takes {statistics.median(others):.2f} times as long (median)"
        if others
        else ""
    )
    ratios = [row.times[GLOBAL_LOSS] / row.times["auto"] for row in rows]
    said = f"`auto` is slower in {len(slower)} of {len(pairs)}: than {', '.join(slower)}"
    said = said if slower else "`auto` is never slower"
    return f"""# Comparison with DDP, FSDP2 and manual tensor parallelism

Generated by `python -m benchmarks.peers --write`, as root, on {machine()}, {allocator()}.

The time of a step (forward and backward), with overlap, of the plan that `auto` chooses for the calibrated interconnect,
and the relative time of the same step with `DistributedDataParallel`, with `fully_shard` around every block, and with a
manual `parallelize_module` (columns, then rows, of attention and of the MLP; the head is replicated). All compute the
same loss for the same global batch. Times are medians of six steps; the variants take turns. `auto` returns the loss of
the global batch on every rank. DDP and FSDP2 return that of the rank's own part, which saves one message that every
rank waits for; "{GLOBAL_LOSS}" is DDP with this message. In these
measurements, four ranks share two cores, so the device time of one rank's communication is taken from another rank's
computation, and overlap gains less than on devices that only compute. "{SERIAL}" is the plan that `auto` chooses for a run
without overlap, run with overlap, if it is a different plan{differ}.

{table(header, shown)}
{said}. If DDP also returns the loss of the global batch, its step takes {min(ratios):.2f} to {max(ratios):.2f} times as
long as that of `auto` (median {statistics.median(ratios):.2f}).

The overhead of the distributed graph itself: one process compared with the eager model, and two processes with unlimited
links compared with the tensor parallelism of DTensor.

{table(costs, over)}"""


if __name__ == "__main__":
    command("peers", "peers.md", make)
