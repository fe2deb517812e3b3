"""Valid inputs and damaged cases of them: plans of a small model, topologies, model configs, tables, command lines."""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autotp
from autotp.errors import AutotpError
from benchmarks.fuzz.parsers.damage import as_json, as_toml, damaged_text, damaged_tree, damaged_words
from costmodel.toml_out import topology_toml
from passes.capture import Captured, capture

__all__ = ["KINDS", "Damaged", "captured", "case_of", "folder", "model"]

#: Kind of input -> the weight with which it is drawn.
KINDS = {"plan": 24, "topology": 18, "config": 10, "runs": 8, "command line": 3}

_MODEL = """
import sys
import torch
from torch import nn

def build():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), (torch.zeros(8, 16),)

def leave(): sys.exit(3)
def nothing(): return None
def odd(devices): return nn.Linear(1, 1), {1: 2}, 3
def deep(): return deep()
"""
_CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 64,
    "n_positions": 16, "attn_pdrop": 0.0, "dtype": "float32", "layer_norm_epsilon": 1e-5, "bos_token_id": 1,
    "tie_word_embeddings": True, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 16,
    "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64, "hidden_act": "silu",
    "max_position_embeddings": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rms_norm_eps": 1e-6,
}  # fmt: skip
_RUN = {
    "id": "one", "source": "s", "model": "GPT-1B", "layers": 2, "hidden": 64, "ffn": 256, "heads": 4, "vocab": 512,
    "seq": 64, "gpu_type": "A100-SXM-80GB", "gpus": 8, "interconnect": "8x200 Gbit/s", "dp_fsdp_degree": 8, "tp_degree": 1,
    "kind": "zero3", "global_batch": 16, "micro_batch": 2, "grad_accum": 1, "recompute": "none", "dtype": "bf16",
    "step_seconds": 0.5, "memory_gb": 10.5, "sequence_parallel": False,
}  # fmt: skip
_LINES = (
    "topology dgx-h100", "topology machine.toml --json", "topology",
    "plan --model net.py:build --topology machine.toml --devices 2 --mesh 2 --chunks batch=2 --memory 1GB --json",
    "plan --model net.py:build --topology dgx-a100 --devices 4 --mesh 2,2 --strategy auto --pin 0.weight=R --save p",
    "plan --model config.json:batch=4,sequence=8 --topology cpu --devices 1 --gap 0.1 --accumulate 2",
    "explain all_reduce --topology dgx-h100 --bytes 32MB --devices 16 --mesh 4,4 --axes x",
    "explain linear --plan plan.json --model net.py:build --alternatives 2 --planned 0",
    "explain --memory --plan plan.json --model net.py:build --json",
    "inspect plan.json --model net.py:build --op addmm --module 0 --top 3", "inspect plan.json --model net.py:build --code",
    "inspect plan.json --model net.py:build --graph forward", "inspect plan.json --model net.py:build --dot d.dot",
    "diff plan.json plan.json --json", "reprice plan.json --model net.py:build --topology machine.toml",
    "verify plan.json --model net.py:build --tolerance 1e-6", "trace --model net.py:build --plan plan.json --output t.json",
    "sweep --model net.py:build --topology machine.toml,cpu --devices 1,2 --tokens 100 --csv s.csv",
    "validate runs.csv --only one --runs", "validate runs.toml --json", "calibrate --output c.toml --name c --quick",
)  # fmt: skip
_HASH = re.compile(r"content ([0-9a-f]+)\)")


@dataclass(frozen=True)
class Damaged:
    """A possibly damaged input of one kind: the bytes of a file, or the words of a command line."""

    kind: str
    content: bytes | tuple[str, ...]


def model() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model of the plans and its inputs, in float64; deterministic."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).double()
    return net, (torch.randn(8, 16, dtype=torch.float64),)


@cache
def captured() -> Captured:
    """The captured graph of the model."""
    return capture(*model())


@cache
def _trees() -> dict[str, list[Any]]:
    net, args = model()
    machine = autotp.Topology.load("dgx-a100").resized(16)
    plans = [
        autotp.plan(net, autotp.Topology.flat(4), args, mesh=(2, 2)),
        autotp.plan(net, autotp.Topology.flat(2), args, strategy="zero3", chunks={"batch": 2}),
        autotp.plan(net, machine, args, panels=2, recompute="full", constraints=["0.weight=Shard(0)@x"], memory=1e9),
    ]
    names = ("dgx-a100", "dgx-v100-mesh", "tpu-v4-torus", "cpu")
    machines = [tomllib.loads(topology_toml(autotp.Topology.load(name))) for name in names]
    return {
        "plan": [json.loads(plan.to_json()) for plan in plans],
        "topology": machines,
        "config": [_CONFIG, _LLAMA],
        "runs": [{"runs": [_RUN, _RUN | {"id": "two", "tp_degree": 2, "dp_fsdp_degree": 4}], "sources": {"s": "someone"}}],
    }


@cache
def folder() -> Path:
    """Creates a folder with the files that command lines name, valid ones and others such as FIFOs."""
    place = Path(tempfile.mkdtemp(prefix="autotp-fuzz-"))
    (place / "net.py").write_text(_MODEL)
    (place / "machine.toml").write_text(as_toml(_trees()["topology"][0]))
    (place / "config.json").write_text(json.dumps(_CONFIG))
    (place / "runs.toml").write_text(as_toml(_trees()["runs"][0]))
    (place / "runs.csv").write_text(_csv(_trees()["runs"][0]))
    net, args = model()
    autotp.plan(net.float(), autotp.Topology.flat(2), (args[0].float(),)).save(place / "plan.json")
    for name in ("fifo", "fifo.toml", "fifo.json", "fifo.py"):
        os.mkfifo(place / name)
    return place


def _csv(tree: Any) -> str:
    rows = tree.get("runs") if isinstance(tree, dict) else None
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    names = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[as_json(row.get(name)).strip('"') for name in names] for row in rows]
    return "\n".join(",".join(line) for line in [names, *cells])


def case_of(seed: int, number: int) -> Damaged:
    """Case ``number`` of ``seed``: an input, about every tenth of which is valid."""
    rng = random.Random(f"{seed}/{number}/parsers")
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    if kind == "command line":
        words = tuple(rng.choice(_LINES).split())
        return Damaged(kind, words if rng.random() < 0.1 else damaged_words(rng, words))
    tree = rng.choice(_trees()[kind])
    way = rng.random()
    tree = damaged_tree(rng, tree) if way < 0.7 else tree
    write = rng.choice([as_toml, _csv]) if kind == "runs" else as_toml if kind == "topology" else as_json
    text = write(tree)
    if kind == "plan" and way < 0.7:
        text = _rehashed(tree, text)
    return Damaged(kind, damaged_text(rng, text) if 0.7 <= way < 0.9 else text.encode(errors="surrogatepass"))


def _rehashed(tree: Any, text: str) -> str:
    """The text of a damaged plan with the hash of its new content, so that it is not refused for its hash alone."""
    try:
        autotp.Plan.from_json(text)
    except AutotpError as error:
        found = _HASH.search(str(error))
        if found is not None and isinstance(tree, dict):
            return as_json({**tree, "hash": found[1]})
    except Exception:  # noqa: BLE001, S110 - it recurs, and is counted, when the case runs
        pass
    return text
