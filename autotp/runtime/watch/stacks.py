"""Where the threads of a process are."""

from __future__ import annotations

import faulthandler
import functools
import re
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

__all__ = ["Line", "caller", "is_users", "stacks"]

#: Sources that are not the user's.
_PATHS = map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
_PACKAGES = (str(Path(__file__).parents[3] / name) for name in ("autotp", "passes", "costmodel"))
_FOREIGN = (*_PATHS, *_PACKAGES, str(Path(torch.__file__).parent), "<")

_THREAD = re.compile(r"hread (0x[0-9a-f]+)")
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Line(NamedTuple):
    """Where a call of a thread's is."""

    path: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.number} ({self.function})"


@functools.cache
def is_users(path: str) -> bool:
    """Whether a source is the user's."""
    return not path.startswith(_FOREIGN)


def caller() -> Line | None:
    """The line of the user's that this thread is at."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def stacks() -> dict[int, list[Line]]:
    """Where every thread is, its last call first; to be asked rarely.

    Python 3.11 has no way that is always safe. A frame that is made (`sys._current_frames`) while its thread clears it,
    and waits for the GIL, outlives what it shows; what a function had would end with its frame, late. faulthandler makes
    none, but meets threads that C++ is just making known to Python, as it does for each tensor that it lets go of.
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
