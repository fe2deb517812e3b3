"""Injects faults by place and kind into jobs under torchrun: ``python -m benchmarks.faults --write``.

With ``--kills 10``, instead trains ``examples/elastic.py`` for 1,000 steps, kills a rank once in every 100 steps, and
restarts the job with another number of processes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "faults.md"
PLACES = (
    "capture", "planning", "building", "compile", "load", "forward", "no_sync", "backward", "optimizer", "save",
    "evaluation", "generation",
)  # fmt: skip
KINDS = ("exception", "memory", "kill", "stop", "exit")
#: The timeout of process groups and the time limit of a job, in seconds, and the number of steps of a job.
_TIMEOUT, _MOST, _STEPS = 10, 240, 3
#: The number of steps per kill, and the allowed relative difference of losses.
_EVERY, _EXACT = 100, 1e-9
_KILLED = "With 4 and 2 processes in turn,"


def main() -> None:
    """Runs cells of the table or the kills, and writes the page; or runs one rank of a job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--only", nargs="*", default=[""], help="cells whose 'place kind' contains one of these")
    parser.add_argument(
        "--write", action="store_true", help="docs/faults.md, with the cells that an earlier run wrote there"
    )
    parser.add_argument("--kills", type=int, default=0, help="train on through so many kills instead")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        _Worker(*given.worker).run()
        return
    if given.kills:
        survived = _survive(given.kills)
        if given.write:
            PAGE.write_text(_page(_written(), survived))
        return
    rows = _written() if given.write else {}
    every = itertools.product(given.processes, PLACES, KINDS)
    cells = [cell for cell in every if any(word in " ".join(cell[1:]) for word in given.only)]
    losses: dict[int, str] = {}
    for processes, place, kind in cells:
        if processes not in losses:
            losses[processes] = _run(processes, "", "")["loss"]
        found = _run(processes, place, kind)
        ends = "goes on, equal" if found["restarted"] else "did without, equal"
        ends = ends if found["loss"] == losses[processes] else f"**differs: {found['loss'] or 'did not end'}**"
        named = "rank and place" if _names(found["said"]) else "no" if found["said"] else "no message"
        seconds = f"{found['seconds']:.0f}" if found["seconds"] is not None else f"**over {_MOST}**"
        said = " ".join(found["said"].split()).replace("|", "\\|")
        rows[processes, place, kind] = f"| {place} | {kind} | {seconds} | {ends} | {named} | {said[:300]} |"
        print(processes, rows[processes, place, kind], flush=True)
        if given.write:
            PAGE.write_text(_page(rows, _survived()))
    if any("**" in row for row in rows.values()):
        sys.exit("some jobs did not end, or did not go on as they were")


def _run(processes: int, place: str, kind: str) -> dict[str, Any]:
    """Runs a job, one rank of which has a fault in the first start; returns seconds, loss, message, and if restarted."""
    found: dict[str, Any] = {"seconds": None, "loss": "", "said": "", "restarted": False}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += ["--max-restarts", "1", "-m", "benchmarks.faults", "--worker", place, kind, folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        job = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(iter(job.stdout.readline, "")), daemon=True)  # type: ignore[union-attr]
        reader.start()
        begin, fired = time.monotonic(), None
        while job.poll() is None and time.monotonic() - begin < _MOST:
            time.sleep(0.1)
            if fired is None and any("FIRES" in line for line in list(lines)):
                fired = time.monotonic()
            pids = [int(line.split()[1]) for line in list(lines) if line.startswith("BEGINS")][:processes]
            if fired is not None and found["seconds"] is None and not any(map(_alive, pids)):
                found["seconds"] = time.monotonic() - fired
        for line in lines:
            if line.startswith("BEGINS") and _alive(int(line.split()[1])):
                os.kill(int(line.split()[1]), signal.SIGKILL)
        job.kill()
        reader.join(5)
    ends = [line.split()[1] for line in lines if line.startswith("ENDS")]
    found["restarted"] = sum(line.startswith("BEGINS") for line in lines) > processes
    return found | {"loss": ends[0] if ends else "", "said": _said(lines)}


