"""One GPU, measured and predicted: python -m benchmarks.gpu [--write] [--preset NAME] [--minutes M] [--quick]

Calibrates the GPU, compares autotp with the plain model on it in float64, and times training steps of language models in
eager mode, with torch.compile, and with autotp in either way, with and without recomputation. Everything runs in a process
group of one rank, with NCCL. With --quick, small models and sizes; without a GPU too, which shows that the command works.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

import autotp
from autotp.runtime.inductor.compiler import unavailable
from benchmarks.models import Loss, trained
from benchmarks.tables import command, table
from costmodel import Topology

WARM_UP, TIMED = 3, 10
FAMILIES = ("data", "zero3", "megatron-1d", "megatron-sp", "summa-2d", "tensor3d", "auto")
EXACT = ("decoder", "unet", "llama")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained.

    Attributes:
        title: the model's, in the table.
        layers, width, heads, inner: of the model, and inside its MLP.
        shared: heads of keys and values of a Llama; 0: a GPT-2.
        sequences, tokens: of a batch.
        vocabulary: how many tokens there are.
        recompute: ``none`` or ``full``.
    """

    title: str
    layers: int
    width: int
    heads: int
    inner: int
    shared: int
    sequences: int
    tokens: int = 1024
    vocabulary: int = 32_000
    recompute: str = "none"


_LLAMA = Setting("Llama 1.1B", 16, 2048, 32, 8192, 8, 8)
_GPT = Setting("GPT-2 124M", 12, 768, 12, 3072, 0, 16)
_LARGE = Setting("GPT-2 774M", 36, 1280, 20, 5120, 0, 8)
_SMALL = Setting("Llama 0.2B", 12, 1024, 16, 2816, 4, 16)
#: The most telling first, in case time is short.
SETTINGS = (_LLAMA, _GPT, replace(_LLAMA, recompute="full"), replace(_GPT, recompute="full"), _SMALL, _LARGE)
QUICK = tuple(
    Setting(name, 2, 64, 4, 160, shared, 2, 64, 128, recompute)
    for recompute in ("none", "full")
    for name, shared in (("GPT-2", 0), ("Llama", 2))
)


@dataclass(frozen=True, slots=True)
class Step:
    """A way to train a model, measured.

    Attributes:
        title, recompute: of the setting.
        way: the name of the way.
        seconds: of a step: forward, backward, optimizer.
        bytes: most that were allocated at once during steps.
        ready: seconds from the model to the end of the first step.
    """

    title: str
    recompute: str
    way: str
    seconds: float
    bytes: int
    ready: float


def language_model(of: Setting) -> tuple[nn.Module, torch.Tensor]:
    """A model that returns its loss, in bfloat16, and a batch."""
    if of.shared:
        config: Any = transformers.LlamaConfig(
            num_hidden_layers=of.layers, hidden_size=of.width, intermediate_size=of.inner, num_attention_heads=of.heads,
            num_key_value_heads=of.shared, vocab_size=of.vocabulary, max_position_embeddings=of.tokens, use_cache=False,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model: Any = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            n_layer=of.layers, n_embd=of.width, n_head=of.heads, n_inner=of.inner, vocab_size=of.vocabulary,
            n_positions=of.tokens, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"
    return Loss(model.to(torch.bfloat16)).train(), torch.randint(0, of.vocabulary, (of.sequences, of.tokens))


def measured(make: Callable[[], nn.Module], batch: torch.Tensor) -> tuple[float, int, float]:
    """Seconds and bytes of steps of the only model that is on the device, and seconds to make it."""
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
    return seconds, torch.cuda.max_memory_allocated() if gpu else 0, ready


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
) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """(name, what makes the model on the device) of each way to train."""

    def plain(compile: bool) -> nn.Module:
        made: Any = copy.deepcopy(model).to(batch.device)
        if recompute == "full":
            made.model.gradient_checkpointing_enable({"use_reentrant": False})
        return torch.compile(made) if compile else made  # type: ignore[no-any-return]

    def parallel(compile: bool) -> nn.Module:
        plan = planned(model, batch, topology, recompute, compile)
        made: nn.Module = autotp.parallelize(
            copy.deepcopy(model).to(batch.device), args=(batch,), plan=plan, compile=compile
        )
        return made

    for compile in (False, True):
        if not compile or not unavailable(batch.device):
            yield "torch.compile" if compile else "eager", functools.partial(plain, compile)
            yield "autotp, compiled" if compile else "autotp", functools.partial(parallel, compile)


def planned(model: nn.Module, batch: torch.Tensor, topology: Topology, recompute: str, compile: bool) -> autotp.Plan:
    """The plan of a model on the device of the batch; the model itself stays where it is."""
    there = copy.deepcopy(model).to(batch.device)
    return autotp.plan(there, topology, (batch,), recompute=recompute, compile=compile)


def exactness(names: Sequence[str], device: torch.device) -> list[list[str]]:
    """The largest relative error of three AdamW steps in float64 with NCCL, and of simulated ranks by family."""
    rows = []
    for name in names:
        model, args = trained(name)
        model = model.double().to(device)
        args = tuple(x.to(device, torch.float64 if x.is_floating_point() else x.dtype) for x in args)
        alone = autotp.parallelize(copy.deepcopy(model), Topology.flat(1), args)
        rows.append([name, "one rank, three steps", f"{_three_steps(model, alone, args):.1e}"])
        for family in FAMILIES:
            plan = autotp.plan(model, Topology.flat(4), args, strategy=family, mesh=(2, 2))
            simulated = autotp.simulate(copy.deepcopy(model), plan, args)
            rows.append([name, f"{family} on 2×2 simulated ranks", f"{_one_pass(model, simulated, args):.1e}"])
    return rows


