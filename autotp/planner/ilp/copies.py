"""Independent lower bounds, computed on several cores by this process and forked copies of it."""

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

_MOST = 4  # maximum number of processes: each holds its own programs in memory
_WORTH = 1.0  # seconds of remaining work above which copies are forked
_PATIENCE = 5  # a copy may take this many times as long for its last task as the longest task here, plus one second
_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_NUMBER, _RESULT = struct.Struct("i"), struct.Struct("id")


@contextmanager
def frozen() -> Iterator[None]:
    """Exclude all existing objects, such as those of torch, from garbage collection, which planning triggers often."""
    if gc.get_freeze_count():  # the caller has frozen objects itself
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def side_by_side(tasks: Sequence[Callable[[], float]], deadline: Deadline) -> list[float]:
    """Run all tasks, in several processes if that saves time, and return their results in order.

    This process and forked copies of it (`os.fork`, as for torch's ``DataLoader``) take tasks from one queue, in order.
    Copies can only save time: if a copy does not deliver a result, because the task raised or the copy died, the task is
    run here. Side effects of tasks in a copy are lost.

    Args:
        tasks: functions that return a number.
        deadline: the deadline of the tasks. If its clock is not `time.perf_counter`, all tasks run in this process.
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
    """The number of cores on which this process may run; 1 where processes cannot be forked."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def _shared(tasks: Sequence[Callable[[], float]], first: int, copies: int, deadline: Deadline) -> dict[int, float]:
    """Run the tasks from ``first`` on in this process and ``copies`` forked ones: number -> result, if there is one."""
    waiting, numbers = os.pipe()
    results, delivered = os.pipe()
    os.write(numbers, b"".join(map(_NUMBER.pack, range(first, len(tasks)))))
    os.close(numbers)
    children = []
    try:
        for _ in range(copies):
            with warnings.catch_warnings(), suppress(OSError):  # threads, which copies do not need; out of memory
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
            with suppress(ProcessLookupError, ChildProcessError):  # the user's own handler has reaped it
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _work(tasks: Sequence[Callable[[], float]], waiting: int, results: int, delivered: int) -> None:
    """Run tasks in a forked copy and kill it, so that it runs nothing else that its parent process would run.

    The copy dies with its parent, whose connections it shares, and frees no device memory.
    """
    try:
        ctypes.CDLL(None).prctl(_WITH_PARENT, signal.SIGKILL)
        os.close(results)
        gc.disable()
        while taken := os.read(waiting, _NUMBER.size):
            (number,) = _NUMBER.unpack(taken)
            os.write(delivered, _RESULT.pack(number, tasks[number]()))
    finally:
        os.kill(os.getpid(), signal.SIGKILL)  # flushes no buffers, frees nothing, runs no handlers
