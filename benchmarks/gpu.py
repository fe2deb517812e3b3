"""Measured and predicted steps on one GPU: python -m benchmarks.gpu [--write] [--minutes M] [--quick] [--report]

Calibrates the GPU, compares autotp with the plain model on it in float64, and times training steps of language models in
eager mode, with torch.compile, and with autotp, eager and compiled, with and without recomputation. Everything runs in a
process group of one rank, with NCCL. --quick uses small models and sizes; it also runs without a GPU, to test the command.
Measurements are kept in a folder, from which --report makes the page without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import autotp
from benchmarks.gpu_steps import AUTO, EXACT, QUICK, SETTINGS, TIMED, Setting, Step, exactness, language_model, steps
from benchmarks.tables import command, table
from costmodel import Topology

MEASURED = Path(__file__).parent / "measured" / "gpu"


def calibrated(quick: bool, folder: Path) -> None:
    """Runs ``autotp calibrate``, which writes the topology to the folder."""
    output = folder / "gpu.toml"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "autotp"]
    words += ["calibrate", "--output", str(output), "--name", "calibrated", "--force"]
    subprocess.run([*words, *(["--quick"] if quick else [])], check=True, stdout=sys.stderr)


def figures(shipped: Topology, fitted: Topology) -> str:
    """A table of the device figures of two topologies."""
    rows = []
    for dtype in fitted.device.flops:
        rate = shipped.device.flops.get(dtype)
        rows.append(
            [
                f"{dtype}, TFLOP/s",
                f"{rate * shipped.device.efficiency / 1e12:.1f}" if rate else "",
                f"{fitted.device.flops[dtype] * fitted.device.efficiency / 1e12:.1f}",
            ]
        )
    one, other = shipped.device, fitted.device
    rows.append(["memory, GB", f"{one.memory / 1e9:.1f}", f"{other.memory / 1e9:.1f}"])
    rows.append(["memory, GB/s", f"{one.memory_bandwidth / 1e9:.0f}", f"{other.memory_bandwidth / 1e9:.0f}"])
    rows.append(["launch, us", f"{one.launch * 1e6:.1f}", f"{other.launch * 1e6:.1f}"])
    rows.append(["half size", f"{one.half_size:.0f}", f"{other.half_size:.0f}"])
    kinds = sorted({*one.slowdown, *other.slowdown})
    rows += [
        [f"slowdown of {kind}", f"{one.slowdown.get(kind, 1):.2f}", f"{other.slowdown.get(kind, 1):.2f}"] for kind in kinds
    ]
    return table(["figure", f"preset `{shipped.name}`", "calibrated"], rows)


def rows_of(found: Sequence[Step], settings: Sequence[Setting], topologies: Sequence[Topology]) -> list[list[str]]:
    """A row for every measured step, with the predictions of every topology."""
    rows = []
    for setting in settings:
        mine = [one for one in found if (one.title, one.recompute) == (setting.title, setting.recompute)]
        with torch.device("meta"):
            model, batch = language_model(setting)
        compiled = next((one.seconds for one in mine if one.way == "torch.compile"), None)
        for one in mine:
            recompute = AUTO if one.way.endswith(AUTO) else setting.recompute
            plans = [
                autotp.plan(model, each, (batch,), recompute=recompute, compile="compiled" in one.way, mesh=(1,))
                for each in (topologies if one.way.startswith("autotp") else ())
            ]
            ratios = [f"{plan.predicted.step_seconds / one.seconds:.2f}" for plan in plans] or [""] * len(topologies)
            memory = f"{plans[0].predicted.memory_bytes / one.bytes:.3f}" if plans and one.bytes else ""
            row = [
                one.title,
                one.recompute,
                one.way,
                f"{one.seconds * 1e3:.1f}",
                f"{one.host * 1e3:.1f}" if one.host else "",
            ]
            row += [f"{batch.numel() / one.seconds:,.0f}"]
            row += [f"{one.seconds / compiled:.2f}" if compiled else "", *ratios]
            rows.append([*row, f"{one.bytes / 1e9:.2f}", memory, f"{one.ready:.0f}"])
    return rows


def measure(out: Path, quick: bool, end: float) -> None:
    """Writes the measurements of this machine to a folder; starts no step after ``end`` (of ``time.monotonic()``)."""
    gpu = torch.cuda.is_available()
    if not gpu and not quick:
        raise SystemExit("error: no GPU here; --quick runs small models on the CPU")
    out.mkdir(parents=True, exist_ok=True)
    calibrated(quick, out)
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    os.environ |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        steps(QUICK if quick else SETTINGS, Topology.local(), device, out / "steps.jsonl", end)
        what = {
            "device": torch.cuda.get_device_name(device) if gpu else "a CPU",
            "torch": torch.__version__,
            "preset": Topology.local().to_dict(),
            "exact": exactness(EXACT[:1] if quick else EXACT, device),
        }
        (out / "machine.json").write_text(json.dumps(what))
    finally:
        dist.destroy_process_group()


def make(
    write: bool = False,
    quick: bool = False,
    report: bool = False,
    minutes: float = 30.0,
    out: Path = MEASURED,
) -> str:
    """Measures one GPU: calibration, exactness, and training steps compared with eager mode and torch.compile."""
    if not report:
        measure(out, quick, time.monotonic() + 60 * minutes)
    what = json.loads((out / "machine.json").read_text())
    shipped, fitted = Topology.from_dict(what["preset"], "the preset"), Topology.load(out / "gpu.toml")
    found = [Step(**json.loads(line)) for line in (out / "steps.jsonl").read_text().splitlines()]
    rows = rows_of(found, QUICK if quick else SETTINGS, (shipped, fitted))
    header = ["model", "recompute", "way", "ms a step", "host, ms", "tokens/s", "over torch.compile"]
    header += ["predicted over measured", "calibrated over measured", "allocated, GB", "predicted over allocated"]
    header += ["s until ready"]
    return f"""# One GPU

