"""Reads the stack of a thread."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import re
import sys
import sysconfig
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

import torch

__all__ = ["Line", "Stack", "caller", "is_users"]

#: Path prefixes of sources that are not the user's.
_PATHS = map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
_PACKAGES = (str(Path(__file__).parents[3] / name) for name in ("autotp", "passes", "costmodel"))
_FOREIGN = (*_PATHS, *_PACKAGES, str(Path(torch.__file__).parent), "<")

_HEAD = re.compile(r"(?:Stack|(?:Current t|T)hread (0x[0-9a-f]+)).*\(most recent call first\)")
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')

#: C functions, called with the GIL held: one returns the calling thread's state, and the other writes its frames to a file.
_this_thread = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))
_dump: Callable[[int, int], None] | None = None
if sys.version_info < (3, 12):
    _dump = ctypes.PYFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(("_Py_DumpTraceback", ctypes.pythonapi))


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


class Stack:
    """The stack of the thread that makes this object, for other threads to read.

    `sys._current_frames` makes frame objects: one that is made while its thread clears the frame and waits for the GIL
    outlives the frame, and delays the release of the function's locals. faulthandler makes none, but reads all threads.
    In Python 3.11, it crashes at a thread that C++ is just registering with Python, as it does for each tensor that it
    releases. There, the C function behind it is called for one thread that is known to exist: while the reader holds the
    GIL, that thread neither runs Python code nor ends.
    """

    def __init__(self) -> None:
        self._own = threading.local()
        self._own.ends = ends = _Ends()
        self._thread, self._state = threading.get_ident(), (state := {"thread": _this_thread()})
        self._end = weakref.ref(ends, lambda _: state.clear())  # called before Python frees the thread's state

    def read(self) -> list[Line]:
        """The frames of the thread, innermost first; none once it has ended."""
        with tempfile.TemporaryFile("w+") as file:
            self._write(file)
            file.seek(0)
            found, mine = list[Line](), False
            for text in file:
                if head := _HEAD.match(text):
                    mine = head[1] is None or int(head[1], 16) == self._thread
                elif mine and text.strip():
                    line = _LINE.match(text)
                    found.append(Line(line[1], int(line[2]), line[3]) if line else Line("<", 0, text.strip()))
            return found

    def _write(self, file: IO[str]) -> None:
        if _dump is None:
            faulthandler.dump_traceback(file, all_threads=True)
            return
        number = file.fileno()
        with suppress(KeyError):  # between the lookup and the call, Python does not switch threads
            _dump(number, self._state["thread"])


class _Ends:
    """Is released when its thread ends."""
