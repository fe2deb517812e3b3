"""What waiting ranks learn about each other from records in a store."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from autotp.errors import AutotpError, PlanMismatchError
from autotp.runtime import agreement
from autotp.runtime.agreement import JobAgreement, _ended, _met
from autotp.runtime.watch import stacks, watch
from autotp.runtime.watch.watch import Watch
from benchmarks.memory import pretended
from passes.world.whereabouts import CollectiveError, Whereabouts


class Work:
    """A fake collective that ends after a number of waiting slices, with ``error`` if given."""

    def __init__(self, slices, error=None):
        self.left, self.error = slices, error

    def is_completed(self):
        return self.left <= 0

    def wait(self, limit=None):
        self.left -= 1
        if self.is_completed() and self.error is None:
            return
        raise self.error if self.is_completed() else RuntimeError("Operation timed out!")


class What:
    operator = "linear_1 in blocks.2"

    def __str__(self):
        return f"the all_reduce over x for {self.operator}"


def watches(ranks, patience=8.0):
    store = dist.HashStore()
    return [Watch(Whereabouts(rank), store, rank, ranks, patience) for rank in range(ranks)]


def test_all_ranks_learn_of_calls_that_differ():
    ranks = watches(4)
    for call in ("training", "evaluation"):
        for each in ranks:
            each.whereabouts.called(call)
    for each in ranks:
        each.look()
    assert all(each.whereabouts.problem is None for each in ranks)
    for each in ranks:
        each.whereabouts.called("evaluation" if each.rank == 2 else "training")
    ranks[0].whereabouts.called("training")  # one rank may be ahead
    for each in (*ranks, *ranks):
        each.look()
    for each in ranks:
        with pytest.raises(
            PlanMismatchError, match="call 3 of the module was for .* on rank [23], and for .* on rank [12];"
        ):
            each.whereabouts.called("training")
        with pytest.raises(PlanMismatchError):
            each.whereabouts.wait(Work(9), What(), sliced=True)


def test_calls_that_ranks_compare_are_no_problem_unless_one_does_not():
    first, second = watches(2)
    first.whereabouts.called("training", checked=True)
    second.whereabouts.called("evaluation", checked=True)  # the comparison tells both, which go on
    for each in (first, second, first):
        each.look()
    for each in (first, second):
        each.whereabouts.called("training", checked=True)
        each.look()
        each.whereabouts.agreed()
    second.look()
    assert first.whereabouts.problem is None and second.whereabouts.problem is None
    first.whereabouts.called("training")
    second.whereabouts.called("evaluation", checked=True)
    for each in (first, second, first):
        each.look()
    assert all("call 3 of the module" in str(each.whereabouts.problem) for each in (first, second))


def test_a_rank_that_waits_long_says_where_the_others_are(caplog):
    ranks = watches(3, patience=0.8)
    for each in ranks:
        each.whereabouts.called("training")
    ranks[0].whereabouts.waiting = ranks[1].whereabouts.waiting = What()
    for _ in range(12):
        for each in ranks[:2]:  # the last rank stops after a while
            each.look()
        if ranks[2].beat < 2:
            ranks[2].look()
        time.sleep(0.1)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("rank 0")]
    assert "for the all_reduce over x for linear_1 in blocks.2" in line and "last call 1, for training" in line
    assert "rank 1 waits for the all_reduce" in line and "rank 2 has given no sign" in line
    with pytest.raises(
        CollectiveError, match="for linear_1 in blocks.2, in call 1 .* failed: reset. .* rank 2 has given"
    ) as told:
        ranks[0].whereabouts.wait(Work(2, RuntimeError("reset\nby peer")), What(), sliced=True)
    assert told.value.rank == 0 and told.value.operator == What.operator and "rank 1 waits" in told.value.others


def test_a_rank_whose_module_is_gone_is_not_lost(monkeypatch):
    first, second = watches(2, patience=0.4)
    for each in (first, second):
        each.whereabouts.called("training")
        each.look()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    second._ended.set()
    second._run()
    first.whereabouts.waiting = What()
    for _ in range(8):
        first.look()
        time.sleep(0.1)
    assert first.whereabouts.others == "rank 1 has the module no more."


def test_a_store_that_gives_no_answer_is_not_waited_for(monkeypatch):
    """For example, the store of a stopped process."""
    (watch,), answers = watches(1, patience=0.1), threading.Event()
    watch.whereabouts.job = watch
    monkeypatch.setattr(watch, "store", SimpleNamespace(check=lambda _: answers.wait() and False))
    for _ in range(3):
        before = time.monotonic()
        with pytest.raises(CollectiveError, match="linear_1 in blocks.2 failed: too late. The job's store gives no"):
            watch.whereabouts.wait(Work(1, RuntimeError("too late")), What(), sliced=True)
    assert time.monotonic() - before < 0.1  # later calls did not ask the store again
    assert str(watch.failed(RuntimeError("lost"), "linear")).startswith("rank 0 failed at linear: RuntimeError: lost")
    answers.set()
    watch._asking.join()


def test_what_looks_is_told_while_the_process_asks(monkeypatch):
    first, second = watches(2)
    answered = threading.Event()
    monkeypatch.setattr("autotp.runtime.watch.watch.default_group", lambda: SimpleNamespace(group_desc=""))
    monkeypatch.setattr("autotp.runtime.watch.watch.describe_group", lambda group, said: None)
    second.failed(CollectiveError("lost"), "linear")
    first._asking = threading.Thread(target=answered.wait, daemon=True)
    first._asking.start()
    first.look()
    assert str(first.whereabouts.problem).startswith("rank 1 failed at linear") and not first.whereabouts.others
    answered.set()
    first._asking.join()


def test_a_wait_in_slices_ends_as_the_collective_does():
    mine = Whereabouts()
    work = Work(3)
    mine.wait(work, What(), sliced=True)
    assert work.left == 0 and mine.waits == 1 and mine.waiting is None
    with pytest.raises(CollectiveError, match="other ranks says"):
        mine.wait(Work(1, RuntimeError("lost")), What(), sliced=False)


def test_ranks_that_do_not_come_are_named(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(agreement, "default_store", dist.HashStore)
    monkeypatch.setattr(agreement, "time_limit", lambda: "30 s")
    with (
        pytest.raises(CollectiveError, match="^rank 1: rank 0, rank 2 did not join autotp.parallelize"),
        _met(1),
    ):
        raise dist.DistStoreError("wait timeout")


def test_nobody_is_waited_for_in_torchs_fake_job():
    with pretended(3):
        assert JobAgreement(watched=True).processes == 3


def test_two_threads_do_not_run_a_module_at_once():
    mine, heard = Whereabouts(), []
    mine.job = SimpleNamespace(failed=lambda error, operator: heard.append(error) or error)

    def call():
        with mine.passing():
            return "called"

    with ThreadPoolExecutor(1) as other:
        with mine.alone():
            assert call() == "called"
            with pytest.raises(AutotpError, match="two threads of this process run the distributed module"):
                other.submit(call).result()
        assert len(heard) == 1 and other.submit(call).result() == "called"


def test_the_thread_ends_when_it_is_told_to():
    (watch,) = watches(1)
    before = threading.active_count()
    watch.start()
    assert threading.active_count() == before + 1
    watch.stop()
    assert threading.active_count() == before


def test_garbage_that_the_thread_collects_ends_it(monkeypatch):
    (watch,), groups = watches(1, patience=0.01), ["a process group"]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    watch.look = gc.collect
    owner = What()
    owner.itself = owner
    weakref.finalize(owner, _ended, watch, groups)
    gc.disable()
    try:
        del owner
        watch.start()
        watch._thread.join(timeout=60)
    finally:
        gc.enable()
    assert not watch._thread.is_alive() and not groups


def test_stacks_are_read_only_of_a_process_that_stands_still(monkeypatch):
    (one,), now, asked = watches(1, patience=8.0), [0.0], []
    stack = [watch.Line(f"{watch._COLLECTIVES}/distributed_c10d.py", 7, "barrier"), watch.Line("train.py", 3, "main")]
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one.observed = SimpleNamespace(read=lambda: asked.append(now[0]) or stack)
    for now[0] in range(10):
        one.whereabouts.called("training")
        one.look()
    assert not asked
    for now[0] in range(10, 40):
        one.look()
    assert asked == [11, 13, 17, 19, 29], "and before it is reported"
    assert one._place(one._seen()[0]).startswith("waits for a collective that is not the module's at train.py:3 (main)")
    monkeypatch.setattr(watch, "collectives_begun", lambda: now[0])
    assert one._seen()[0] == 0, "another one, though the stack is the same"


def test_what_a_function_made_ends_with_it_though_it_was_watched():
    (one,) = watches(1, patience=0.0)  # so that it reads stacks at once

    def watched():
        made = What()
        thread = threading.Thread(target=one.look)
        thread.start()
        thread.join()
        return weakref.ref(made)

    gc.disable()
    try:
        assert watched()() is None
    finally:
        gc.enable()


_FOREIGN_THREADS = """
import ctypes, threading, time
from autotp.runtime.watch.stacks import Stack