def _said(lines: Sequence[str]) -> str:
    """The most informative message of a job: an error or log line of autotp, else a torch error with its source line."""
    ours, theirs, at = list[str](), list[str](), dict[str, str]()
    noted = next((line.split(": ", 1)[1] for line in lines if "which decides for all ranks" in line), "")
    for line in lines:
        if frame := re.match(r"\[rank(\d+)\]:   File .*/benchmarks/faults.py\", line (\d+), in (?!at$|call$)(\w+)$", line):
            at[frame[1]] = f"rank {frame[1]} in {frame[3]} (benchmarks/faults.py:{frame[2]})"
        elif error := re.match(r"\[rank(\d+)\]: (\S*(?:Error|Exception|Interrupt)): (.*)", line):
            own = re.search(r"autotp|whereabouts|costmodel", error[2]) or noted
            (ours if own else theirs).append(f"{error[3]} {noted}" if own else f"{at.get(error[1], '')}: {error[3]}")
        elif re.match(r"rank \d+ ((waits|runs) .* for \d+ s\. |failed to compile)", line):
            ours.append(line)
    return max(ours, key=_names, default=theirs[-1] if theirs else "").strip()


def _names(said: str) -> bool:
    """Whether a message names a rank and what the rank was doing."""
    return bool(re.search(r"rank \d.*( failed| for | in \w+ \()", said, re.DOTALL))


def _survive(kills: int) -> str:
    """Trains through kills, alternating between 4 and 2 processes; compares every step with a run without kills."""
    numbers = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        losses: dict[int, float] = {}
        again = 0
        for number in range(kills + 1):
            kill = _EVERY * number + numbers.randrange(_EVERY) if number < kills else None
            found = _elastic(Path(folder, "killed"), (4, 2)[number % 2], kills * _EVERY, kill)
            again += len(losses.keys() & found.keys())
            losses |= found
        whole = _elastic(Path(folder, "whole"), 1, kills * _EVERY, None)
    worst = max(abs(losses[step] - loss) / abs(loss) for step, loss in whole.items())
    found = (
        f"{_KILLED} {len(whole):,} steps and {kills} kills: {again} steps made again, losses differ by {worst:.0e} at most."
    )
    print(found)
    if losses.keys() != whole.keys() or not worst <= _EXACT:
        sys.exit("the run did not go on as it was")
    return found


def _elastic(folder: Path, processes: int, steps: int, kill: int | None) -> dict[int, float]:
    """Starts the example, whose last rank may be killed before a step; returns step -> loss, as printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["examples/elastic.py", str(folder), "--steps", str(steps)]
    command += [] if kill is None else ["--kill-at", str(kill)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if (done.returncode == 0) != (kill is None):
        sys.exit(done.stdout[-1000:] + done.stderr[-3000:])
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) on \d+ processes: (\S+)", done.stdout)}


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


class _Worker:
    """A rank of a job: it trains, saves, loads and evaluates, and resumes from the last checkpoint after a restart."""

    def __init__(self, place: str, kind: str, folder: str) -> None:
        self.place, self.kind, self.folder, self.now, self.step = place, kind, Path(folder), "", 0

    def at(self, place: str) -> None:
        """Triggers the fault at its place and rank: in the second step, after a checkpoint, or before all steps."""
        victim = 0 if place == "planning" else int(os.environ["WORLD_SIZE"]) - 1  # rank 0 plans for all ranks
        early = place in ("capture", "planning", "building", "compile")
        if place != self.place or int(os.environ["RANK"]) != victim or not (early or self.step == 1):
            return
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            return
        print("FIRES\n", end="", flush=True)
        if self.kind == "exception":
            raise RuntimeError("an injected fault")
        if self.kind == "memory":
            import torch

            torch.empty(1 << 50)
        if self.kind == "exit":
            sys.exit(0)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.kind])

    def before(self, place: str, owner: Any, name: str) -> None:
        """Wraps a function to trigger the fault before it, for ``place`` or, if empty, for the worker's current place."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.at(place or self.now)
            return function(*args, **kwargs)

        setattr(owner, name, call)

    def run(self) -> None:
        """Trains for all steps, and prints the markers that `_run` reads."""
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        import autotp
        from benchmarks.workflows.side import Net, batch
        from passes.world.process import ProcessWorld

        print(f"BEGINS {os.getpid()}\n", end="", flush=True)  # a single write: the ranks share a pipe
        patience = 6 * _TIMEOUT if self.place == "compile" else _TIMEOUT  # Inductor is slow
        dist.init_process_group("gloo", timeout=timedelta(seconds=patience))
        entry = sys.modules["autotp.runtime.parallelize"]
        for place, name in (("capture", "capture"), ("planning", "plan_captured"), ("building", "apply")):
            self.before(place, entry, name)
        self.before("compile", sys.modules["autotp.runtime.inductor.regions"], "compiled")
        self.before("", ProcessWorld, "_begun")
        self.before("save", dcp.FileSystemWriter, "write_data")
        self.before("load", dcp.FileSystemReader, "read_data")
        torch.manual_seed(0)
        shape = (dist.get_world_size(),)
        how: dict[str, Any] = {"strategy": "megatron-1d", "mesh": shape, "compile": self.place == "compile"}
        parallel: Any = autotp.parallelize(Net().double(), args=batch(), **how)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)

        def load(step: int) -> None:
            weights, moments = get_state_dict(parallel, optimizer)
            dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=self.folder / str(step))
            set_state_dict(parallel, optimizer, model_state_dict=weights, optim_state_dict=moments)

        done = max((int(path.parent.name) for path in self.folder.glob("*/.metadata")), default=0)
        if done:
            load(done)
        for self.step in range(done, _STEPS):
            optimizer.zero_grad()
            self.now = "no_sync"
            with parallel.no_sync():
                parallel(*batch(seed=2 * self.step)).backward()
            self.now = "forward"
            loss = parallel(*batch(seed=2 * self.step + 1))
            self.now = "backward"
            loss.backward()
            self.at("optimizer")
            optimizer.step()
            weights, moments = get_state_dict(parallel, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=self.folder / str(self.step + 1))
            load(self.step + 1)
            parallel.eval()
            self.now = "evaluation"
            with torch.no_grad():
                loss = parallel(*batch())
            parallel.train()
            if self.place == "generation":
                self.generate(shape)
        if dist.get_rank() == 0:
            print(f"ENDS {loss.item():.12g}\n", end="", flush=True)
        dist.destroy_process_group()

    def generate(self, shape: tuple[int, ...]) -> None:
        """Generates tokens with a small Llama; the fault may occur in its decoding steps."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        import autotp
        from autotp.integrations import WithCache, generate

        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).double().eval()
        prompt = torch.randint(3, 64, (4, 5))
        example = prompt, torch.tensor(0), torch.ones(4, 12, dtype=torch.int64)
        cached = autotp.parallelize(
            WithCache(model, 4, 12).eval(), None, example, strategy="megatron-1d", mesh=shape, mode="inference"
        )
        self.now = "generation"
        generate(cached, model, prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)


_ROW = re.compile(r"^\| (\w+) \| (\w+) \| .*\|$")


def _written() -> dict[tuple[int, str, str], str]:
    """The rows of the existing page."""
    rows, processes = {}, 0
    for line in PAGE.read_text().splitlines() if PAGE.exists() else ():
        if heading := re.match(r"## (\d+) processes", line):
            processes = int(heading[1])
        elif (row := _ROW.match(line)) and row[1] in PLACES:
            rows[processes, row[1], row[2]] = line
    return rows


def _survived() -> str:
    """The line on kills of the existing page, or an empty text."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else ()
    return next((line for line in lines if line.startswith(_KILLED)), "")


