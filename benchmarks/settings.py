"""Checks that no family is predicted to be faster than `auto`: python -m benchmarks.settings [--write] (two hours)

60 settings: six models, five machines, and ample or short memory. In each, `auto` and every family are planned with the
default options, including overlap, chunks and recomputation; the page lists every setting in which `auto` is slower than a
family. Results are kept in a file and not planned again until it is deleted, so that the command may run in parts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from autotp import FAMILIES, BatchError, MemoryBoundError, Plan
from autotp.planner import plan_captured
from autotp.plans.families import family
from autotp.plans.options import Options
from benchmarks.models import Denoiser, Loss, chain, gpt
from benchmarks.tables import command, machine, table
from costmodel import Topology
from passes.capture import Captured, capture

__all__ = ["MACHINES", "MODELS", "Outcome", "Setting", "behind", "contained", "outcomes"]

KEPT = Path(__file__).parent / "measured" / "settings.jsonl"

#: Short memory, relative to the memory of the plan of `auto` with ample memory.
SHORT = 0.6
_SLACK = 1.01  # times the least memory for which there is a plan
_EQUAL = 1e-9

Model = Callable[[int], tuple[nn.Module, tuple[torch.Tensor, ...]]]


def _llama(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32000, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = Loss(transformers.LlamaForCausalLM(config).to(torch.bfloat16))
        return model, (torch.zeros(batch, 2048, dtype=torch.long),)


def _vit(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    config = transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, intermediate_size=4096, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.ViTModel(config, add_pooling_layer=False).to(torch.bfloat16)
        return model, (torch.zeros(batch, 3, 224, 224, dtype=torch.bfloat16),)


def _unet(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    with torch.device("meta"):
        images = torch.zeros(batch, 4, 64, 64, dtype=torch.bfloat16)
        return Denoiser(256, 32).to(torch.bfloat16), (images, images.clone())


#: Name -> factory of the model and its inputs, for a global batch size.
MODELS: Mapping[str, Model] = {
    "GPT 4 × 5120": lambda batch: gpt(4, 5120, 40, 50304, batch, 2048),
    "GPT 4 × 1024": lambda batch: gpt(4, 1024, 16, 32000, batch, 1024),
    "Llama 4 × 4096": _llama,
    "ViT 4 × 1024": _vit,
    "U-Net 256": _unet,
    "perceptron 4096, 16384": lambda batch: chain(2, 4096, 16384, batch, 512),
}
#: Name -> topology. Each device has four samples of the batch.
MACHINES: Mapping[str, Topology] = {
    "4 × ethernet-25g": Topology.load("ethernet-25g").resized(4),
    "8 × dgx-h100": Topology.load("dgx-h100").resized(8),
    "16 flat": Topology.flat(16),
    "32 × dgx-a100": Topology.load("dgx-a100").resized(32),
    "64 × dgx-h100": Topology.load("dgx-h100").resized(64),
}
_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """The results for a model on a machine with ample or short memory.

    Attributes:
        model, machine, memory: Names; ``memory`` is "ample" or "short".
        steps: Family -> step time of its plan in seconds; None if no plan fits.
        gap: The gap of the plan of `auto`.
        recomputed, operators: The numbers of recomputed operators and of all operators in the plan of `auto`.
    """

    model: str
    machine: str
    memory: str
    steps: Mapping[str, float | None]
    gap: float
    recomputed: int
    operators: int

    def seconds(self, name: str) -> float:
        """The step time of a family in seconds; infinite if no plan fits."""
        found = self.steps[name]
        return math.inf if found is None else found

    @property
    def auto(self) -> float:
        """The step time of `auto` in seconds."""
        return self.seconds("auto")

    @property
    def best(self) -> tuple[str, float]:
        """The fastest family except `auto`, and its step time in seconds."""
        return min(((name, self.seconds(name)) for name in self.steps if name != "auto"), key=lambda one: one[1])


@dataclass(frozen=True, slots=True)
class Outcome:
    """The plans for a model on a machine with ample or short memory: family -> plan; None if no plan fits."""

    model: str
    machine: str
    memory: str
    plans: Mapping[str, Plan | None]

    @property
    def setting(self) -> Setting:
        """The figures of the plans."""
        auto = self.plans["auto"]
        steps = {name: None if plan is None else plan.predicted.step_seconds for name, plan in self.plans.items()}
        about = (0.0, 0, 0) if auto is None else (auto.gap, len(auto.recomputed), len(auto.operators))
        return Setting(self.model, self.machine, self.memory, steps, *about)


def outcomes(
    model: str, machine: str, memories: Sequence[str] = ("ample", "short"), families: Sequence[str] = tuple(FAMILIES)
) -> list[Outcome]:
    """Plans `auto` and every family on one machine, with ample and with short memory."""
    topology = MACHINES[machine]
    module, args = MODELS[model](_SAMPLES * topology.devices)
    captured = capture(module, args)

    def plans(memory: float) -> dict[str, Plan | None]:
        return {name: _plan(captured, topology, name, memory) for name in dict.fromkeys(("auto", *families))}

    ample = plans(float("inf"))
    found = [Outcome(model, machine, "ample", ample)]
    if "short" in memories:
        auto = ample["auto"]
        assert auto is not None, "memory without an end holds any plan"
        found.append(Outcome(model, machine, "short", plans(_short(captured, topology, auto.predicted.memory_bytes))))
    return [one for one in found if one.memory in memories]


def _plan(captured: Captured, topology: Topology, name: str, memory: float) -> Plan | None:
    try:
        plan = plan_captured(captured, topology, Options(name, memory=memory))
    except (BatchError, MemoryBoundError):
        return None
    return plan if len(plan.mesh_shape) >= family(name).least else None


def _short(captured: Captured, topology: Topology, whole: float) -> float:
    """A memory limit in bytes: a fraction of ``whole``, or a little more than any plan needs, whichever is feasible."""
    try:
        plan_captured(captured, topology, Options("auto", memory=SHORT * whole))
    except MemoryBoundError as error:
        return _SLACK * error.needed
    return SHORT * whole


def behind(found: Sequence[Setting]) -> list[str]:
    """A line of text for every family that is faster than `auto` in a setting."""
    said = []
    for one in found:
        for name in one.steps:
            if one.auto > one.seconds(name) * (1 + _EQUAL):
                by = f"takes {one.auto / one.seconds(name) - 1:.3%} longer (its gap is {one.gap:.3%})"
                said.append(f"{one.model}, {one.machine}, memory {one.memory}: {name} is faster, auto {by}")
    return said


def contained(captured: Captured, plan: Plan) -> Plan:
    """Plans with `auto` and all choices of ``plan`` pinned, to check that ``plan`` is in the search space of `auto`.

    Raises:
        ConstraintError: The pinned choices are not in the search space.
    """
    pins = [
        f"{op.name}="
        + " ".join(f"{factor or '-'}@{axis}" for axis, factor in zip(plan.mesh_axes, op.assignment, strict=False))
        for op in plan.operators
    ]
    pins += [f"{name}={layout}" for name, layout in _resting(plan).items()]
    return plan_captured(
        captured,
        plan.topology,
        Options(
            "auto",
            mesh=plan.mesh_shape,
            memory=plan.memory_bound,
            chunks=plan.chunks,
            constraints=pins,
            reshard_after_forward=None if plan.gathered_once else True,
        ),
    )


def _resting(plan: Plan) -> dict[str, str]:
    axes = plan.mesh_axes
    return {
        name: " ".join(
            f"{'R' if p.is_replicate() else f'S({p.dim})'}@{axis}"  # type: ignore[attr-defined]
            for p, axis in zip(layout, axes, strict=False)
        )
        for name, layout in plan.layouts.items()
    }


def report(found: Sequence[Setting]) -> str:
    """The text of the page."""
    rows = []
    for one in found:
        name, seconds = one.best
        recomputed, gap = f"{one.recomputed} of {one.operators}", f"{one.gap:.2%}"
        ratio = f"{one.auto / seconds - 1:+.2%}" if seconds < float("inf") else "none fits"
        steps = f"{one.auto * 1e3:.2f}", f"{seconds * 1e3:.2f}" if seconds < float("inf") else "–"
        rows.append(
            [one.model, one.machine, one.memory, *steps, name if seconds < float("inf") else "–", ratio, gap, recomputed]
        )
    slower, done = behind(found), f"{len(found)} of {2 * len(MODELS) * len(MACHINES)}"
    said = "\n".join(f"- {line}" for line in slower) or "In no setting is a family faster."
    header = ["model", "machine", "memory", "auto ms", "best family ms", "it is", "auto against it", "gap", "recomputed"]
    return f"""# auto and the families

