"""One GPU, measured and predicted: python -m benchmarks.gpu [--write] [--preset NAME] [--quick] (10 minutes)

Calibrates the GPU, compares autotp with the plain model on it in float64, and times training steps of language models in
eager mode, with torch.compile, and with autotp in either way, with and without recomputation. Everything runs in a process
group of one rank, with NCCL. With --quick, small models and sizes; without a GPU too, which shows that the command works.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

import autotp
from autotp.runtime.inductor.compiler import unavailable
from benchmarks.models import Loss, trained
from benchmarks.tables import command, table
from costmodel import Topology

#: name -> layers, width, heads, heads of keys and values (0: a GPT-2), width inside the MLP, sequences.
SIZES: Mapping[str, tuple[int, int, int, int, int, int]] = {
    "GPT-2 124M": (12, 768, 12, 0, 3072, 16),
    "Llama 1.1B": (16, 2048, 32, 8, 8192, 8),
    "GPT-2 774M": (36, 1280, 20, 0, 5120, 8),
    "Llama 0.2B": (12, 1024, 16, 4, 2816, 16),
}
QUICK: Mapping[str, tuple[int, int, int, int, int, int]] = {"GPT-2": (2, 64, 4, 0, 256, 2), "Llama": (2, 64, 4, 2, 160, 2)}
TOKENS, VOCABULARY = 1024, 32_000
RECOMPUTE = ("none", "full")
WARM_UP, TIMED = 3, 10
FAMILIES = ("data", "zero3", "megatron-1d", "megatron-sp", "summa-2d", "tensor3d", "auto")
EXACT = ("decoder", "unet", "llama")


@dataclass(frozen=True, slots=True)
class Step:
    """A way to train a model, measured.

    Attributes:
        seconds: of a step: forward, backward, optimizer.
        bytes: most that were allocated at once during steps.
        ready: seconds from the model to the end of the first step.
    """

    seconds: float
    bytes: int
    ready: float


def language_model(size: tuple[int, int, int, int, int, int], tokens: int, vocabulary: int) -> tuple[nn.Module, torch.Tensor]:
    """A model that returns its loss, in bfloat16, and a batch."""
    layers, width, heads, shared, inner, sequences = size
    if shared:
        config: Any = transformers.LlamaConfig(
            num_hidden_layers=layers, hidden_size=width, intermediate_size=inner, num_attention_heads=heads,
            num_key_value_heads=shared, vocab_size=vocabulary, max_position_embeddings=tokens, use_cache=False,
        )  # fmt: skip
        model: Any = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            n_layer=layers, n_embd=width, n_head=heads, n_inner=inner, vocab_size=vocabulary, n_positions=tokens,
            use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"
    return Loss(model.to(torch.bfloat16)).train(), torch.randint(0, vocabulary, (sequences, tokens))


def measured(make: Callable[[], nn.Module], batch: torch.Tensor) -> Step:
    """Times steps of the only model that is on the device."""
    gpu = batch.is_cuda
    begin = time.monotonic()
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    clock = torch.cuda.synchronize if gpu else lambda: None

    def step() -> float:
        clock()
        started = time.perf_counter()
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        clock()
        return time.perf_counter() - started

    step()
    ready = time.monotonic() - begin
    for _ in range(WARM_UP):
        step()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(step() for _ in range(TIMED))
    return Step(seconds, torch.cuda.max_memory_allocated() if gpu else 0, ready)


@contextmanager
def freed() -> Iterator[None]:
    """Nothing is left on the device afterwards."""
    try:
        yield
    finally:
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def ways(
    model: nn.Module, batch: torch.Tensor, topology: Topology, recompute: str
) -> Iterator[tuple[str, Callable[[], nn.Module], autotp.Plan | None]]:
    """(name, what makes the model on the device, the plan) of each way to train."""

    def plain(compile: bool) -> nn.Module:
        made: Any = copy.deepcopy(model).to(batch.device)
        if recompute == "full":
            made.model.gradient_checkpointing_enable({"use_reentrant": False})
        return torch.compile(made) if compile else made  # type: ignore[no-any-return]

    yield "eager", lambda: plain(False), None
    if not unavailable(batch.device):
        yield "torch.compile", lambda: plain(True), None
    for name, compile in (("autotp", False), ("autotp, compiled", True)):
        if compile and unavailable(batch.device):
            continue
        plan = autotp.plan(model, topology, (batch,), recompute=recompute, compile=compile)

        def parallel(plan: autotp.Plan = plan, compile: bool = compile) -> nn.Module:
            made: nn.Module = autotp.parallelize(
                copy.deepcopy(model).to(batch.device), args=(batch,), plan=plan, compile=compile
            )
            return made

        yield name, parallel, plan


def exactness(names: Sequence[str], device: torch.device) -> list[list[str]]:
    """The largest relative error of three AdamW steps in float64 with NCCL, and of simulated ranks by family."""
    rows = []
    for name in names:
        model, args = trained(name)
        model, args = model.double().to(device), tuple(x.to(device, torch.float64) if x.is_floating_point() else x.to(device) for x in args)  # fmt: skip
        alone = autotp.parallelize(copy.deepcopy(model), Topology.flat(1), args)
        rows.append([name, "one rank, three steps", f"{_three_steps(model, alone, args):.1e}"])
        for family in FAMILIES:
            plan = autotp.plan(model, Topology.flat(4), args, strategy=family, mesh=(2, 2))
            simulated = autotp.simulate(copy.deepcopy(model), plan, args)
            rows.append([name, f"{family} on 2×2 simulated ranks", f"{_one_pass(model, simulated, args):.1e}"])
    return rows


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found = found.full_tensor() if isinstance(found, torch.distributed.tensor.DTensor) else found
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def _three_steps(model: nn.Module, parallel: nn.Module, args: Sequence[Any]) -> float:
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (plain, parallel)]
    errors = []
    for _ in range(3):
        losses = [each(*args) for each in (plain, parallel)]
        errors.append(_error(losses[1].detach(), losses[0].detach()))
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    wanted = dict(plain.named_parameters())
    errors += [_error(value.detach(), wanted[name].detach()) for name, value in parallel.named_parameters()]
    return max(errors)


def _one_pass(model: nn.Module, simulated: Any, args: Sequence[Any]) -> float:
    plain = copy.deepcopy(model)
    losses = [each(*args) for each in (plain, simulated)]
    for loss in losses:
        loss.backward()
    wanted = {name: value.grad for name, value in plain.named_parameters()}
    errors = [_error(losses[1].detach(), losses[0].detach())]
    errors += [_error(value.grad, wanted[name]) for name, value in simulated.named_parameters() if wanted[name] is not None]
    return max(errors)


def calibrated(quick: bool, folder: Path) -> Topology:
    """What ``autotp calibrate`` writes."""
    output = folder / "gpu.toml"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "autotp"]
    words += ["calibrate", "--output", str(output), "--name", "calibrated", "--force"]
    subprocess.run([*words, *(["--quick"] if quick else [])], check=True, stdout=sys.stderr)
    return Topology.load(output)


def figures(shipped: Topology, fitted: Topology) -> str:
    """The two presets' devices side by side."""
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
    rows += [[f"slowdown of {kind}", f"{one.slowdown.get(kind, 1):.2f}", f"{other.slowdown.get(kind, 1):.2f}"] for kind in kinds]
    return table(["figure", f"preset `{shipped.name}`", "calibrated"], rows)


