"""Reads the stacks of the threads of this process."""

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

#: Path prefixes of sources that are not the user's.
_PATHS = map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
_PACKAGES = (str(Path(__file__).parents[3] / name) for name in ("autotp", "passes", "costmodel"))
_FOREIGN = (*_PATHS, *_PACKAGES, str(Path(torch.__file__).parent), "<")

_THREAD = re.compile(r"hread (0x[0-9a-f]+)")
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Line(NamedTuple):
    """A frame of a thread's stack: file, line number and function."""

    path: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.number} ({self.function})"


@functools.cache
def is_users(path: str) -> bool:
    """Whether a source file is the user's: neither of Python, an installed package, torch nor autotp."""
    return not path.startswith(_FOREIGN)


def caller() -> Line | None:
    """The innermost frame of the calling thread that is in the user's source; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def stacks() -> dict[int, list[Line]]:
    """Thread identifier -> the thread's stack, innermost frame first. Call this rarely, as it is not always safe.

    Python 3.11 has no way that is always safe. `sys._current_frames` makes frame objects: one that is made while its thread
    clears the frame and waits for the GIL outlives the frame, and delays the release of the function's locals. faulthandler
    makes no frame objects, but may meet threads that C++ is just registering with Python, as it does for each tensor that
    it releases.
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
