"""Where the threads of a process are."""

from __future__ import annotations

import faulthandler
import re
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Line", "in_backward", "stacks"]

_THREAD = re.compile(r"hread (0x[0-9a-f]+)")
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Line(NamedTuple):
    """Where a call of a thread's is."""

    path: str
    number: int
    function: str


def stacks() -> dict[int, list[Line]]:
    """Where every thread is, its last call first.

    faulthandler makes no frames. One that is made while its thread clears it, and waits for the GIL, outlives what it shows
    in Python 3.11; and what a function had would end with its frame, late.
    """
    found: dict[int, list[Line]] = {}
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        for text in file:
            if thread := _THREAD.search(text):
                found[int(thread[1], 16)] = lines = []
            elif text.strip():
                line = _LINE.match(text)
                lines.append(Line(line[1], int(line[2]), line[3]) if line else Line("<", 0, text.strip()))
    return found


def in_backward(stack: Sequence[Line]) -> bool:
    """Whether autograd is at work in a thread, or may be further down."""
    code = torch.autograd.graph._engine_run_backward.__code__
    return any((each.path, each.function) in ((code.co_filename, code.co_name), ("<", "...")) for each in stack)
