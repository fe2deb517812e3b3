"""Updates docs/walkthrough.md and the screenshots of docs/cli-gallery.md: python -m benchmarks.walkthrough [--write]

The page is its own source: every command in its ``console`` blocks is run, in order and in a scratch directory with the
files of ``examples/walkthrough``, and its output replaces the text below it. A block may limit the output that is shown
(``<!-- the last 12 lines -->``), and a command may declare its exit code (``# exits with 1``).
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from autotp.cli import main
from benchmarks.tables import DOCS, command

EXAMPLE = DOCS.parent / "examples" / "walkthrough"
PAGE = "walkthrough.md"
WIDTH = 110

#: The environment of the terminal in which commands are run.
TERMINAL = {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor"}

BLOCK = re.compile(r"(?:<!-- the last (?P<last>\d+) lines -->\n)?```console\n\$ (?P<command>autotp .*)\n[^`]*```\n")

SPEC = "--model model.py:build"

#: Screenshot -> (command, caption). The commands read the plans that the commands of the page have saved.
GALLERY = {
    "topology": ("autotp topology", "The built-in topologies."),
    "plan": (
        f"autotp plan {SPEC} --topology measured.toml --mesh 2,4 --save fixed.json",
        "A strategy for every operator, the predicted step time, and the memory of a device.",
    ),
    "reprice": (
        f"autotp reprice claimed.json {SPEC} --topology measured.toml --save there.json",
        "The cost of a plan on a machine other than the one that it was made for.",
    ),
    "inspect": (
        f"autotp inspect there.json {SPEC} --collectives --top 5",
        "A plan by modules: layouts, collectives, cost and memory of every operator, and its line in the model.",
    ),
    "explain": (
        f"autotp explain linear_24 --plan there.json {SPEC} --alternatives 3 --planned 3",
        "Why an operator is sharded the way it is, and what the alternatives would cost.",
    ),
    "explain-collective": (
        'autotp explain all_reduce --topology measured.toml --mesh 2,4 --bytes "16.8 MB"',
        "The cost of a collective with each algorithm, in symbols and numbers.",
    ),
    "explain-memory": (
        f"autotp explain --memory --plan fixed.json {SPEC}",
        "The contents of a device's memory at the peak of a step, and how much is held along the step.",
    ),
    "diff": ("autotp diff there.json fixed.json", "The differences between two plans, and their cost."),
    "verify": (
        f"autotp verify fixed.json {SPEC}",
        "Every value and gradient of the distributed graph, compared with those of the original model.",
    ),
    "trace": (
        f"autotp trace {SPEC} --plan fixed.json --output trace.json",
        "The schedule of a plan, for ui.perfetto.dev; under torchrun, also a measured step.",
    ),
    "sweep": (
        f"autotp sweep {SPEC} --topology claimed.toml,measured.toml --devices 4,8",
        "One model on several machines and numbers of devices.",
    ),
    "calibrate": ("autotp calibrate --help", "Measures the machine that torchrun started it on, and writes a topology."),
    "validate": ("autotp validate --help", "Plans measured runs as they were run, and compares steps and memory."),
}


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the page: its text, the declared exit code, and the number of last lines to show (None for all)."""

    text: str
    code: int
    last: int | None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)[1:]


def commands(page: str) -> list[Command]:
    """The commands of a page, in order."""
    return [_command(found) for found in BLOCK.finditer(page)]


def _command(found: re.Match[str]) -> Command:
    text = found["command"]
    ends = re.search(r"# exits with (\d+)", text)
    return Command(text, int(ends[1]) if ends else 0, int(found["last"]) if found["last"] else None)


@contextmanager
def scratch() -> Iterator[Path]:
    """Changes to a temporary working directory with the example's files, until the end of the block."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def run(words: Sequence[str]) -> tuple[int, Text, str]:
    """Runs a command in this process and working directory; returns its exit code, colored output, and stderr."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with _terminal(), redirect_stdout(out), redirect_stderr(err):
        try:
            main(list(words))
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, _untimed(Text.from_ansi(out.getvalue())), err.getvalue()


@contextmanager
def _terminal() -> Iterator[None]:
    before = dict(os.environ)
    for name in ("NO_COLOR", "TTY_COMPATIBLE"):
        os.environ.pop(name, None)
    os.environ.update(TERMINAL)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _untimed(text: Text) -> Text:
    """Removes the time of planning, which differs in every run."""
    found = re.search(r" *\(captured in [^)]*\)", text.plain)
    return text if found is None else text[: found.start()] + text[found.end() :]


def plain(text: Text, last: int | None = None) -> str:
    """The output as it is shown in the page."""
    lines = [line.rstrip() for line in text.plain.rstrip().splitlines()]
    shown = lines if last is None else lines[-last:]
    return "\n".join([*(["…"] if len(shown) < len(lines) else []), *shown]) + "\n"


def filled(page: str) -> str:
    """The page with the output of each of its commands, which write their files to the working directory.

    Raises:
        AssertionError: A command has an exit code other than the declared one.
    """

    def replaced(found: re.Match[str]) -> str:
        command = _command(found)
        code, text, errors = run(command.words)
        assert code == command.code, f"{command.text}: exit code {code}\n{text.plain}{errors}"
        head = found[0][: found.end("command") - found.start()]
        return f"{head}\n{plain(text, command.last)}```\n"

    return BLOCK.sub(replaced, page)


def screenshot(name: str, command: str) -> str:
    """An SVG of a command and its output, without references to fonts on the network."""
    _, text, _ = run(shlex.split(command)[1:])
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    text.rstrip()
    console.print(Text(f"$ {command}", style="bold"))
    console.print(text)
    svg = console.export_svg(title=f"autotp {name.partition('-')[0]}", unique_id=f"cli-{name}")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code, monospace", "DejaVu Sans Mono, Menlo, Consolas, monospace")


def gallery() -> str:
    """The text of the page of screenshots."""
    shown = "\n".join(
        f"## {name.replace('-', ': ')}\n\n{said}\n\n![{command.replace('[', '').replace(']', '')}](images/cli-{name}.svg)\n"
        for name, (command, said) in GALLERY.items()
    )
    return f"""# The command line, in pictures

Generated by `python -m benchmarks.walkthrough --write`.

Every command, with the model and the machines of the [walk-through](walkthrough.md). `--help` lists the options of a
command, and `--json` prints its output in machine-readable form.

{shown}"""


def make() -> tuple[str, dict[str, str]]:
    """Runs every command of the walk-through and of the gallery; returns the page, and name -> other file."""
    with scratch():
        page = filled((DOCS / PAGE).read_text())
        pictures = {f"images/cli-{name}.svg": screenshot(name, command) for name, (command, _) in GALLERY.items()}
        return page, {"cli-gallery.md": gallery()} | pictures


if __name__ == "__main__":
    command("walkthrough", PAGE, make)