Generated by `python -m benchmarks.gpu --write` on one {what["device"]}, torch {what["torch"]}.

## Calibration

What `torchrun --standalone --nproc-per-node 1 -m autotp calibrate` finds beside the preset that comes with autotp. Rates
of products are those of large ones (the preset's data sheet times its efficiency, which comes from training runs on many
GPUs). A slowdown is how many times longer operators of a kind take than by the memory's bandwidth or the rate of products.

{figures(shipped, fitted)}
## Steps

A step is forward, backward and fused AdamW, with weights in bfloat16 and sequences of {SETTINGS[0].tokens} tokens:
medians of {TIMED}. The host's part, where it was measured, ends when all of a step is launched: where it takes as long as
the step, the GPU waits for the host. Allocated bytes are `torch.cuda.max_memory_allocated` of those steps. The plain model
recomputes whole blocks by `gradient_checkpointing_enable`. Models are transformers' own, unmodified. Under `torch.compile`,
as under any tracer, they write their causal masks out, which makes attention slow; autotp recognises such masks.

{table(header, rows)}
`torch.compile` computes element-wise operators of the forward pass again in the backward pass, and allocates less; autotp
does so in the rows with `auto`, its default, and else recomputes where it is asked to. Where compiled autotp is behind, the
GPU waits for the host: in a profile of GPT-2 124M without recomputation (on an H100 of the same kind), `torch.compile`'s
kernels took 32.7 ms of a step of 35.6 ms, and autotp's 31.1 ms of 36.8 ms, of which the host needed 36.4 ms. 5 ms of these
are AdamW's, whose fused step takes 7.3 ms of the host for 148 `DTensor`s, and 2.2 ms for as many tensors; another 4 ms are
autograd's, which hands each of them its gradient.

## Exactness

In float64, the largest error of the loss, and of parameters after three steps of AdamW or of gradients, relative to the
largest value of each tensor.

{table(["model", "run", "error"], what["exact"])}"""


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="small models and sizes, on the CPU too")
    parser.add_argument("--report", action="store_true", help="measure nothing: make the page of what --out holds")
    parser.add_argument("--minutes", type=float, default=30.0, help="when no further step is measured")
    parser.add_argument("--out", type=Path, default=MEASURED, help="a folder for what is measured")


if __name__ == "__main__":
    command("gpu", "gpu.md", make, _options)