def _error(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """The largest difference over the tensor's largest magnitude, which counts as no less than a thousandth of all tensors'.

    The gradient of a bias of keys is zero but for rounding.
    """
    least = 1e-3 * max(float(value.abs().max()) for value in wanted.values())
    errors = []
    for name, value in wanted.items():
        mine = found[name]
        mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
        errors.append(float((mine - value).abs().max()) / max(float(value.abs().max()), least))
    return max(errors)


def _three_steps(model: nn.Module, parallel: nn.Module, args: Sequence[Any]) -> float:
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (plain, parallel)]
    errors = []
    for _ in range(3):
        losses = [each(*args) for each in (plain, parallel)]
        errors.append(_error({"": losses[1].detach()}, {"": losses[0].detach()}))
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    errors.append(_error(*(dict(each.named_parameters()) for each in (parallel, plain))))
    return max(errors)


def _one_pass(model: nn.Module, simulated: Any, args: Sequence[Any]) -> float:
    plain = copy.deepcopy(model)
    losses = [each(*args) for each in (plain, simulated)]
    for loss in losses:
        loss.backward()
    wanted, found = (
        {name: value.grad for name, value in each.named_parameters() if value.grad is not None}
        for each in (plain, simulated)
    )
    return max(_error({"": losses[1].detach()}, {"": losses[0].detach()}), _error(found, wanted))


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
    rows += [
        [f"slowdown of {kind}", f"{one.slowdown.get(kind, 1):.2f}", f"{other.slowdown.get(kind, 1):.2f}"] for kind in kinds
    ]
    return table(["figure", f"preset `{shipped.name}`", "calibrated"], rows)


def steps(settings: Sequence[Setting], topology: Topology, device: torch.device, known: Path, end: float) -> list[Step]:
    """What each way to train takes; what is known from a run before is not measured again.

    Args:
        settings: what is trained.
        topology: to plan for.
        device: to run on.
        known: a file of steps, to which every step is added when it is known.
        end: when, by ``time.monotonic()``, nothing more is begun.
    """
    found = [Step(**json.loads(line)) for line in known.read_text().splitlines()] if known.exists() else []
    for setting in settings:
        model, batch = language_model(setting)
        batch = batch.to(device)
        for way, make in ways(model, batch, topology, setting.recompute):
            if any((one.title, one.recompute, one.way) == (setting.title, setting.recompute, way) for one in found):
                continue
            if time.monotonic() > end:
                print("out of time before", setting.title, setting.recompute, way, file=sys.stderr)
                return found
            with freed():
                one = Step(setting.title, setting.recompute, way, *measured(make, batch))
            print(one, file=sys.stderr, flush=True)
            found.append(one)
            with known.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(one)) + "\n")
    return found


def rows_of(
    found: Sequence[Step], settings: Sequence[Setting], topologies: Sequence[Topology], device: torch.device
) -> list[list[str]]:
    """A row for every step: measured, and predicted by every topology."""
    rows = []
    for setting in settings:
        mine = [one for one in found if (one.title, one.recompute) == (setting.title, setting.recompute)]
        if not mine:
            continue
        model, batch = language_model(setting)
        batch = batch.to(device)
        compiled = next((one.seconds for one in mine if one.way == "torch.compile"), None)
        for one in mine:
            plans = [
                planned(model, batch, each, setting.recompute, one.way.endswith("compiled"))
                for each in (topologies if one.way.startswith("autotp") else ())
            ]
            ratios = [f"{plan.predicted.step_seconds / one.seconds:.2f}" for plan in plans] or [""] * len(topologies)
            memory = f"{plans[0].predicted.memory_bytes / one.bytes:.3f}" if plans and one.bytes else ""
            row = [one.title, one.recompute, one.way, f"{one.seconds * 1e3:.1f}", f"{batch.numel() / one.seconds:,.0f}"]
            row += [f"{one.seconds / compiled:.2f}" if compiled else "", *ratios]
            rows.append([*row, f"{one.bytes / 1e9:.2f}", memory, f"{one.ready:.0f}"])
    return rows


def make(
    write: bool = False, preset: str = "", quick: bool = False, minutes: float = 30.0, out: Path = Path("build/gpu")
) -> str:
    """One GPU: calibration, exactness, and training steps beside eager mode and torch.compile."""
    gpu = torch.cuda.is_available()
    if not gpu and not quick:
        raise SystemExit("error: no GPU here; --quick runs small models on the CPU")
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    fitted = calibrated(quick, out)
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    os.environ |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    shipped = Topology.load(preset).resized(1) if preset else Topology.local()
    compared = figures(shipped, fitted)
    print(compared, file=sys.stderr, flush=True)
    try:
        exact = exactness(EXACT[:1] if quick else EXACT, device)
        settings = QUICK if quick else SETTINGS
        found = steps(settings, shipped, device, out / "steps.jsonl", end)
        rows = rows_of(found, settings, (shipped, fitted), device)
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

A step is forward, backward and fused AdamW, with weights in bfloat16 and sequences of {settings[0].tokens} tokens: medians of {TIMED}.
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
    parser.add_argument("--minutes", type=float, default=30.0, help="when no further step is measured")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="a folder for the topology and all steps")


if __name__ == "__main__":
    command("gpu", "gpu.md", make, _options)
