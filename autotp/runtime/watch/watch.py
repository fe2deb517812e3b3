"""A thread in every process of a job, by which ranks learn of each other while they wait for collectives.

Every few seconds, the thread writes a record to the job's store: the module's latest calls, and where the process is. The
records of two neighbouring ranks must agree on the calls that both have made; if not, all ranks raise an error. A rank that
waits long for a collective reads all records, and logs where the others are. The computing thread only assigns to
`passes.world.whereabouts.Whereabouts`, so that an ordinary step costs nothing. If it fails, it writes that to the store
itself: otherwise, the others would wait for it in vain, or match its next collective with the one that they wait for.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autotp.errors import AutotpError, PlanMismatchError
from autotp.runtime.watch.stacks import Line, Stack, caller, is_users
from passes.torch_internals import collectives_begun, default_group, default_store, describe_group
from passes.world.process import time_limit
from passes.world.whereabouts import ENDED_EARLY, CollectiveError, Whereabouts

__all__ = ["Watch", "require_sound_group", "watching"]

_log = logging.getLogger("autotp.watch")

#: Calls in a record. Neighbours read it every few seconds, and remember more calls of their own.
_CALLS = 256
#: Folder of the sources of torch's collectives.
_COLLECTIVES = str(Path(dist.__file__).parent)
#: Precedes the report of a failed rank in a process group's description, which torch keeps as long as the group.
_MARK = "; autotp: "


class Watch:
    """Tells the other processes of a job what this one is doing, and detects faults of theirs.

    Args:
        whereabouts: the state of this process.
        store: a client of the job's store that only this object uses.
        rank, ranks: this process's rank, and the number of ranks.
        patience: seconds after which a wait counts as long.
    """

    def __init__(self, whereabouts: Whereabouts, store: Any, rank: int, ranks: int, patience: float) -> None:
        self.whereabouts, self.store, self.rank, self.ranks, self.patience = whereabouts, store, rank, ranks, patience
        self.observed, self.beat = Stack(), 0
        self._done: Any = None
        self._since = self._there = self._read = 0.0
        self._begun = 0
        self._stack: list[Line] = []
        self._report, self._alike = patience, 0
        self._beats: dict[int, tuple[int, float]] = {}
        self._ended = threading.Event()
        self._asking: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="autotp-watch", daemon=True)

    @property
    def period(self) -> float:
        """Seconds between two calls of `look`."""
        return min(2.0, self.patience / 8)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, which must not outlive Python. The thread may call this itself, as it collects garbage too."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            while not self._ended.wait(self.period) and dist.is_initialized():
                self.look()
            if dist.is_initialized():  # other ranks may still hold the module
                record = self._record("has the module no more") | {"ended": True}
                self.store.set(f"rank {self.rank}", json.dumps(record))
        except Exception as error:  # noqa: BLE001 - the store ends with the job
            _log.debug("the watch ends: %s", error)

    def look(self) -> None:
        """Writes this rank's record, and reads a neighbour's and the problems that ranks have reported."""
        key = self._key("failed")
        waited, place = self._seen()
        if self.whereabouts.early:
            self._tell(self._said(*ENDED_EARLY), key)
        self.beat += 1
        self.store.set(f"rank {self.rank}", json.dumps(self._record(place)))
        neighbour = (self.rank - 1) % self.ranks
        if (theirs := self._of(neighbour)) is not None and (found := self._difference(neighbour, theirs)):
            self.store.set("problem", found)
        if self.whereabouts.problem is None and self.store.check(["problem"]):
            self.whereabouts.problem = PlanMismatchError(self.store.get("problem").decode())
            _log.error("%s", self.whereabouts.problem)
        if self.whereabouts.problem is None and self.store.check([self._key("apart")]):
            self.whereabouts.problem = self._first_failed(math.inf)
        if waited < self.patience / 2:
            self._beats, self._report, self.whereabouts.others = {}, self.patience, ""
            return
        self.whereabouts.others = self._others()
        if waited >= self._report:
            self._report = 4 * waited
            _log.warning("rank %d %s for %.0f s. %s", self.rank, place, waited, self.whereabouts.others)

    def failed(self, error: BaseException, operator: str) -> CollectiveError | None:
        """See `passes.world.whereabouts.Job`; waits until it is known whether all ranks fail at the same point."""
        mine = self._said(error, operator)

        def ask() -> CollectiveError | None:
            first = self._tell(mine, self._key("failed"))
            lone = isinstance(error, CollectiveError) or not isinstance(error, Exception)  # such as KeyboardInterrupt
            if lone or first["where"] != mine["where"] or not self._all_alike():
                return self._apart(first)
            self._alike += 1
            return None

        return self._asked(ask, _refusal(self.rank, operator, mine["told"]))

    def caller(self) -> Line | None:
        """See `passes.world.whereabouts.Job`."""
        return caller()

    def told(self, waits: float) -> CollectiveError | None:
        """See `passes.world.whereabouts.Job`."""
        return self._asked(lambda: self._first_failed(waits), None)

    def refusal(self) -> CollectiveError | None:
        """See `passes.world.whereabouts.Job`."""
        if not (told := _mark()):
            return None
        mine = {"rank": self.rank, "operator": "", "told": told, "where": [0, -1]}
        return self._asked(lambda: self._apart(self._tell(mine, self._key("failed"))), _refusal(self.rank, "", told))

    def _asked(self, ask: Callable[[], CollectiveError | None], unheard: CollectiveError | None) -> CollectiveError | None:
        """Calls ``ask``, which uses the store, for the computing thread; ``unheard`` if the store does not answer.

        If the process that hosts the store is stopped, a request never returns: therefore, another thread makes it.
        """
        answer = [unheard]

        def run() -> None:
            try:
                answer[0] = ask()
            except (RuntimeError, ValueError) as ended:  # the store or the group ended with the job
                _log.debug("nothing is heard of the others: %s", ended)

        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=run, name="autotp-asking", daemon=True)
            self._asking.start()
            self._asking.join(2 * self.patience)
        if self._asking.is_alive():
            self.whereabouts.others = (
                "The job's store gives no answer: the process that has it, often rank 0, is stopped or lost."
            )
        return answer[0]

    def _said(self, error: BaseException, operator: str) -> dict[str, Any]:
        """The report of a failure; its ``where`` is equal on ranks that fail at the same point."""
        own, name = self.whereabouts, type(error).__name__
        reason = next(iter(str(error).splitlines()), "")
        why = f"{operator and f' at {operator}'}: {name}{reason and f': {reason}'}"
        during = f" (in call {own.calls} of the module, for {own.call})" if own.calls else ""
        where = [own.calls, own.waits, operator, name]
        return {"rank": self.rank, "operator": operator, "told": f"rank {self.rank} failed{why}{during}", "where": where}

    def _key(self, what: str) -> str:
        return f"{what} {self._alike}"

    def _tell(self, mine: Mapping[str, Any], key: str) -> Any:
        """Reports that this rank failed, unless another has reported before; returns the first report."""
        return json.loads(self.store.compare_set(key, "", json.dumps(mine)))

    def _first_failed(self, waits: float) -> CollectiveError | None:
        """The error of the first failed rank, as in ``told``; the calling thread waits for the store."""
        if self.store.check([self._key("failed")]):
            first = json.loads(self.store.get(self._key("failed")))
            if first["where"][1] < waits:
                return self._apart(first)
        return None

    def _all_alike(self) -> bool:
        """Whether all ranks report the same failure within the patience; those that have not failed yet go on meanwhile."""
        until = time.monotonic() + self.patience
        self.store.add(self._key("alike"), 1)
        while time.monotonic() < until and not self.store.check([self._key("apart")]):
            if self.store.add(self._key("alike"), 0) == self.ranks:
                return True
            time.sleep(self.period / 20)
        return False

    def _apart(self, first: Mapping[str, Any]) -> CollectiveError:
        """The error that the ranks' collectives no longer match; tells all ranks, and marks the process group."""
        self.store.set(self._key("apart"), "")
        if not _mark():
            describe_group(default_group(), f"{default_group().group_desc}{_MARK}{first['told']}")
        return _refusal(first["rank"], first["operator"], first["told"])

    def _seen(self) -> tuple[float, str]:
        """How many seconds the process has waited for the current collective, autotp's or another, and where it is.

        The stack is read only if the module has done nothing for a while, at growing intervals, and before a wait is
        reported. A collective that begins, in any group, ends a wait, as successive collectives may have the same stack.
        """
        own, now, begun = self.whereabouts, time.monotonic(), collectives_begun()
        done = own.calls, own.waits, own.waiting is None
        if done != self._done:
            self._done, self._stack, self._read = done, [], self.patience / 4
            self._since = self._there = now
        if begun != self._begun:
            self._begun, self._there = begun, now
        foreign = bool(self._stack) and self._stack[0].path.startswith(_COLLECTIVES)
        if (quiet := now - self._since) >= self._read or (foreign and now - self._there >= self._report):
            stack, self._read = self.observed.read(), 2 * quiet
            if stack[:1] != self._stack[:1]:
                self._there = now
            self._stack, foreign = stack, bool(stack) and stack[0].path.startswith(_COLLECTIVES)
        waited = quiet if own.waiting is not None else now - self._there if foreign else 0.0
        return waited, self._place(waited)

    def _record(self, place: str) -> dict[str, Any]:
        calls = [(number, str(call), checking) for number, (call, checking) in list(self._calls().items())[-_CALLS:]]
        texts = {_digest(text): text for _, text, _ in calls}
        trail = [(number, _digest(text), checking) for number, text, checking in calls]
        return {"beat": self.beat, "place": place, "trail": trail, "texts": texts}

    def _calls(self) -> dict[int, tuple[Any, bool]]:
        """Number of a call -> the call, and whether the ranks are comparing it now; for the latest calls."""
        checking = self.whereabouts.checking
        found = {number: (call, False) for number, call in list(self.whereabouts.trail)}
        return found if checking is None else found | {checking[0]: found.get(checking[0], (checking[1], True))}

    def _place(self, waited: float) -> str:
        """Describes where the process is, for messages."""
        own = self.whereabouts
        waiting = own.waiting
        if waiting is None and waited > self.period:
            waiting = "a collective that is not the module's"
        place = "runs" if waiting is None else f"waits for {waiting}"
        mine = next((each for each in self._stack if is_users(each.path)), None)
        last = f"last call {own.calls}{_at(own.caller)}, for {own.call}" if own.calls else "before the first call"
        return f"{place}{_at(mine)}, {last}"

    def _of(self, rank: int) -> Any:
        """A rank's latest record; None if there is none."""
        key = f"rank {rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def _difference(self, rank: int, theirs: Mapping[str, Any]) -> str:
        """Describes the first call in which this rank and another differ; empty if they agree."""
        mine = self._calls()
        for number, digest, checking in theirs["trail"]:
            call, checks = mine.get(number, (None, True))
            # Calls that both ranks are comparing raise an error there.
            if not (checking and checks) and call is not None and _digest(str(call)) != digest:
                return (
                    f"the ranks made different calls: call {number} of the module was for {call} on rank "
                    f"{self.rank}, and for {theirs['texts'][digest]} on rank {rank}; call the module alike on all ranks "
                    "(parts of the batch of different sizes are for inputs='uneven')"
                )
        return ""

    def _others(self) -> str:
        """Describes where the other ranks are, grouped by place."""
        places: dict[str, list[int]] = {}
        for rank in range(self.ranks):
            if rank == self.rank:
                continue
            record = self._of(rank)
            beat, now = (record or {"beat": -1})["beat"], time.monotonic()
            if self._beats.setdefault(rank, (beat, now))[0] != beat:
                self._beats[rank] = beat, now
            silent = now - self._beats[rank][1]
            place = "has not come to autotp.parallelize" if record is None else record["place"]
            if record is not None and not record.get("ended") and silent > 2.5 * self.period:
                place = f"has given no sign for {silent:.0f} s: it is stopped, or its machine is lost; before, it {place}"
            places.setdefault(place, []).append(rank)
        return " ".join(f"{_ranks(found)} {place}." for place, found in places.items())


