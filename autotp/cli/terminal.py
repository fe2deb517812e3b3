"""Terminal output: readable output of commands goes through `Terminal`, which never interprets text as markup."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

__all__ = ["Terminal", "fail", "make_console", "open_streams", "printable", "show"]

#: Columns of a table that goes to a file or a pipe, where no terminal says how wide it is.
PIPED_WIDTH = 160

_LONGEST = 8000  # characters of an error message
_LEAST = 10  # the fewest columns or lines of a terminal that are believed


class Terminal(Console):
    """A rich console that prints text verbatim, such as names of users' models and machines.

    Strings are neither markup nor emoji codes, and numbers and calls in them are not highlighted: only a `rich.text.Text`
    has styles. Control characters, which could move the cursor or change colours, are replaced.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, markup=False, emoji=False, highlight=False, _environ=_environment())

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As ``Console.render``, with control characters in text replaced."""
        for segment in super().render(renderable, options):
            same = segment.control or (text := printable(segment.text)) == segment.text
            yield segment if same else segment._replace(text=text)

    def status(self, status: RenderableType, **options: Any) -> Status:
        """As ``Console.status``; a string is not markup."""
        return super().status(Text(status) if isinstance(status, str) else status, **options)


def printable(text: str) -> str:
    """The text with all control characters except newlines and tabs replaced by ``�``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def make_console(quiet: bool = False) -> Terminal:
    """A console on stdout: as wide and colourful as the terminal, or wide and plain when piped.

    Args:
        quiet: Print nothing at all, as ranks other than 0 should.
    """
    console = Terminal(quiet=quiet)
    if console.is_terminal or "COLUMNS" in _environment():
        return console
    return Terminal(quiet=quiet, width=PIPED_WIDTH)


def _environment() -> dict[str, str]:
    """The environment, without ``COLUMNS`` and ``LINES`` where they are not numbers or are too small to read anything."""

    def possible(name: str, text: str) -> bool:
        return name not in ("COLUMNS", "LINES") or (re.fullmatch("[0-9]{1,5}", text) is not None and int(text) >= _LEAST)

    return {name: text for name, text in os.environ.items() if possible(name, text)}


def show(data: Any, shown: RenderableType, as_json: bool, *, wraps: bool = True) -> None:
    """Prints a command's result: ``data`` as JSON, or ``shown``; ``wraps``: wrap long lines at the terminal's width."""
    if as_json:
        print(json.dumps(data, indent=1))
    else:
        make_console().print(shown, soft_wrap=not wraps)


def open_streams() -> None:
    """Opens the null device, read-only, in the place of standard streams that are closed, so that writing to them fails.

    On stdout, characters that its encoding lacks are replaced.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)  # gets ``number``, the lowest free file descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: PTH123, SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def fail(message: str, code: int = 2) -> NoReturn:
    """Prints an error message on stderr and exits with ``code``; 2 means that the input is wrong."""
    text = printable(message)
    with suppress(OSError, ValueError):  # stderr may be closed
        print(f"error: {text if len(text) <= _LONGEST else text[:_LONGEST] + '…'}", file=sys.stderr)
    raise SystemExit(code)
