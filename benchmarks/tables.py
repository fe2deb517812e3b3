"""Markdown tables, and the commands that generate pages of the documentation."""

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
    """A text that describes the machine on which the command runs."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def command(
    name: str,
    file: str,
    make: Callable[..., str | tuple[str, Mapping[str, str]]],
    options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> None:
    """Runs a benchmark's command: prints the text that ``make`` returns; with ``--write``, also replaces a file in docs/.

    Args:
        name: The name of the benchmark's module.
        file: The file in docs/, replaced atomically.
        make: Returns the text, or the text and other files in docs/ that it shows. If ``options`` is given, ``make`` is
            called with all options as keyword arguments, including ``write``.
        options: Adds further options to the parser.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=make.__doc__)
    parser.add_argument("--write", action="store_true", help=f"write docs/{file} too")
    if options is not None:
        options(parser)
    chosen = parser.parse_args()
    logging.getLogger("autotp").setLevel(logging.ERROR)  # hide the warnings of every plan about replicated operators
    made = make(**vars(chosen)) if options is not None else make()
    text, others = (made, {}) if isinstance(made, str) else made
    sys.stdout.write(text)
    if chosen.write:
        for other, content in others.items():
            write(other, content)
        write(file, text)


def write(file: str, text: str) -> None:
    """Replaces a file in docs/ atomically."""
    target = DOCS / file
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, text)
