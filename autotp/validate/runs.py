"""Reads tables of measured training runs. Every run becomes a record, or a reason why it cannot be planned.

A table is TOML with one ``[[runs]]`` for each run, or CSV with a column for each key:

- ``id``, ``source``; ``model`` (a name), ``architecture`` (``gpt`` or ``llama``; by default guessed from the name),
  ``layers``, ``hidden``, ``ffn``, ``heads``, ``kv_heads``, ``vocab``, ``seq``; ``attention`` (``fused`` or
  ``written out``), ``dropout``, ``tied``, ``loss`` (``fused`` or ``float32``);
- ``gpu_type``, ``gpus``, ``nodes_of`` (devices per node); ``interconnect``: text with the bandwidth of a node's
  network, such as ``8x200 Gbit/s``, or of a device's, such as ``400 Gbit/s per GPU``;
- ``dp_fsdp_degree``, ``tp_degree``, ``pp_degree``, ``sequence_parallel``; ``kind``: ``ddp``, ``zero2``, ``zero3`` or
  ``hsdp``; ``global_batch``, ``micro_batch``, ``grad_accum``; ``recompute``, ``dtype``; ``overlap``: whether communication
  overlaps computation; ``torch_compile``: ``yes``, ``no``, or the name of a compiler;
- what was measured: ``step_seconds``, and if known ``memory_gb`` (10^9 bytes of a device).

In CSV, keys without a column may be given in ``notes``, as ``key=value;``.
"""

from __future__ import annotations

import csv
import difflib
import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotp.errors import AutotpError
from costmodel import Topology, parse_quantity
from costmodel.errors import shown
from costmodel.text.files import read_text
from costmodel.text.numbers import MOST_DEVICES, figure, whole, whole_of
from costmodel.text.tables import Table, read_toml

__all__ = ["Architecture", "MeasuredRun", "Skipped", "read_runs"]

#: The keys of a run. Other keys are ignored, but one that is nearly one of these is an error.
_KEYS = frozenset({
    "id", "source", "model", "architecture", "model_traits", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq",
    "attention", "dropout", "tied", "loss", "gpu_type", "gpus", "nodes_of", "interconnect", "dp_fsdp_degree", "tp_degree",
    "pp_degree", "sequence_parallel", "kind", "global_batch", "micro_batch", "grad_accum", "recompute", "dtype", "overlap",
    "torch_compile", "compiler", "step_seconds", "memory_gb", "note", "notes",
})  # fmt: skip
_NEARLY = 0.85
#: Pattern in a lower-case gpu_type -> the preset of its machine; the first match is used.
_DEVICES = {
    r"a100.*40 ?gb": "dgx-a100-40gb",
    r"a100.*pcie": "pcie-a100",
    r"\ba100": "dgx-a100",
    r"h100.*(96 ?gb|hbm2e)": "h100-96gb",
    r"\bh100(?!.*(pcie|nvl))": "dgx-h100",
    r"\bh200": "h200",
    r"\bgb200": "gb200-nvl72",
    r"\bb200": "dgx-b200",
    r"\bmi300x": "mi300x",
    r"\bmi250x": "frontier-mi250x",
    r"\bv100": "dgx-v100",
}
#: Pattern in a lower-case dtype -> precision; the first match is used.
_DTYPES = {
    r"bf16.*bf16 reduce": "bf16",
    r"bf16|bfloat16": "bf16-mixed",
    r"fp16|float16": "fp16",
}
_RECOMPUTE = {
    "": "none",
    "none": "none",
    "full": "full",
    "selective op": "selective",
    "selective (attention core)": "selective",
    "selective layer (every 2nd)": "every 2nd",
}
_ATTENTION = {r"written out|unfused|no flash|eager": "written out", r"fused|flash|sdpa": "fused"}
_LOSS = {"float32|fp32": "float32", "fused": "fused"}
_EAGER = ("", "no", "false", "none", "eager", "not stated")
_LARGEST_FILE = 2**22  # bytes
_SIZE, _LAYERS = 2**31, 1024  # the largest size of a model or a batch; the most layers
_LONGEST = 500  # the characters of a text that are searched for a device, a dtype or a network
_KINDS = ("ddp", "zero2", "hsdp", "zero3")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The architecture of a decoder.

    Attributes:
        kind: ``gpt`` (LayerNorm, GELU, learned positions, biases) or ``llama`` (RMSNorm, SwiGLU, rotary positions).
        layers, hidden, ffn, heads, kv_heads, vocabulary: its sizes.
        tied: whether the head's weight is the embedding's.
        fused_attention: whether attention keeps no scores in memory, as in FlashAttention.
        dropout: the probability.
        float_loss: whether logits are cast to float32 for the loss; if not, a fused kernel takes them as they are.
    """

    kind: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = True
    fused_attention: bool = True
    dropout: float = 0.0
    float_loss: bool = True


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A training run: how it was run, and what was measured.

    Attributes:
        name, source: which run, and who measured it.
        model: its architecture.
        sequence: tokens per sequence.
        topology: the machine, with the number of devices of the run.
        data, tensor: degrees of data parallelism, over the outer mesh axis, and of tensor parallelism, over the inner one.
        sharding: ``ddp``, ``zero2``, ``zero3``, or ``hsdp``, which is ``zero3`` within each node.
        sequence_parallel: whether activations between tensor-parallel layers are sharded by sequence.
        batch: sequences of a micro-batch on each data-parallel rank.
        accumulate: micro-batches per step.
        recompute: as in ``autotp.plan``, or ``every 2nd``: every second block, as a whole.
        precision: ``bf16-mixed``; ``bf16`` if gradients are reduced in bfloat16 as well; ``fp16`` if the weights are
            float16, too, and the optimizer has float32 copies of them.
        seconds: measured seconds of a step.
        memory: measured bytes on a device; 0 if not published.
        overlaps: whether communication overlaps computation.
        compiled: whether a compiler fused the operators between products.
    """

    name: str
    source: str
    model: Architecture
    sequence: int
    topology: Topology
    data: int
    tensor: int
    sharding: str
    sequence_parallel: bool
    batch: int
    accumulate: int
    recompute: str
    precision: str
    seconds: float
    memory: float = 0.0
    overlaps: bool = True
    compiled: bool = False

    @property
    def node(self) -> int:
        """The number of devices per node."""
        return math.prod(level.size for level in self.topology.levels[:-1])

    @property
    def device(self) -> str:
        """The device's name."""
        return self.topology.device.name


