"""The state of a process: which collective it waits for, for which operator, and in which call of its module.

The computing thread records it here, with a few assignments per collective; another thread may read it at any time and
report it to the other processes (`autotp.runtime.watch`).
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

#: During a wait for a collective of gloo, the time between two checks whether another rank has failed.
_SLICE = timedelta(seconds=1)
#: The number of recorded calls: more than a module has between two looks of the other ranks at this rank's record.
_TRAIL = 2**14
#: The reported error and operator if an error outside the module's own functions ends its backward pass.
ENDED_EARLY = RuntimeError("an error ended it early"), "its backward pass"


class CollectiveError(AutotpError):
    """A collective failed or cannot run: a process ended or failed, or the process group's timeout expired.

    Attributes:
        rank: the rank on which the failure occurred.
        operator: the operator that failed, or for which the collective ran, with its module; empty if there is none.
        others: where the other ranks were, as far as they have reported it; empty if nothing is known.
    """

    def __init__(self, message: str, rank: int = 0, operator: str = "", others: str = "") -> None:
        super().__init__(message)
        self.rank, self.operator, self.others = rank, operator, others


class Job(Protocol):
    """The interface through which a process reports a failure to the other ranks, and learns of theirs."""

    def failed(self, error: BaseException, operator: str) -> AutotpError | None:
        """Reports that this process failed. Returns the error to raise from now on; None if all ranks failed alike."""

    def caller(self) -> Any:
        """The line of the user's source that the calling thread executes."""

    def told(self, waits: float) -> AutotpError | None:
        """The error to raise if another rank failed before it took part in the awaited collective; None otherwise.

        Args:
            waits: the number of the collective among those waited for.
        """

    def refusal(self) -> AutotpError | None:
        """The error to raise if a rank failed in the process group, in any module; None otherwise."""


class Whereabouts:
    """The state of this process.

    Attributes:
        rank: this process's rank.
        at: the operator, with its module, for which the next collective runs.
        waiting: the collective that the process waits for, whose ``str`` describes it; None if there is none.
        waits: the number of collectives waited for so far, including ``waiting``.
        call: the latest call of the module, whose ``str`` describes it; None before the first call.
        calls, caller: the number of calls, and the line of the user's source that made the latest one.
        trail: the latest calls, as (number, call).
        checking: the call, as (number, call), that the ranks are comparing; None if there is none.
        others: describes where the other ranks are, once a wait takes long.
        problem: the error after which collectives would no longer match; waits and calls raise it. None if there is none.
        job: reports failures to and from the other ranks; None if nothing does.
        back: autograd's id of the backward pass in progress; None if there is none.
        early: whether an error ended the latest backward pass.
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
        """Records a call of the module.

        Args:
            call: the call; its ``str`` describes it.
            checked: whether the ranks compare the call before they run it; ``agreed`` records that they have.

        Raises:
            AutotpError: the ranks' collectives no longer match.
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
        """Records that all ranks make the checked call."""
        if self.checking is not None:
            self.trail.append(self.checking)
            self.checking = None

    def going_back(self, at: str) -> None:
        """Records the backward pass in progress, until it ends, and the operator of its next collective."""
        self.at = at
        task = backward_pass()
        if self.back is None and self.job is not None and task != -1:
            self.back = task
            queue_callback(_Backward(self))

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Context of a pass, which reports to the other ranks if an error ends it."""
        try:
            with self.alone():
                yield
        except StopRecomputationError:  # torch.utils.checkpoint ends a recomputation early, on all ranks alike
            raise
        except BaseException as error:
            self._fail(error, _failed_at(error))
            raise

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context that excludes other threads, as ranks might launch their collectives in different orders.

        Raises:
            AutotpError: another thread is in this context. Without a ``job``, this thread waits for it instead.
        """
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
            what: the collective: its ``str`` describes it, and its ``operator`` is the one for which it runs.
            sliced: whether the wait can be interrupted and resumed, as gloo's can.

        Raises:
            CollectiveError: the collective failed.
            AutotpError: another rank will never take part in it.
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
                    work.wait()  # raises its error if it failed
                    return
                if self.problem is None and self.job is not None:
                    self.problem = self.job.told(self.waits)
                if self.problem is not None:
                    raise self.problem from None

    def failed(self, what: Any, error: BaseException) -> AutotpError:
        """The error to raise if a collective fails, at its launch or later."""
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
    """A callback that autograd runs at the end of a backward pass, or releases without a call if an error ends the pass."""

    def __init__(self, whereabouts: Whereabouts) -> None:
        self.whereabouts, self.task = whereabouts, whereabouts.back

    def __call__(self) -> None:
        self.whereabouts.back = None

    def __del__(self) -> None:
        if self.whereabouts.back == self.task:
            self.whereabouts.back, self.whereabouts.early = None, True


def _failed_at(error: BaseException) -> str:
    """The operator, with its module, of the graph node in which an error arose; empty if there is none."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        here = frame.f_locals.get("n")  # in an interpreter's frame
        if frame.f_code.co_filename.startswith("<eval_with_key>"):  # in a frame of a graph's generated code
            line = linecache.getline(frame.f_code.co_filename, trace.tb_lineno, frame.f_globals).split(maxsplit=1)
            nodes = frame.f_locals["self"].graph.nodes
            here = next((node for node in nodes if line and node.name == line[0].rstrip(":")), None)
        if isinstance(here, fx.Node):
            path = [module for module, _ in here.meta.get("nn_module_stack", {}).values()]
            name = note_of(here).operator or here.name
            return f"{name} in {path[-1]}" if path and path[-1] else name
        trace = trace.tb_next
    return ""
