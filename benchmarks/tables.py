"""Markdown tables, and the files that hold them."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from costmodel.text.files import write_atomically

DOCS = Path(__file__).resolve().parent.parent / "docs"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join("---" for _ in header) + "|"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def machine() -> str:
    """The machine that the command runs on, in words."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def command(
    name: str,
    file: str,
    make: Callable[..., str | tuple[str, Mapping[str, str]]],
    options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> None:
    """Prints what ``make`` returns; with ``--write`` it replaces the file in docs/, whole or not at all.

    Args:
        name: of the benchmark.
        file: in docs/.
        make: gives the text, or the text and other files in docs/ that it shows. What ``options`` adds, and ``write``, are
            its arguments where there are options.
        options: adds arguments of its own; None: there are none.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=make.__doc__)
    parser.add_argument("--write", action="store_true", help=f"write docs/{file} too")
    if options is not None:
        options(parser)
    chosen = parser.parse_args()
    logging.getLogger("autotp").setLevel(logging.ERROR)  # what each of hundreds of plans replicates is no news
    made = make(**vars(chosen)) if options is not None else make()
    text, others = (made, {}) if isinstance(made, str) else made
    sys.stdout.write(text)
    if chosen.write:
        for other, content in others.items():
            write(other, content)
        write(file, text)


def write(file: str, text: str) -> None:
    """Replaces a file in docs/, whole or not at all."""
    target = DOCS / file
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, text)