def steps(
    sizes: Mapping[str, tuple[int, int, int, int, int, int]], topologies: Sequence[Topology], device: torch.device, log: Path
) -> list[list[str]]:
    """A row for every model, recomputation and way; each is also appended to a file when it is known."""
    rows = []
    tokens = TOKENS if device.type == "cuda" else 64
    for recompute, (title, size) in itertools.product(RECOMPUTE, sizes.items()):
        model, batch = language_model(size, tokens, VOCABULARY if device.type == "cuda" else 128)
        batch = batch.to(device)
        compiled: float | None = None
        for name, make, plan in ways(model, batch, topologies[0], recompute):
            with freed():
                found = measured(make, batch)
            compiled = found.seconds if name == "torch.compile" else compiled
            predicted = [plan] if plan else []
            if plan:
                compile = name.endswith("compiled")
                predicted += [
                    autotp.plan(model, other, (batch,), recompute=recompute, compile=compile) for other in topologies[1:]
                ]
            rows.append(
                [
                    title,
                    recompute,
                    name,
                    f"{found.seconds * 1e3:.1f}",
                    f"{batch.numel() / found.seconds:,.0f}",
                    f"{found.seconds / compiled:.2f}" if compiled else "",
                    *(
                        f"{each.predicted.step_seconds / found.seconds:.2f}"
                        for each in predicted or [None] * 0
                    ),
                    *([""] * (len(topologies) - len(predicted))),
                    f"{found.bytes / 1e9:.2f}",
                    f"{plan.predicted.memory_bytes / found.bytes:.3f}" if plan and found.bytes else "",
                    f"{found.ready:.0f}",
                ]
            )
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
            with log.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    return rows


