"""Times training steps on one GPU in several ways, and measures exactness there; see `benchmarks.gpu`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

import autotp
from autotp.analysis.compare import difference, largest
from autotp.runtime.inductor.compiler import unavailable
from benchmarks.models import Loss, trained
from costmodel import Topology

WARM_UP, TIMED = 3, 10
FAMILIES = ("data", "zero3", "megatron-1d", "megatron-sp", "summa-2d", "tensor3d", "auto")
EXACT = ("decoder", "unet")
AUTO = "auto"  # the default: like torch.compile, a compiled plan recomputes values that stay inside kernels


@dataclass(frozen=True, slots=True)
class Setting:
    """A language model and its training options.

    Attributes:
        title: The name of the model in the table.
        layers, width, heads, inner: The sizes of the model; ``inner`` is the width inside its MLP.
        shared: The number of key-value heads of a Llama; 0 for a GPT-2.
        sequences, tokens: The number of sequences in a batch, and of tokens in a sequence.
        vocabulary: The size of the vocabulary.
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
#: The most informative settings first, in case time runs out.
SETTINGS = (_LLAMA, _GPT, replace(_LLAMA, recompute="full"), replace(_GPT, recompute="full"), _SMALL, _LARGE)
QUICK = tuple(
    Setting(name, 2, 64, 4, 160, shared, 2, 64, 128, recompute)
    for recompute in ("none", "full")
    for name, shared in (("GPT-2", 0), ("Llama", 2))
)


@dataclass(frozen=True, slots=True)
class Step:
    """The measurements of one way to train a model.

    Attributes:
        title, recompute: See :class:`Setting`.
        way: The name of the way.
        seconds: The time of a step: forward, backward, optimizer.
        bytes: The peak of allocated memory during the timed steps; 0 without a GPU.
        ready: Seconds to prepare the model and run the first step.
        host: Seconds until all kernels of a step are launched; None if not measured.
    """

    title: str
    recompute: str
    way: str
    seconds: float
    bytes: int
    ready: float
    host: float | None = None


def language_model(of: Setting) -> tuple[nn.Module, torch.Tensor]:
    """A model in bfloat16 that returns its loss, and a batch of tokens."""
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


def measured(make: Callable[[], nn.Module], batch: torch.Tensor) -> tuple[float, int, float, float]:
    """Makes a model and times its steps; returns ``seconds``, ``bytes``, ``ready`` and ``host`` of a :class:`Step`."""
    gpu = batch.is_cuda
    begin = time.monotonic()
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    clock = torch.cuda.synchronize if gpu else lambda: None

    def step() -> tuple[float, float]:
        clock()
        started = time.perf_counter()
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        launched = time.perf_counter()
        clock()
        return time.perf_counter() - started, launched - started

    step()
    ready = time.monotonic() - begin
    for _ in range(WARM_UP):
        step()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds, host = map(statistics.median, zip(*(step() for _ in range(TIMED)), strict=True))
    return seconds, torch.cuda.max_memory_allocated() if gpu else 0, ready, host


@contextmanager
def freed() -> Iterator[None]:
    """Frees compiled code, garbage and cached device memory at the end of the block."""
    try:
        yield
    finally:
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def ways(
    model: nn.Module, batch: torch.Tensor, topology: Topology, recompute: str
) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yields (name, factory of the model on the device) for each way to train."""

    def plain(compile: bool) -> nn.Module:
        made: Any = copy.deepcopy(model).to(batch.device)
        if recompute == "full":
            made.model.gradient_checkpointing_enable({"use_reentrant": False})
        return torch.compile(made) if compile else made  # type: ignore[return-value]

    def parallel(compile: bool, recompute: str) -> nn.Module:
        there = copy.deepcopy(model).to(batch.device)
        made: nn.Module = autotp.parallelize(there, topology, (batch,), recompute=recompute, compile=compile)
        return made

    for compile in (False, True):
        if not compile or not unavailable(batch.device):
            yield "torch.compile" if compile else "eager", functools.partial(plain, compile)
            yield "autotp, compiled" if compile else "autotp", functools.partial(parallel, compile, recompute)
            if compile and recompute == "none":
                yield f"autotp, compiled, {AUTO}", functools.partial(parallel, compile, AUTO)


def exactness(names: Sequence[str], device: torch.device) -> list[list[str]]:
    """Rows with the largest relative errors in float64: three AdamW steps with NCCL, and simulated ranks by family."""
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
    """The largest difference of tensors, relative to the largest magnitude of the tensor.

    This magnitude is at least a thousandth of the largest of all tensors: some gradients, such as that of the bias of the
    keys, are zero except for rounding.
    """
    wanted = {name: value.detach() for name, value in wanted.items()}
    least = 1e-3 * max(map(largest, wanted.values()))
    errors = []
    for name, value in wanted.items():
        mine = found[name]
        mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
        errors.append(difference(mine.detach(), value, max(largest(value), least)))
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


def steps(settings: Sequence[Setting], topology: Topology, device: torch.device, known: Path, end: float) -> list[Step]:
    """Measures each way to train each model, except those that an earlier run has measured.

    Args:
        settings: The models to train.
        topology: The topology to plan for.
        device: The device to run on.
        known: The file of results; every new result is appended at once.
        end: The deadline of ``time.monotonic()`` after which no measurement starts.
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
