"""What a process is doing: which collective it waits for, on behalf of which operator, and in which call of its module.

The thread that computes notes it here, in a few assignments to a collective; another thread may read it at any time and
tell the other processes (`autotp.runtime.watch`).
"""

from __future__ import annotations

import linecache
import math
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from torch import fx

from costmodel.errors import AutotpError
from passes.graph import note_of
from passes.torch_internals import StopRecomputationError, backward_pass, queue_callback

__all__ = ["ENDED_EARLY", "CollectiveError", "Job", "Whereabouts"]

#: For how long gloo's collectives are waited for, before it is looked whether that is in vain.
_SLICE = timedelta(seconds=1)
#: Calls that are remembered: more than are made between two looks of the other ranks.
_TRAIL = 2**14
#: What is known of a backward pass that an error ended outside of the module's own functions.
ENDED_EARLY = RuntimeError("an error ended it early"), "its backward pass"


class CollectiveError(AutotpError):
    """A collective failed, or cannot be had: a process ended or failed, or the process group's time limit passed.

    Attributes:
        rank: where.
        operator: for which operator, and in which module, the collective ran, or what failed; empty if it was for none.
        others: where the other ranks were, as far as they said; empty if nobody knows.
    """

    def __init__(self, message: str, rank: int = 0, operator: str = "", others: str = "") -> None:
        super().__init__(message)
        self.rank, self.operator, self.others = rank, operator, others


class Job(Protocol):
    """How a process hears of the others."""

    def failed(self, error: BaseException, operator: str) -> AutotpError | None:
        """Tells the others that this process failed; what is wrong from now on, nothing if all failed alike."""

    def caller(self) -> Any:
        """The line of the user's source that calls."""

    def told(self, waits: float) -> AutotpError | None:
        """What is wrong, if another failed before it took part in the collective that is waited for.

        Args:
            waits: the collective's number.
        """

    def refusal(self) -> AutotpError | None:
        """What is wrong with the process group, for whatever module it was found."""


class Whereabouts:
    """What this process is doing.

    Attributes:
        rank: this process's.
        at: the operator that the next collective runs for, with its module.
        waiting: the collective that is waited for, which says what it is; None: none is.
        waits: how many were waited for.
        call: what the module was called for last.
        calls, caller: how often it was called, and from where last.
        trail: the last calls, as (number, what for).
        checking: the call that the ranks are comparing.
        others: where the other ranks are, once a wait takes long.
        problem: what is wrong with the ranks; whoever waits for them, or is called, raises it.
        job: the other processes; None: nobody hears of them.
        back: autograd's number of the backward pass that has begun; None: there is none.
        early: whether an error ended the last one.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.at, self.others = rank, "", ""
        self.waiting: Any = None
        self.waits = self.calls = 0
        self.call: Any = None
        self.caller: Any = None
        self.checking: tuple[int, Any] | None = None
        self.trail: deque[tuple[int, Any]] = deque(maxlen=_TRAIL)
        self.problem: AutotpError | None = None
        self.job: Job | None = None
        self.back: int | None = None
        self.early = False
        self._passing = threading.RLock()

    def called(self, call: Any, *, checked: bool = False) -> None:
        """Notes a call of the module.

        Args:
            call: what it is for.
            checked: whether the ranks compare it before they run it; ``agreed`` says when they have.

        Raises:
            AutotpError: the ranks' collectives do not match any more.
        """
        if self.early:
            self._fail(*ENDED_EARLY)
        if self.problem is None and self.job is not None:
            self.caller, self.problem = self.job.caller(), self.job.refusal()
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

    def going_back(self, at: str) -> None:
        """Notes a backward pass, until it is over, and for which operator its next collective runs."""
        self.at = at
        task = backward_pass()
        if self.back is None and self.job is not None and task != -1:
            self.back = task
            queue_callback(_Backward(self))

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Tells the other ranks if a pass ends early in here."""
        try:
            with self.alone():
                yield
        except StopRecomputationError:  # torch.utils.checkpoint has what it needs, on all ranks
            raise
        except BaseException as error:
            self._fail(error, _failed_at(error))
            raise

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Refuses other threads meanwhile, as ranks could begin their collectives in different orders."""
        if not self._passing.acquire(blocking=self.job is None):
            error = AutotpError(
                "two threads of this process run the distributed module at the same time: its collectives have to come in "
                "the same order on all ranks. Make all calls and backward passes from one thread"
            )
            self._fail(error, "")
            raise error
        try:
            yield
        finally:
            self._passing.release()

    def _fail(self, error: BaseException, operator: str) -> None:
        self.back, self.early = None, False
        if self.problem is None and self.job is not None:
            self.problem = self.job.failed(error, operator)

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
                if self.problem is None and self.job is not None:
                    self.problem = self.job.told(self.waits)
                if self.problem is not None:
                    raise self.problem from None

    def failed(self, what: Any, error: BaseException) -> AutotpError:
        """What to raise where a collective fails, at its launch or later."""
        if self.problem is None and self.job is not None:
            self.problem = self.job.told(math.inf)
        if self.problem is not None:
            return self.problem
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        during = "" if self.call is None else f", in call {self.calls} of the module, for {self.call},"
        others = self.others or "The output of the other ranks says what became of them."
        return CollectiveError(
            f"rank {self.rank}: {what}{during} failed: {reason}. {others}", self.rank, what.operator, others
        )


class _Backward:
    """A backward pass. Autograd calls it when the pass is over, and lets go of it too if an error ends the pass."""

    def __init__(self, whereabouts: Whereabouts) -> None:
        self.whereabouts, self.task = whereabouts, whereabouts.back

    def __call__(self) -> None:
        self.whereabouts.back = None

    def __del__(self) -> None:
        if self.whereabouts.back == self.task:
            self.whereabouts.back, self.whereabouts.early = None, True


def _failed_at(error: BaseException) -> str:
    """The operator, with its module, in whose node of a graph an error arose; empty if in none."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        here = frame.f_locals.get("n")  # of an interpreter
        if frame.f_code.co_filename.startswith("<eval_with_key>"):  # of a graph as Python code
            line = linecache.getline(frame.f_code.co_filename, trace.tb_lineno, frame.f_globals).split(maxsplit=1)
            nodes = frame.f_locals["self"].graph.nodes
            here = next((node for node in nodes if line and node.name == line[0].rstrip(":")), None)
        if isinstance(here, fx.Node):
            path = [module for module, _ in here.meta.get("nn_module_stack", {}).values()]
            name = note_of(here).operator or here.name
            return f"{name} in {path[-1]}" if path and path[-1] else name
        trace = trace.tb_next
    return ""