@dataclass(frozen=True, slots=True)
class Skipped:
    """A run that cannot be planned, and why; ``source`` says who measured it."""

    name: str
    why: str
    source: str = ""


def read_runs(path: Path) -> tuple[list[MeasuredRun], list[Skipped]]:
    """Reads a table. Returns its runs, and those that cannot be planned as they were run.

    Raises:
        AutotpError: the file cannot be read, or has no runs.
    """
    runs: list[MeasuredRun] = []
    skipped: list[Skipped] = []
    for number, row in enumerate(_rows(path)):
        name = str(row.get("id") or f"run {number}")
        try:
            runs.append(_run(name, row))
        except AutotpError as error:
            skipped.append(Skipped(name, str(error), str(row.get("source", ""))))
    if not runs and not skipped:
        raise AutotpError(f"{path}: has no runs; write one [[runs]] for each, or one line of CSV")
    return runs, skipped


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix.lower() != ".csv":
        table = Table(read_toml(path), str(path), ("runs",), ("sources",))
        sources = table.mapping("sources") if "sources" in table.data else {}
        for row in table.mappings("runs"):
            source = str(row.get("source", ""))
            yield {**row, "source": str(sources.get(source, source))}
        return
    try:
        for row in csv.DictReader(io.StringIO(read_text(path, _LARGEST_FILE), newline="")):
            noted = re.findall(r"(?:^|; ?)([a-z_]+)=([^;]*)", row.get("notes") or "")
            known = {key: value for key, value in noted if key in _KEYS}
            yield known | {key: value for key, value in row.items() if key and value}
    except OSError as error:
        raise AutotpError(f"{path}: cannot be read: {error.strerror}") from error
    except csv.Error as error:
        raise AutotpError(f"{path}: is not valid CSV: {error}") from error


def _run(name: str, row: Mapping[str, Any]) -> MeasuredRun:
    for key in sorted(row.keys() - _KEYS):
        if near := difflib.get_close_matches(key, _KEYS, 1, _NEARLY):
            raise AutotpError(f"key {shown(key)} is unknown; is it {near[0]}?")
    if _whole(row, "pp_degree", 1) > 1:
        raise AutotpError(f"a pipeline of {shown(row['pp_degree'])} stages; plans have none")
    kind = str(row.get("kind", "")).lower()
    if "one transformer layer" in kind:
        raise AutotpError("one layer by itself, which is no training step")
    devices, data = _whole(row, "gpus", most=MOST_DEVICES), _whole(row, "dp_fsdp_degree")
    tensor = _whole(row, "tp_degree", 1)
    if data * tensor != devices:
        raise AutotpError(f"{data} x {tensor} ways on {devices} devices")
    found = next((one for one in _KINDS if one in kind), "")
    if not found and data > 1 and kind not in ("", "none"):
        raise AutotpError(f"kind {shown(kind)} is unknown; the known ones are {', '.join(_KINDS)}")
    accumulate = _whole(row, "grad_accum", 1, least=1)
    batch = _whole(row, "micro_batch", 0) or _whole(row, "global_batch") // (data * accumulate)
    if "global_batch" in row and batch * data * accumulate != _whole(row, "global_batch"):
        parts = f"{accumulate} micro-batches of {batch} on {data} data-parallel ranks"
        raise AutotpError(f"a batch of {shown(row['global_batch'])} is not {parts}")
    dtype = _fitting(row, "dtype", _DTYPES)
    return MeasuredRun(
        name,
        str(row.get("source", "")),
        _architecture(row, dtype),
        _whole(row, "seq"),
        _topology(row, devices),
        data,
        tensor,
        found or "ddp",
        _yes(row, "sequence_parallel", False),
        batch,
        accumulate,
        _one_of({"recompute": "", **row}, "recompute", _RECOMPUTE),
        dtype,
        _number(row, "step_seconds"),
        _number(row, "memory_gb", 0.0) * 1e9,
        _yes(row, "overlap", not _old(row, dtype)),
        str(row.get("torch_compile", row.get("compiler", ""))).lower() not in _EAGER,
    )


