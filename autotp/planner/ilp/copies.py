"""Independent bounds, worked out on several cores: by this process and by copies of it."""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from autotp.planner.ilp.deadline import Deadline

__all__ = ["frozen", "side_by_side"]

_MOST = 4  # processes: each has programs of its own in memory
_WORTH = 1.0  # seconds of work that is left, from which on copies are made
_PATIENCE = 5  # times as long as a task took here, and a second: how long a copy may take for its last one, at most
_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_NUMBER, _RESULT = struct.Struct("i"), struct.Struct("id")


@contextmanager
def frozen() -> Iterator[None]:
    """Keeps what is there already, such as all of torch, out of garbage collections, of which planning causes many."""
    if gc.get_freeze_count():  # somebody's own
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def side_by_side(tasks: Sequence[Callable[[], float]], deadline: Deadline) -> list[float]:
    """What every task returns, which is a number.

    Copies of this process (`os.fork`, as torch's ``DataLoader`` makes them) take tasks as this one does, in their order.
    They can only save time: what a copy does not deliver, since the task raised or the copy is gone, is worked out here.
    What a task leaves behind in a copy is lost.

    Args:
        tasks: what to do.
        deadline: of the tasks. With a clock that is not the machine's, everything is done here.
    """
    begun, found = time.perf_counter(), dict[int, float]()
    while len(found) < len(tasks):
        number, left = len(found), len(tasks) - len(found)
        spent = time.perf_counter() - begun
        if number and left > 1 and spent / number * left > _WORTH and deadline.clock is time.perf_counter:
            found |= _shared(tasks, number, min(_cores(), _MOST, left) - 1, deadline)
            return [found[each] if each in found else task() for each, task in enumerate(tasks)]
        found[number] = tasks[number]()
    return list(found.values())


def _cores() -> int:
    """On which this process may run; 1 where processes cannot be copied."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def _shared(tasks: Sequence[Callable[[], float]], first: int, copies: int, deadline: Deadline) -> dict[int, float]:
    """What tasks from ``first`` on return, as far as this process and so many copies get that far."""
    waiting, numbers = os.pipe()
    results, delivered = os.pipe()
    os.write(numbers, b"".join(map(_NUMBER.pack, range(first, len(tasks)))))
    os.close(numbers)
    children = []
    try:
        for _ in range(copies):
            with warnings.catch_warnings(), suppress(OSError):  # of threads, which the copy does not need; no memory
                warnings.simplefilter("ignore", DeprecationWarning)
                children.append(os.fork())
                if not children[-1]:
                    _work(tasks, waiting, results, delivered)
        os.close(delivered)
        found, longest = dict[int, float](), 0.0
        while taken := os.read(waiting, _NUMBER.size):
            (number,), begun = _NUMBER.unpack(taken), time.perf_counter()
            found[number] = tasks[number]()
            longest = max(longest, time.perf_counter() - begun)
        until = min(time.perf_counter() + _PATIENCE * longest, deadline.at) + 1
        while (left := until - time.perf_counter()) > 0 and select.select([results], [], [], left)[0]:
            if not (said := os.read(results, _RESULT.size)):
                break
            number, value = _RESULT.unpack(said)
            found[number] = value
        return found
    finally:
        os.close(waiting)
        os.close(results)
        for child in children:
            with suppress(ProcessLookupError, ChildProcessError):  # the user's own handler has seen its end
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _work(tasks: Sequence[Callable[[], float]], waiting: int, results: int, delivered: int) -> None:
    """What a copy does, and nothing else of what the process that it was made of would do.

    It ends with that process, whose connections it has, too; and it frees nothing that lies on a device.
    """
    try:
        ctypes.CDLL(None).prctl(_WITH_PARENT, signal.SIGKILL)
        os.close(results)
        gc.disable()
        while taken := os.read(waiting, _NUMBER.size):
            (number,) = _NUMBER.unpack(taken)
            os.write(delivered, _RESULT.pack(number, tasks[number]()))
    finally:
        os.kill(os.getpid(), signal.SIGKILL)  # nothing is flushed, freed or handled
