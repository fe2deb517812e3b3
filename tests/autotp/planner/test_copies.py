"""Tasks shared by forked copies of the process."""

import os
import signal
import time
from functools import partial

import pytest

from autotp.planner.ilp import NEVER, Deadline, copies, side_by_side


@pytest.fixture
def many(monkeypatch):
    """Lets tasks be shared at once: copies are forked however short the tasks are, on three cores."""
    monkeypatch.setattr(copies, "_WORTH", 0.0)
    monkeypatch.setattr(copies, "_cores", lambda: 3)


@pytest.fixture
def place(tmp_path):
    return tmp_path / "who"


def task(place, number, wrong=None):
    """Returns the square of a number and logs the computing process; in copies, calls ``wrong[1]``, if given."""
    with place.open("a") as file:
        file.write(f"{number} {os.getpid()}\n")
    time.sleep(0.01)
    if wrong is not None and os.getpid() != wrong[0]:
        wrong[1]()
    return float(number**2)


def who(place):
    return [tuple(map(int, line.split())) for line in place.read_text().splitlines()]


def all_gone(place):
    """Checks that all copies have ended and were reaped; returns True."""
    for pid in {pid for _, pid in who(place)} - {os.getpid()}:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return True


def descriptors():
    return set(os.listdir("/proc/self/fd"))


def test_copies_do_a_part_each(many, place):
    before = descriptors()
    assert side_by_side([partial(task, place, n) for n in range(40)], NEVER) == [float(n**2) for n in range(40)]
    done = who(place)
    assert sorted(number for number, _ in done) == list(range(40)), "each once"
    assert len({pid for _, pid in done}) == 3
    assert descriptors() == before and all_gone(place)


@pytest.mark.parametrize(
    "wrong",
    [partial(os._exit, 1), partial(int, "x"), lambda: os.kill(os.getpid(), signal.SIGKILL), partial(time.sleep, 60)],
    ids=["exit", "error", "kill", "sleep"],
)
def test_what_copies_do_not_deliver_is_done_here(many, place, monkeypatch, wrong):
    monkeypatch.setattr(copies, "_PATIENCE", 0)
    tasks = [partial(task, place, n, (os.getpid(), wrong)) for n in range(12)]
    begun = time.perf_counter()
    assert side_by_side(tasks, NEVER) == [float(n**2) for n in range(12)]
    assert time.perf_counter() - begun < 30
    assert len({pid for _, pid in who(place)}) == 3, "copies were there"


def test_copies_are_not_waited_for_when_the_time_is_over(many, place, monkeypatch):
    monkeypatch.setattr(copies, "_PATIENCE", 1e9)
    tasks = [partial(task, place, n, (os.getpid(), partial(time.sleep, 60))) for n in range(12)]
    begun = time.perf_counter()
    assert side_by_side(tasks, Deadline.after(0.5)) == [float(n**2) for n in range(12)]
    assert time.perf_counter() - begun < 30


def test_an_error_is_raised(many, place):
    def fail():
        raise KeyError("so")

    with pytest.raises(KeyError, match="so"):
        side_by_side([*(partial(task, place, n) for n in range(6)), fail], NEVER)
    assert all_gone(place)


@pytest.mark.parametrize("clock", [time.perf_counter, lambda: 0.0])
def test_little_work_and_other_clocks_stay_here(place, monkeypatch, clock):
    monkeypatch.setattr(copies, "_cores", lambda: 3)
    if clock is not time.perf_counter:
        monkeypatch.setattr(copies, "_WORTH", 0.0)
    assert side_by_side([partial(task, place, n) for n in range(5)], Deadline(clock=clock)) == [0.0, 1.0, 4.0, 9.0, 16.0]
    assert [number for number, _ in who(place)] == list(range(5)) and {pid for _, pid in who(place)} == {os.getpid()}
    assert side_by_side([], NEVER) == []
