"""Writes a case as a self-contained test."""

from __future__ import annotations

import inspect
import re

import torch

from autotp.plans.plan_file import decode_layout
from benchmarks.fuzz import numbers
from benchmarks.fuzz.case import Case, build, source
from benchmarks.fuzz.plans import machine, planned

__all__ = ["as_test"]

_IMPORTS = {
    "dataclasses": "import dataclasses",
    "math": "import math",
    "os": "import os",
    "Any": "from typing import Any",
    "torch": "\nimport torch",
    "nn": "from torch import Tensor, nn",
    "Shard": "from torch.distributed.tensor import Replicate, Shard",
    "_StridedShard": "from torch.distributed.tensor.placement_types import _StridedShard",
    "autotp": "\nimport autotp",
    "Careful": "from benchmarks.fuzz.numbers import Careful",
}


_RUN = """
def rank(number, devices, port, check):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(number), "WORLD_SIZE": str(devices)}
    os.environ |= {"LOCAL_RANK": str(number)}
    torch.distributed.init_process_group("gloo")
    check()
    torch.distributed.destroy_process_group()
"""


def as_test(case: Case, name: str, reason: str, *, processes: bool = False) -> str:
    """The source of a module with one test that fails as the case does; ``processes``: in one process per device."""
    train = ", train=False" * case.options.inference
    made = "autotp.parallelize(model, topology, args, plan=plan)"
    ours = [f"    ours = step(autotp.simulate(model, plan, args, schedule=plan.schedule), model, args{train})"]
    if processes:
        ours = [f"    parallel = {made}", f"    ours = step(parallel, parallel, args{train})"]
    body = [
        f"def {'check' if processes else f'test_{name}'}():",
        f'    """{reason}."""',
        *_planning(case),
        *ours,
        "    model, args = build()",
        "    with Careful():",
        f"        theirs = step(model, model, args{train})",
        "    for name, want in theirs.items():",
        *_assertion(case),
    ]
    parts = [source(case), inspect.getsource(numbers.step), inspect.getsource(numbers.apart)]
    if case.dtype not in numbers.TOLERANCES:
        wide = source(case, torch.float64)
        parts.append("def exactly():\n" + "".join(f"    {line}\n" if line else "\n" for line in wide.splitlines()))
        parts[-1] += "    return build()\n"
    parts.append("\n".join(body))
    if processes:
        devices = case.options.devices
        start = f'torch.multiprocessing.start_processes(rank, ({devices}, "29517", check), {devices}, start_method="fork")'
        parts += [_RUN.strip(), f"def test_{name}():\n    {start}"]
    text = "\n\n".join(part.rstrip() + "\n" for part in parts)
    imports = [line for word, line in _IMPORTS.items() if re.search(rf"\b{word}\b", text)]
    return "\n".join(imports) + "\n\n\n" + text


def _planning(case: Case) -> list[str]:
    options = case.options
    given = [f"mesh={options.mesh}", f"strategy={options.family!r}", f"schedule={options.schedule!r}"]
    given += [f"chunks={dict(options.chunks)}"]
    given += [f"panels={options.panels}"] * (options.panels is not None)
    given += [f"constraints={options.constraints}"] * bool(options.constraints)
    given += [f"memory={options.memory}"] * (options.memory is not None)
    given += ['mode="inference"'] * options.inference
    given += [f"recompute={options.recompute!r}"] * (options.recompute != "none")
    given += [f"reshard_after_forward={options.reshard_after_forward}"] * (options.reshard_after_forward is not None)
    free = ', bandwidth="1000000 GB/s", latency="0.000001 us"' if options.free else ""
    return [
        "    model, args = build()",
        f"    topology = autotp.Topology.flat({machine(case).devices}{free})",
        f"    plan = autotp.plan(model, topology, args, {', '.join(given)})",
        *_decisions(case),
    ]


def _assertion(case: Case) -> list[str]:
    scale = "max([float(t.double().abs().nan_to_num(0, 0, 0).max()) for t in (want,) if t.numel()], default=0) or 1.0"
    lines = [f"        scale = {scale}"]
    if case.dtype in numbers.TOLERANCES:
        return [*lines, f"        assert apart(ours[name], want, scale) <= {numbers.TOLERANCES[case.dtype]}, name"]
    train = ", train=False" * case.options.inference
    return [
        "        model, args = exactly()",
        f"        exact = step(model, model, args{train})[name].double()",
        *lines,
        "        error, usual = (apart(t.double(), exact, scale) for t in (ours[name], want))",
        f"        assert error <= 1.1 * usual + 4 * {torch.finfo(case.dtype).eps}, name",
    ]


def _decisions(case: Case) -> list[str]:
    """The lines that replace strategies, panels and resting layouts in the plan, if the case's options do."""
    if not case.options.served and not case.options.rests:
        return []
    try:
        model, args = build(case)
        _, plan = planned(case, model, args)
    except Exception:  # noqa: BLE001 - the defect is in the planner
        return []
    served = {op.name: op.assignment for op in plan.operators}
    panels = {op.name: op.panels for op in plan.operators if op.panels > 1}
    rests = {name: decode_layout(encoded) for name, encoded in case.options.rests.items() if name in plan.layouts}
    changed = "dataclasses.replace(op, assignment=served[op.name]" + (", panels=panels.get(op.name, 1))" if panels else ")")
    lines = [f"    served = {served}"]
    lines += [f"    panels = {panels}"] * bool(panels)
    lines += [f"    rests = {rests!r}"] * bool(rests)
    layouts = ", layouts={**plan.layouts, **rests}" if rests else ""
    layouts += ", gathered_once=tuple(plan.layouts)" if plan.gathered_once else ""
    return [
        *lines,
        f"    operators = tuple({changed} for op in plan.operators)",
        f"    plan = dataclasses.replace(plan, operators=operators{layouts})",
    ]
