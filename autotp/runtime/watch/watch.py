"""A thread in every process of a job, by which ranks learn of each other while they wait.

Every few seconds it leaves a record in the job's store: what the module was called for lately, and where the process is.
The records of two neighbours must agree on the calls that both have made; if not, all ranks raise that. A rank that waits
long for a collective reads all records, and logs where the others are. The thread that computes only assigns to
`passes.world.whereabouts.Whereabouts`, so that an ordinary step costs nothing. Where it fails, it says so in the store
itself: the others would wait for it in vain, or take its next collective for the one that it owes them.
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
from autotp.runtime.watch.stacks import Line, caller, is_users, stacks
from passes.torch_internals import collectives_begun, default_group, default_store, describe_group
from passes.world.process import time_limit
from passes.world.whereabouts import ENDED_EARLY, CollectiveError, Whereabouts

__all__ = ["Watch", "require_sound_group", "watching"]

_log = logging.getLogger("autotp.watch")

#: Calls of a record. Neighbours read records every few seconds, and remember more calls of their own.
_CALLS = 256
#: Sources of torch's collectives.
_COLLECTIVES = str(Path(dist.__file__).parent)
#: Begins what the description of a process group says of ranks that failed: torch has it for as long as the group.
_MARK = "; autotp: "


class Watch:
    """Tells the other processes of a job what this one is doing.

    Args:
        whereabouts: what that is.
        store: the job's, which this thread has for itself.
        rank, ranks: of this process, and how many there are.
        patience: seconds after which a wait is long.
    """

    def __init__(self, whereabouts: Whereabouts, store: Any, rank: int, ranks: int, patience: float) -> None:
        self.whereabouts, self.store, self.rank, self.ranks, self.patience = whereabouts, store, rank, ranks, patience
        self.observed, self.beat = threading.get_ident(), 0
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
        """Seconds between two looks."""
        return min(2.0, self.patience / 8)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; Python must not end while it runs. The thread itself may call this: it collects garbage, too."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            while not self._ended.wait(self.period) and dist.is_initialized():
                self.look()
            if dist.is_initialized():  # others may have the module yet
                record = self._record("has the module no more") | {"ended": True}
                self.store.set(f"rank {self.rank}", json.dumps(record))
        except Exception as error:  # noqa: BLE001 - a job that ends takes its store along
            _log.debug("the watch ends: %s", error)

    def look(self) -> None:
        """Leaves a record, and reads what concerns this rank."""
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
        """See `passes.world.whereabouts.Job`; waits until it is known whether the others fail alike."""
        mine = self._said(error, operator)

        def ask() -> CollectiveError | None:
            first = self._tell(mine, self._key("failed"))
            lone = isinstance(error, CollectiveError) or not isinstance(error, Exception)  # as an interrupt is
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
        """What the store says, asked for by a thread that computes; ``unheard`` where it says nothing.

        A store waits without end for a process that has it and is stopped: so must another thread, and not this one.
        """
        answer = [unheard]

        def run() -> None:
            try:
                answer[0] = ask()
            except (RuntimeError, ValueError) as ended:  # of the store or the group, with the job
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
        """What is told of a failure; all that fail alike are in the same place."""
        own, name = self.whereabouts, type(error).__name__
        reason = next(iter(str(error).splitlines()), "")
        why = f"{operator and f' at {operator}'}: {name}{reason and f': {reason}'}"
        during = f" (in call {own.calls} of the module, for {own.call})" if own.calls else ""
        where = [own.calls, own.waits, operator, name]
        return {"rank": self.rank, "operator": operator, "told": f"rank {self.rank} failed{why}{during}", "where": where}

    def _key(self, what: str) -> str:
        return f"{what} {self._alike}"

    def _tell(self, mine: Mapping[str, Any], key: str) -> Any:
        """Says that this rank failed, unless another has said so; what the first said."""
        return json.loads(self.store.compare_set(key, "", json.dumps(mine)))

    def _first_failed(self, waits: float) -> CollectiveError | None:
        """What is wrong, as in ``told``; this thread waits for the store."""
        if self.store.check([self._key("failed")]):
            first = json.loads(self.store.get(self._key("failed")))
            if first["where"][1] < waits:
                return self._apart(first)
        return None

    def _all_alike(self) -> bool:
        """Whether all ranks fail as the first did; those that did not hear of it go on, and will."""
        until = time.monotonic() + self.patience
        self.store.add(self._key("alike"), 1)
        while time.monotonic() < until and not self.store.check([self._key("apart")]):
            if self.store.add(self._key("alike"), 0) == self.ranks:
                return True
            time.sleep(self.period / 20)
        return False

    def _apart(self, first: Mapping[str, Any]) -> CollectiveError:
        """The ranks' collectives do not match any more: says so to all, and marks the process group."""
        self.store.set(self._key("apart"), "")
        if not _mark():
            describe_group(default_group(), f"{default_group().group_desc}{_MARK}{first['told']}")
        return _refusal(first["rank"], first["operator"], first["told"])

    def _seen(self) -> tuple[float, str]:
        """For how many seconds the process has been waiting for one collective, autotp's or another, and where it is.

        Its stack is read only if the module has done nothing for a while, and then ever more rarely, and before a wait is
        reported. Collectives that begin, in whatever group, end a wait: of all of them the stack may be the same.
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
            stack, self._read = stacks().get(self.observed, []), 2 * quiet
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
        """The last calls, by number, and whether the ranks are comparing them."""
        checking = self.whereabouts.checking
        found = {number: (call, False) for number, call in list(self.whereabouts.trail)}
        return found if checking is None else found | {checking[0]: found.get(checking[0], (checking[1], True))}

    def _place(self, waited: float) -> str:
        """Where the process is, in words."""
        own = self.whereabouts
        waiting = own.waiting
        if waiting is None and waited > self.period:
            waiting = "a collective that is not the module's"
        place = "runs" if waiting is None else f"waits for {waiting}"
        mine = next((each for each in self._stack if is_users(each.path)), None)
        last = f"last call {own.calls}{_at(own.caller)}, for {own.call}" if own.calls else "before the first call"
        return f"{place}{_at(mine)}, {last}"

    def _of(self, rank: int) -> Any:
        """A rank's last record, if there is one."""
        key = f"rank {rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def _difference(self, rank: int, theirs: Mapping[str, Any]) -> str:
        """What two ranks called the module for, where that is not the same."""
        mine = self._calls()
        for number, digest, checking in theirs["trail"]:
            call, checks = mine.get(number, (None, True))
            # Of calls that both compare themselves, they will tell.
            if not (checking and checks) and call is not None and _digest(str(call)) != digest:
                return (
                    f"the ranks made different calls: call {number} of the module was for {call} on rank "
                    f"{self.rank}, and for {theirs['texts'][digest]} on rank {rank}; call the module alike on all ranks "
                    "(parts of the batch of different sizes are for inputs='uneven')"
                )
        return ""

    def _others(self) -> str:
        """Where the other ranks are, those in one place together."""
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
    """What a rank told when it failed, if that was in the job's process group as it is now."""
    try:
        return default_group().group_desc.partition(_MARK)[2]
    except ValueError as error:
        raise AutotpError(
            "the process group is gone (torch.distributed.destroy_process_group): call the module before it is destroyed, "
            "or distribute the model again in a new one"
        ) from error


def require_sound_group() -> None:
    """Checks that no rank has failed in the job's process group, as far as this one was told.

    Raises:
        CollectiveError: one has.
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
    """A thread that watches this process of a job, started; None where the job's store has no further clients.

    Args:
        whereabouts: of this process. A wait is long that takes 30 s, or a quarter of the process group's time limit.
    """
    whole: Any = default_store()
    try:
        store = whole.clone()  # a client of its own, which never waits for the thread that computes
    except RuntimeError:  # it is in this process, as that of torch's fake process group
        return None
    rank = dist.get_rank()
    number = store.add(f"autotp/watches/{rank}", 1)
    patience = min(30.0, time_limit().total_seconds() / 4)
    watch = Watch(whereabouts, dist.PrefixStore(f"autotp/watch/{number}", store), rank, dist.get_world_size(), patience)
    whereabouts.job = watch
    watch.start()
    return watch