def make(write: bool = False, preset: str = "", quick: bool = False, out: Path = Path("build")) -> str:
    """One GPU: calibration, exactness, and training steps beside eager mode and torch.compile."""
    gpu = torch.cuda.is_available()
    if not gpu and not quick:
        raise SystemExit("error: no GPU here; --quick runs small models on the CPU")
    out.mkdir(parents=True, exist_ok=True)
    fitted = calibrated(quick, out)
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    os.environ |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    shipped = Topology.load(preset).resized(1) if preset else Topology.local()
    compared = figures(shipped, fitted)
    print(compared, file=sys.stderr, flush=True)
    try:
        rows = steps(QUICK if quick else SIZES, (shipped, fitted), device, out / "gpu.jsonl")
        exact = exactness(EXACT[:1] if quick else EXACT, device)
    finally:
        dist.destroy_process_group()
    header = ["model", "recompute", "way", "ms a step", "tokens/s", "over torch.compile", "predicted over measured"]
    header += ["calibrated over measured", "allocated, GB", "predicted over allocated", "s until ready"]
    what = torch.cuda.get_device_name(device) if gpu else "a CPU"
    return f"""# One GPU

Generated by `python -m benchmarks.gpu --write` on {what}, torch {torch.__version__}, one process.

## Calibration

What `torchrun --standalone --nproc-per-node 1 -m autotp calibrate` finds beside the preset that comes with autotp. Rates
of products are those of large ones (the preset's data sheet times its efficiency). A slowdown is how many times longer than
by the memory's bandwidth, or by the rate of products, operators of a kind take.

{compared}
## Steps

A step is forward, backward and fused AdamW, with weights in bfloat16 and sequences of {TOKENS} tokens: medians of {TIMED}.
Allocated bytes are `torch.cuda.max_memory_allocated` of those steps. The plain model recomputes whole blocks by
`gradient_checkpointing_enable`.

{table(header, rows)}
## Exactness

In float64, the largest error of the loss, and of parameters after three steps of AdamW or of gradients, relative to the
largest value of each tensor.

{table(["model", "run", "error"], exact)}"""


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="", help="the preset to compare with; left out, that of this machine")
    parser.add_argument("--quick", action="store_true", help="small models and sizes, on the CPU too")
    parser.add_argument("--out", type=Path, default=Path("build"), help="a folder for the topology and every row")


if __name__ == "__main__":
    command("gpu", "gpu.md", make, _options)
