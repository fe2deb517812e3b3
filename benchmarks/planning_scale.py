"""Planning for up to 16,384 devices: python -m benchmarks.planning_scale [--write] (a quarter of an hour)

Every case runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import torch
import transformers
from torch import nn

from autotp.planner import plan_captured
from autotp.plans.options import Options
from benchmarks.models import Loss, gpt
from benchmarks.tables import command, machine, table
from costmodel import Topology
from passes.capture import capture

#: model, layers, devices, sequences in a batch, bytes of memory ("" for the device's own), mesh ("" for all)
CASES: tuple[tuple[str, int, int, int, str, str], ...] = (
    ("GPT-3 175B", 96, 1024, 2048, "ample", ""),
    ("GPT-3 175B", 96, 16384, 32768, "ample", ""),
    ("Llama-3 405B", 126, 1024, 1024, "ample", ""),
    ("Llama-3 405B", 126, 16384, 16384, "ample", ""),
    ("GPT-3 175B", 96, 1024, 128, "", ""),
    ("GPT-3 175B", 96, 16384, 2048, "", ""),
    ("Llama-3 405B", 126, 1024, 64, "", ""),
    ("Llama-3 405B", 126, 16384, 1024, "", ""),
    ("GPT-3 175B", 12, 1024, 2048, "ample", ""),
    ("GPT-3 175B", 24, 1024, 2048, "ample", ""),
    ("GPT-3 175B", 48, 1024, 2048, "ample", ""),
    ("Llama-3 8B", 32, 32, 64, "ample", "4x8"),
    ("Llama-3 8B", 32, 32, 64, "", "4x8"),
)
#: hidden, intermediate, heads, key and value heads, sequence
LLAMAS = {
    "Llama-3 70B": (8192, 28672, 64, 8, 2048),
    "Llama-3 405B": (16384, 53248, 128, 8, 4096),
    "Llama-3 8B": (4096, 14336, 32, 8, 2048),
}
AMPLE = 1e15


def model_of(name: str, layers: int, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model of these dimensions on ``meta``, returning its loss, with example tokens."""
    if name not in LLAMAS:
        return gpt(layers, 12288, 96, 50257, batch, 2048)
    hidden, inner, heads, groups, sequence = LLAMAS[name]
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, vocab_size=128256, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = Loss(transformers.LlamaForCausalLM(config).to(torch.bfloat16))
        return model, (torch.zeros(batch, sequence, dtype=torch.long),)


def case(name: str, layers: int, devices: int, batch: int, memory: str, mesh: str) -> dict[str, Any]:
    """Plans one case in this process."""
    model, args = model_of(name, layers, batch)
    captured = capture(model, args)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = plan_captured(
        captured,
        Topology.load("dgx-h100").resized(devices),
        Options(
            "auto",
            mesh=tuple(int(n) for n in mesh.split("x")) if mesh else None,
            memory=AMPLE if memory else None,
            schedule="none",
        ),
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return dict(plan.planning) | {"peak": peak * 1024, "before": before * 1024, "gap": plan.gap, "mesh": plan.mesh_shape}


def make() -> str:
    """Planning time and memory by model, number of devices and number of layers."""
    rows = []
    for chosen in CASES:
        text = subprocess.run(
            [sys.executable, "-m", "benchmarks.planning_scale", "--case", json.dumps(chosen)],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        found = json.loads(text.splitlines()[-1])
        name, layers, devices, _, memory, mesh = chosen
        shares = [found[key] for key in ("analysis_seconds", "assembly_seconds", "solver_seconds")]
        rows.append(
            [
                name,
                layers,
                f"{devices:,}",
                memory or "80 GB",
                mesh or found["meshes"],
                "×".join(map(str, found["mesh"])),
                f"{found['seconds']:.1f}",
                *(f"{share:.1f}" for share in shares),
                f"{found['peak'] / 1e9:.2f}",
                "yes" if found["gap"] == 0 else f"to {found['gap']:.1%}",
            ]  # fmt: skip
        )
        print(chosen, rows[-1], file=sys.stderr)
    header = [
        "model",
        "layers",
        "devices",
        "memory",
        "meshes",
        "chosen",
        "planning s",
        "of it analysis",
        "programs",
        "solver",
    ]
    return f"""# Planning at scale

Made by `python -m benchmarks.planning_scale --write` on {machine()}.

Seconds from the captured graph to the plan, over every factorisation of the devices into up to three mesh axes, on DGX
H100s; bfloat16, AdamW, without overlap (`schedule="none"`; with it the same program is solved for other weights, most often
once). *Analysis* reads the graph (it is what grows with layers, with capture, which is not counted); *programs* are built
for every mesh; the *solver* bounds and solves them. With ample memory every mesh is settled by elimination. Where 80 GB
bind, Lagrangian bounds settle most meshes, labels the rest. Peak memory is the process's, torch,
the model's graph and all.

{table([*header, "peak GB", "proven optimal"], rows)}"""


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(case(*json.loads(sys.argv[2]))))
    else:
        command("planning_scale", "planning-scale.md", make)