Generated by `python -m benchmarks.settings --write` on {machine()}.

The predicted step of `auto` and of the fastest of the {len(FAMILIES) - 1} families, in {done} settings: models in
bfloat16 with AdamW and {_SAMPLES} samples a device, with the default overlap, chunks and recomputation. *Ample*
is memory without a limit; *short* is {SHORT:.0%} of what the fastest plan of all takes, or just enough for some plan.

{said}

{table(header, rows)}"""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="some of the models")
    parser.add_argument("--machines", nargs="*", default=list(MACHINES), help="some of the machines")


def make(models: Sequence[str], machines: Sequence[str], **_: Any) -> str:
    """Compares the predicted step time of `auto` with that of every family."""
    known = {(one.model, one.machine) for one in _kept()}
    for model in models:
        for name in machines:
            if (model, name) not in known:
                new = [one.setting for one in outcomes(model, name)]
                with KEPT.open("a") as file:
                    file.writelines(json.dumps(asdict(one)) + "\n" for one in new)
                print(f"{model}, {name}: done", *behind(new), sep="\n  ", file=sys.stderr)
    order = [(model, name) for model in MODELS for name in MACHINES]
    return report(sorted(_kept(), key=lambda one: order.index((one.model, one.machine))))


def _kept() -> list[Setting]:
    lines = KEPT.read_text().splitlines() if KEPT.is_file() else []
    return [Setting(**json.loads(line)) for line in lines]


if __name__ == "__main__":
    command("settings", "settings.md", make, options)
