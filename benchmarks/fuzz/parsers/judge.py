"""Checks that an input is either accepted, and then works in all later steps, or refused with an error of autotp."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import re
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

import autotp
from autotp.analysis.difference import difference
from autotp.analysis.explain import priced_plan
from autotp.analysis.inspection import inspect_plan
from autotp.cli import call_factory, find_factory, main
from autotp.cli.render import plan_table, topology_table
from autotp.cli.terminal import Terminal
from autotp.errors import AutotpError
from autotp.validate import read_runs
from benchmarks.fuzz.parsers.inputs import Damaged, captured, folder, model
from costmodel.toml_out import topology_toml

__all__ = ["PATIENCE", "judged"]

#: Limits in CPU seconds: to refuse an input, and for a whole case.
PROMPT, PATIENCE = 1.0, 10.0
_SIMULATED = 8  # devices


def judged(case: Damaged) -> tuple[str, str]:
    """Runs a case; returns the kind of outcome (ok, refused, crash or wrong) and its reason."""
    begin = time.process_time()
    try:
        if isinstance(case.content, tuple):
            return _command(case.content)
        with tempfile.TemporaryDirectory() as place:
            endings = {"topology": "toml", "runs": "csv" if b"runs" not in case.content[:8] else "toml"}
            file = Path(place) / f"input.{endings.get(case.kind, 'json')}"
            file.write_bytes(case.content)
            _PARSERS[case.kind](file)
    except AutotpError as error:
        took = time.process_time() - begin
        if took > PROMPT:
            return "crash", f"{case.kind}: refused after {took:.0f} s"
        return "refused", f"{case.kind}: {_essence(str(error))}"
    except AssertionError as error:
        return "wrong", f"{case.kind}: {error}"
    except BaseException as error:  # noqa: BLE001 - no other error may reach a user
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if "/autotp/" in f.filename or "/costmodel/" in f.filename
        ]
        where = f" in {frames[-1].filename.rpartition('/')[2]}:{frames[-1].name}" if frames else ""
        return "crash", f"{case.kind}: {_essence(f'{type(error).__name__}: {error}')}{where}"
    return "ok", case.kind


def _essence(text: str) -> str:
    text = re.sub(r"/\S*/input\.\w+", "FILE", text.splitlines()[0] if text.strip() else "")
    return re.sub(r"'[^']*'|\"[^\"]*\"|\([\d, ]*\)|[\d.,]+(e[+-]?\d+)?|[0-9a-f]{16}", "·", text)[:120]


def _plan(file: Path) -> None:
    plan = autotp.Plan.load(file)
    again = autotp.Plan.from_json(plan.to_json())
    assert again.to_json() == plan.to_json(), "a plan is not what it was when it is written and read"
    _printed(plan_table(plan, None))
    graph = captured()
    priced = priced_plan(graph, plan)
    inspect_plan(plan, priced)
    difference(plan, plan)
    if plan.devices <= _SIMULATED and random.Random(plan.hash).random() < 0.3:
        net, args = model()
        ours, theirs = autotp.simulate(net, plan, args)(*args), net(*args)
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12), "a plan that was taken computes something else"


def _topology(file: Path) -> None:
    machine = autotp.Topology.load(file)
    written = file.with_name("written.toml")
    written.write_text(topology_toml(machine))
    assert autotp.Topology.load(written) == machine, "a topology is not what it was when it is written and read"
    _printed(topology_table(machine))
    machine.links((machine.devices,))


def _config(file: Path) -> None:
    spec = f"{file}:batch=2,sequence=4"
    call_factory(find_factory(spec), spec)


def _runs(file: Path) -> None:
    read_runs(file)


_PARSERS: dict[str, Callable[[Path], None]] = {"plan": _plan, "topology": _topology, "config": _config, "runs": _runs}


def _printed(shown: object) -> None:
    out = io.StringIO()
    Terminal(file=out, width=160, force_terminal=True).print(shown)
    assert "\x1b[31mx" not in out.getvalue()


def _command(words: tuple[str, ...]) -> tuple[str, str]:
    files = [word for before, word in itertools.pairwise(words) if before != "--only" and ("." in word or "/" in word)]
    if words[0] == "validate" and not files:
        return "ok", "command line: validate, of the shipped table, which takes minutes"
    os.chdir(folder())
    out, errors = io.StringIO(), io.StringIO()
    begin = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code or 0
    said = next((line for line in errors.getvalue().splitlines() if line.startswith("error: ")), "")
    if code == 0 or (code == 1 and not said):
        return "ok", f"command line: {words[0][:20]}"
    if code != 2 or not said:
        return "wrong", f"command line: exit code {code} and {len(said)} characters of an error"
    took = time.process_time() - begin
    if took > PROMPT and not _planned(words):
        return "crash", f"command line: refused after {took:.0f} s"
    return "refused", f"command line: {_essence(said)}"


def _planned(words: tuple[str, ...]) -> bool:
    """Whether a command may have to capture and plan a model before it can refuse its arguments."""
    return words[0] in ("plan", "sweep", "validate", "verify", "trace", "explain", "inspect", "reprice")
