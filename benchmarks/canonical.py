"""Plans of canonical training jobs: python -m benchmarks.canonical [--write] (minutes)

Every job is planned with AdamW and ``bf16-mixed`` over all meshes, in its own process, so that peak memory is measured per
job. Jobs that do not fit are included, and the time until the planner reports this is measured.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

from autotp.errors import MemoryBoundError
from autotp.planner import plan_captured
from autotp.plans.options import Options
from autotp.plans.plan import Plan
from autotp.validate.models import LanguageModel
from autotp.validate.runs import Architecture
from benchmarks.models import Loss
from benchmarks.tables import command, machine, table
from costmodel import Topology
from passes.capture import capture

#: Name -> the config class of transformers and its arguments; or the architecture that ran, with norms of one kernel each.
MODELS: Mapping[str, tuple[str, Mapping[str, Any]] | Architecture] = {
    "Llama-3-8B": (
        "LlamaConfig",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "vocab_size": 128256},
    ),
    "Llama-3-70B": (
        "LlamaConfig",
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
        | {"num_key_value_heads": 8, "vocab_size": 128256},
    ),
    "Llama-3-405B": (
        "LlamaConfig",
        {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
        | {"num_key_value_heads": 8, "vocab_size": 128256},
    ),
    "Llama-2-13B": Architecture("llama", 40, 5120, 13824, 40, 40, 32000, tied=False),
    "MPT-1B": (
        "GPT2Config",
        {"n_embd": 2048, "n_layer": 24, "n_head": 16, "vocab_size": 50368, "activation_function": "gelu"}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
}


@dataclass(frozen=True, slots=True)
class Job:
    """A model to be trained on a machine.

    Args:
        model: The name of the model, a key of `MODELS` unless ``sizes`` is given.
        devices, topology: The machine: a preset topology, resized to this number of devices.
        batch: The number of sequences per device.
        sequence: The number of tokens per sequence.
        recompute: As in `autotp.plan`.
        known: Published figures of the same job, and their source.
        fits: Whether the job is expected to fit in memory.
        sizes: The arguments of ``LlamaConfig``, for a model that is not in `MODELS`.
    """

    model: str
    devices: int
    topology: str = "dgx-h100"
    batch: int = 1
    sequence: int = 8192
    recompute: str = "auto"
    known: str = ""
    fits: bool = True
    sizes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The number of tokens per device in a step."""
        return self.batch * self.sequence


JOBS: tuple[Job, ...] = (
    Job("Llama-3-8B", 8, known="5,762 tokens/s, 6,667 compiled: torchtitan, selective, 2 × 8,192, 96 GB a device"),
    Job("Llama-3-8B", 64, known="4,378 tokens/s, 4,809 with asynchronous TP: torchtitan, selective, TP 8 × FSDP 8, 96 GB"),
    Job("Llama-3-70B", 64),
    Job("Llama-3-70B", 256),
    Job("Llama-3-405B", 512),
    Job("Llama-3-405B", 1024),
    Job("Llama-3-405B", 16384),
    Job("MPT-1B", 64, batch=20, sequence=2048, known="44,402 tokens/s: MosaicML llm-foundry, FSDP, none"),
    Job("Llama-2-13B", 64, "dgx-a100", 2, 4096, "none", known="2,162 tokens/s: torchtitan, FSDP2, none"),
    Job("Llama-3-70B", 8, fits=False),
    Job("Llama-3-405B", 64, fits=False),
    Job("Llama-3-8B", 8, recompute="none", fits=False),
)