def _at(line: Line | None) -> str:
    return "" if line is None else f" at {line}"


def _mark() -> str:
    """The failure that marks the job's current process group; empty if there is none."""
    try:
        return default_group().group_desc.partition(_MARK)[2]
    except ValueError as error:
        raise AutotpError(
            "the process group is gone (torch.distributed.destroy_process_group): call the module before it is destroyed, "
            "or distribute the model again in a new one"
        ) from error


def require_sound_group() -> None:
    """Checks that no rank is known to have failed in the job's process group.

    Raises:
        CollectiveError: a rank has failed.
    """
    if told := _mark():
        raise _refusal(dist.get_rank(), "", told)


def _refusal(rank: int, operator: str, told: str) -> CollectiveError:
    return CollectiveError(
        f"{told}. The ranks' collectives would not match any more: to go on, end the process group "
        "(torch.distributed.destroy_process_group) and distribute the model again, which makes a new one",
        rank,
        operator,
    )


def _digest(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}:"


def watching(whereabouts: Whereabouts) -> Watch | None:
    """Starts a `Watch` of this process of a job; None if the job's store allows no further client.

    A wait counts as long after 30 s, or after a quarter of the process group's time limit if that is less.
    """
    whole: Any = default_store()
    try:
        store = whole.clone()  # a client of its own, which never waits for the computing thread
    except RuntimeError:  # the store is in this process, as for torch's fake process group
        return None
    rank = dist.get_rank()
    number = store.add(f"autotp/watches/{rank}", 1)
    patience = min(30.0, time_limit().total_seconds() / 4)
    watch = Watch(whereabouts, dist.PrefixStore(f"autotp/watch/{number}", store), rank, dist.get_world_size(), patience)
    whereabouts.job = watch
    watch.start()
    return watch
