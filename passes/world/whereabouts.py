"""What a process is doing: which collective it waits for, on behalf of which operator, and in which call of its module.

The thread that computes notes it here, in a few assignments to a collective; another thread may read it at any time and
tell the other processes (`autotp.runtime.watch`).
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any

from costmodel.errors import AutotpError

__all__ = ["CollectiveError", "Whereabouts"]

#: For how long gloo's collectives are waited for, before it is looked whether that is in vain.
_SLICE = timedelta(seconds=1)
#: Calls that are remembered: more than are made between two looks of the other ranks.
_TRAIL = 2**14


class CollectiveError(AutotpError):
    """A collective failed: a process ended, or the process group's time limit passed.

    Attributes:
        rank: where.
        operator: for which operator, and in which module, the collective ran; empty if it ran for none.
        others: where the other ranks were, as far as they said; empty if nobody knows.
    """

    def __init__(self, message: str, rank: int = 0, operator: str = "", others: str = "") -> None:
        super().__init__(message)
        self.rank, self.operator, self.others = rank, operator, others


class Whereabouts:
    """What this process is doing.

    Attributes:
        rank: this process's.
        at: the operator that the next collective runs for, with its module.
        waiting: the collective that is waited for, which says what it is; None: none is.
        waits: how many were waited for.
        call: what the module was called for last.
        calls: how often it was called.
        trail: the last calls, as (number, what for).
        checking: the call that the ranks are comparing.
        others: where the other ranks are, once a wait takes long.
        problem: what is wrong with the other ranks; whoever waits for them raises it.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.at, self.others = rank, "", ""
        self.waiting: Any = None
        self.waits = self.calls = 0
        self.call: Any = None
        self.checking: tuple[int, Any] | None = None
        self.trail: deque[tuple[int, Any]] = deque(maxlen=_TRAIL)
        self.problem: AutotpError | None = None

    def called(self, call: Any, *, checked: bool = False) -> None:
        """Notes a call of the module.

        Args:
            call: what it is for.
            checked: whether the ranks compare it before they run it; ``agreed`` says when they have.

        Raises:
            AutotpError: the other ranks have made other calls before.
        """
        if self.problem is not None:
            raise self.problem
        self.calls += 1
        self.call = call
        self.checking = (self.calls, call) if checked else None
        if not checked:
            self.trail.append((self.calls, call))

    def agreed(self) -> None:
        """Notes that all ranks make the call that was checked."""
        if self.checking is not None:
            self.trail.append(self.checking)
            self.checking = None

    def wait(self, work: Any, what: Any, *, sliced: bool) -> None:
        """Waits for a collective.

        Args:
            work: torch's handle.
            what: says what it is; of its attributes, ``operator`` says for which operator it runs.
            sliced: whether the wait can be interrupted and go on, as gloo's can.

        Raises:
            CollectiveError: it failed.
            AutotpError: another rank will never take part.
        """
        self.waits += 1
        self.waiting = what
        try:
            if sliced:
                self._patiently(work)
            else:
                work.wait()
        except RuntimeError as error:
            raise self.failed(what, error) from error
        finally:
            self.waiting = None

    def _patiently(self, work: Any) -> None:
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what it failed with
                    return
                if self.problem is not None:
                    raise self.problem from None

    def failed(self, what: Any, error: BaseException) -> AutotpError:
        """What to raise where a collective fails, at its launch or later."""
        if self.problem is not None:
            return self.problem
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        during = "" if self.call is None else f", in call {self.calls} of the module, for {self.call},"
        others = self.others or "The output of the other ranks says what became of them."
        return CollectiveError(
            f"rank {self.rank}: {what}{during} failed: {reason}. {others}", self.rank, what.operator, others
        )