def model_of(job: Job) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model on ``meta`` in float32, which returns its loss, and example tokens of the global batch."""
    known = ("LlamaConfig", job.sizes) if job.sizes else MODELS[job.model]
    with torch.device("meta"):
        tokens = torch.zeros(job.batch * job.devices, job.sequence, dtype=torch.long)
        if isinstance(known, Architecture):
            return LanguageModel(known, job.sequence), (tokens, tokens)
        kind, sizes = known
        length = "n_positions" if kind == "GPT2Config" else "max_position_embeddings"
        config = getattr(transformers, kind)(**sizes, **{length: job.sequence}, use_cache=False)
        return Loss(transformers.AutoModelForCausalLM.from_config(config)), (tokens,)


def planned(job: Job) -> dict[str, Any]:
    """Plans a job in this process; returns figures of the plan or of the refusal, the seconds, and the peak memory."""
    model, args = model_of(job)
    begun = time.perf_counter()
    captured = capture(model, args, None, "bf16-mixed")
    captured_in = time.perf_counter() - begun
    topology = Topology.load(job.topology).resized(job.devices)
    begun, said = time.perf_counter(), {}
    try:
        plan = plan_captured(captured, topology, Options("auto", precision="bf16-mixed", recompute=job.recompute))
        said = _of(plan, job)
    except MemoryBoundError as error:
        said = {"needed": error.needed, "message": str(error)}
    seconds = time.perf_counter() - begun
    peak = 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return said | {"capture": captured_in, "seconds": seconds, "peak": peak}


def _of(plan: Plan, job: Job) -> dict[str, Any]:
    kinds = Counter(op.target.split(".")[1] for op in plan.operators if op.recomputed)
    return {
        "gap": plan.gap,
        "mesh": plan.mesh_shape,
        "meshes": plan.planning["meshes"],
        "step": plan.predicted.step_seconds,
        "memory": plan.predicted.memory_bytes,
        "speed": job.tokens / plan.predicted.step_seconds,
        "recomputed": len(plan.recomputed),
        "operators": len(plan.operators),
        "kinds": [kind for kind, _ in kinds.most_common()],
    }


def alone(job: Job) -> dict[str, Any]:
    """Runs `planned` in its own process.

    Raises:
        CalledProcessError: The process failed.
    """
    given = [sys.executable, "-m", "benchmarks.canonical", "--case", json.dumps(asdict(job))]
    found: dict[str, Any] = json.loads(
        subprocess.run(given, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
    )
    return found


def fits(job: Job, found: Mapping[str, Any]) -> list[str]:
    """The table row of a job that has a plan."""
    kinds = ", ".join(found["kinds"][:_KINDS]) + (", …" if len(found["kinds"]) > _KINDS else "")
    return [
        *_called(job),
        f"{found['seconds']:.1f}",
        f"{found['peak'] / 1e9:.2f}",
        f"{found['gap']:.2%}",
        "×".join(map(str, found["mesh"])),
        f"{found['step']:.3f}",
        f"{found['memory'] / 1e9:.1f}",
        f"{found['speed']:,.0f}",
        f"{found['recomputed']:,} of {found['operators']:,}" + (f": {kinds}" if kinds else ""),
        job.known or "–",
    ]


def refused(job: Job, found: Mapping[str, Any]) -> list[str]:
    """The table row of a job that has no plan."""
    bound = Topology.load(job.topology).device.memory
    needed = f"{found['needed'] / 1e9:.1f} of {bound / 1e9:.0f}"
    return [*_called(job), f"{found['seconds']:.1f}", f"{found['peak'] / 1e9:.2f}", needed]


_KINDS = 6


def _called(job: Job) -> list[str]:
    device = {"dgx-h100": "H100", "dgx-a100": "A100"}.get(job.topology, job.topology)
    return [job.model, f"{job.devices:,} {device}", f"{job.batch} × {job.sequence:,}", job.recompute]


def report(found: Sequence[tuple[Job, Mapping[str, Any]]]) -> str:
    """The text of the page."""
    yes = [fits(job, one) for job, one in found if "step" in one]
    no = [refused(job, one) for job, one in found if "step" not in one]
    what = ["model", "devices", "batch of a device", "recompute", "planning s", "peak GB"]
    header = [*what, "gap to", "mesh", "step s", "GB of a device", "tokens/s/device", "recomputed operators", "published"]
    return f"""# Canonical jobs

Generated by `python -m benchmarks.canonical --write` on {machine()}.

Jobs that people train, planned with AdamW and `precision="bf16-mixed"` over every mesh of the machine's devices. *Planning*
is the time from the captured graph to the plan, *peak* the memory of the process or of the largest of its copies, including
torch and the graph; every job runs in its own process. The *gap* is between the step of the plan and a proven bound for all
plans. *Published* are training runs of the same model with comparable settings, and their speed. Models are those of
transformers; Llama-2-13B is written as what ran, with `nn.RMSNorm`: without recomputation, the norms of transformers keep
13 GB more, and do not fit.

{table(header, yes)}
For comparison, AutoParallel takes 46.8 s for an 8B Llama on a given mesh of three axes, with only parameters in its memory
limit and recomputation chosen afterwards; Mist, which also decides recomputation, searches for tens of seconds to more than
1,000.

## Jobs that do not fit

The time until the planner reports this, and the least memory that any plan needs:

{table([*what, "GB needed"], no)}"""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="a part of the names of the models to plan")


def make(only: str, write: bool) -> str:
    """Plans canonical training jobs, and measures planning time and memory."""
    found = []
    for job in JOBS:
        if only in job.model:
            found.append((job, alone(job)))
            print(*_called(job), f"{found[-1][1]['seconds']:.1f} s", file=sys.stderr)
            if job.fits != ("step" in found[-1][1]):
                print(f"unexpected: {found[-1][1]}", file=sys.stderr)
    return report(found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(planned(Job(**json.loads(sys.argv[2])))))
    else:
        command("canonical", "canonical.md", make, options)