libc, address = ctypes.CDLL(None), ctypes.c_void_p
callback = ctypes.CFUNCTYPE(address, address)(lambda _: None)
libc.pthread_create.argtypes, libc.pthread_join.argtypes = [address] * 4, [ctypes.c_ulong, address]
ended = threading.Event()

def begin():
    while not ended.is_set():
        threads = [ctypes.c_ulong() for _ in range(8)]
        for thread in threads:
            libc.pthread_create(ctypes.addressof(thread), None, ctypes.cast(callback, address), None)
        for thread in threads:
            libc.pthread_join(thread, None)

stack, beginning, until = Stack(), threading.Thread(target=begin), time.monotonic() + 2
beginning.start()
while time.monotonic() < until:
    assert stack.read()[-1].function == "<module>"
ended.set()
beginning.join()
"""


def test_a_stack_is_read_while_other_threads_become_known_to_python():
    """`faulthandler.dump_traceback` also reads these threads, which ends Python 3.11 within a second here."""
    subprocess.run([sys.executable, "-c", _FOREIGN_THREADS], check=True, timeout=120)


@pytest.mark.parametrize("alone", [True, False], ids=["one_thread", "all_threads"])
def test_the_stack_of_a_thread_that_has_ended_is_empty(monkeypatch, alone):
    if not alone:
        monkeypatch.setattr(stacks, "_dump", None)
    with ThreadPoolExecutor(1) as other:
        stack = other.submit(stacks.Stack).result()
        assert stack.read()[-1].function == "_bootstrap" != stacks.Stack().read()[-1].function
    assert stack.read() == []