def _old(row: Mapping[str, Any], dtype: str) -> bool:
    """Whether a run is in float16 with unfused attention: Megatron-LM before FlashAttention, with dropout.

    Megatron-LM then reduced all gradients after the backward pass (megatron/model/distributed.py, whose "local" was the
    default), as did DeepSpeed without ZeRO.
    """
    return dtype == "fp16" and _fitting(row, "attention", _ATTENTION, "written out") == "written out"


def _architecture(row: Mapping[str, Any], dtype: str) -> Architecture:
    model, traits = str(row.get("model", "")).lower(), str(row.get("model_traits", "")).lower()
    hidden, ffn, heads = _whole(row, "hidden"), _whole(row, "ffn"), _whole(row, "heads")
    kind = "llama" if "llama" in model or "aurora" in model else "gpt"
    kind = _one_of({"architecture": kind, **row}, "architecture", {"gpt": "gpt", "llama": "llama"})
    if kind == "gpt" and (grouped := _whole(row, "kv_heads", heads)) != heads:
        raise AutotpError(f"kv_heads is {grouped}, of {heads} heads, which only the architecture llama groups")
    old = _old(row, dtype)
    attention = _fitting(row, "attention", _ATTENTION, "written out" if old or "no flash" in traits else "fused")
    return Architecture(
        kind,
        _whole(row, "layers", most=_LAYERS),
        hidden,
        ffn,
        heads,
        _whole(row, "kv_heads", heads, least=1),
        _whole(row, "vocab"),
        _yes(row, "tied", kind == "gpt"),
        attention == "fused",
        _number(row, "dropout", 0.1 if old else 0.0),
        _fitting(row, "loss", _LOSS, "float32") == "float32",
    )


def _topology(row: Mapping[str, Any], devices: int) -> Topology:
    """The preset of the run's device, with the run's number of devices, node size and network, as far as stated."""
    machine = Topology.load(_fitting(row, "gpu_type", _DEVICES))
    *inside, outer = machine.levels
    if len(inside) == 1:
        inside = [replace(inside[0], size=_whole(row, "nodes_of", inside[0].size))]
    stated = _stated(str(row.get("interconnect", ""))[:_LONGEST], math.prod(level.size for level in inside))
    if stated is not None and inside:
        outer = replace(outer, bandwidth=stated)
    return replace(machine, levels=(*inside, outer)).resized(devices)


def _stated(text: str, node: int) -> float | None:
    """The bandwidth of a node's network, in bytes/s, in a text; None if it states none."""
    found = re.search(r"(?:([0-9]{1,6}) ?x ?)?([0-9]{1,9}(?:\.[0-9]{1,9})?) (Gbit/s|Gbps|GB/s)(?:[^+]*per (GPU))?", text)
    if found is None:
        return None
    count, figure, unit, each = found.groups()
    links = whole_of(count or "1", "interconnect: links") * (node if each else 1)
    return parse_quantity(f"{figure} {unit.replace('bps', 'bit/s')}", "bandwidth") * links


def _fitting(row: Mapping[str, Any], key: str, known: Mapping[str, str], default: str = "") -> str:
    text = (str(row.get(key, "")) or default).lower()[:_LONGEST]
    if not text:
        raise AutotpError(f"{key} is missing")
    found = next((name for pattern, name in known.items() if re.search(pattern, text)), None)
    if found is None:
        names = ", ".join(dict.fromkeys(known.values()))
        raise AutotpError(f"{key} {shown(row[key])} is unknown; the known ones are those of {names}")
    return found


def _one_of(row: Mapping[str, Any], key: str, known: Mapping[str, str]) -> str:
    value = str(row.get(key, "")).lower()
    if value not in known:
        names = ", ".join(filter(None, known))
        raise AutotpError(f"{key} {shown(row.get(key, ''))} cannot be represented; known are {names}")
    return known[value]


def _yes(row: Mapping[str, Any], key: str, default: bool) -> bool:
    text = str(row.get(key, "")).lower()
    if text not in ("yes", "true", "no", "false", ""):
        raise AutotpError(f"{key} is {shown(row[key])}; it must be yes or no")
    return text in ("yes", "true") if text else default


def _whole(row: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 0, most: int = _SIZE) -> int:
    value = _number(row, key, None if default is None else float(default))
    if not value.is_integer():
        raise AutotpError(f"{key} is {shown(row[key])}; it must be a whole number")
    return whole(int(value), key, least=least, most=most)


def _number(row: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = row.get(key, "")
    if value == "" or value is None:
        if default is None:
            raise AutotpError(f"{key} is missing")
        return default
    try:
        found = float(value) if isinstance(value, str) and value.isascii() else value
    except ValueError:
        found = value
    return figure(found, key, positive=default is None)