def _page(rows: dict[tuple[int, str, str], str], survived: str) -> str:
    lines = [
        "# Faults",
        "",
        "`python -m benchmarks.faults --write` starts a job for every row, under torchrun with `--max-restarts 1` and a",
        f"process group with a timeout of {_TIMEOUT} s ({6 * _TIMEOUT} s where it compiles). A fault is injected"
        " into the job's last rank (in",
        "planning, into rank 0), in the second step or before all steps. *Gone* is the number of seconds from the fault",
        "until all processes of the first start have ended, measured on a busy machine with two cores: an upper bound.",
        "torchrun waits 30 s of these before it kills a stopped process. The restarted job then loads the last checkpoint",
        "and continues (*goes on*); its last loss is compared with that of an undisturbed job, to 12 digits. The message",
        "is the first error that a rank of the first start raised, or logged while it waited, of those that name a rank",
        "and a place, if any does. `memory` requests more memory than there is. Errors in `optimizer`, `load` and `save`",
        "are raised by the script itself and by torch: they are shown with the line of the script that their traceback",
        "names. *Did without* means that no process ended: without a compiler, ranks run the graph as it is. *No message*",
        "means that torchrun, which reports the killed rank, ended the others while they computed, before they noticed.",
        "`--only` runs some of the cells, and keeps the others.",
        "",
        "`python -m benchmarks.faults --write --kills 10` trains `examples/elastic.py` instead, kills its last rank once",
        f"in every {_EVERY} steps, restarts the job, and compares the loss of every step with that of a run in one"
        " process:",
        "",
        survived or "not run yet.",
    ]
    for processes in sorted({key[0] for key in rows}):
        lines += ["", f"## {processes} processes", "", "| place | fault | gone | restarted | names | message |"]
        lines += ["|---|---|---|---|---|---|"]
        order = itertools.product([processes], PLACES, KINDS)
        lines += [rows[key] for key in order if key in rows]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
