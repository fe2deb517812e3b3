"""Jobs whose ranks diverge, stop, or compute wrong values, and what is reported."""

import pytest


@pytest.mark.exact
@pytest.mark.distributed
def test_debug_names_the_first_operator_that_goes_wrong(torchrun):
    done = torchrun(2, "monitors.py")
    assert "passed" in done.stdout, done.stdout + done.stderr
    print(done.stdout)


def found(done):
    assert done.stdout.count("FOUND") == 2, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("FOUND"))


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stopped_rank_is_named(torchrun):
    done = torchrun(2, "faults.py", "stopped")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert line.startswith("FOUND 0 CollectiveError [linear_1 in blocks.2]"), done.stdout + done.stderr
    assert "for linear_1 in blocks.2, in call 2 of the module, for training with gradients" in line
    assert "rank 1 has given no sign" in line and "faults.py" in line
    assert "rank 0 waits for the" in done.stderr, "well before the time limit"


@pytest.mark.exact
@pytest.mark.distributed
@pytest.mark.parametrize("how", ["new_call", "known_call"])
def test_ranks_that_make_different_calls_are_told(torchrun, how):
    for line in found(torchrun(2, "faults.py", how)):
        assert "PlanMismatchError" in line and "the ranks made different calls" in line
        assert "training with gradients" in line and "evaluation without gradients" in line


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_that_froze_other_parameters_are_told(torchrun):
    for line in found(torchrun(2, "faults.py", "freezes")):
        assert "the ranks made different calls" in line and ", frozen " in line and " on rank 0" in line, line


@pytest.mark.exact
@pytest.mark.distributed
def test_a_rank_that_comes_late_is_waited_for(torchrun):
    done = torchrun(2, "faults.py", "late")
    assert found(done) == ["FOUND nothing"] * 2
    assert "rank 1 runs at" in done.stderr and "(late)" in done.stderr


def told(done):
    """What each of two ranks reported, by topic."""
    lines = [line.split(maxsplit=2)[1:] for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, done.stdout + done.stderr
    return [dict(text.split(": ", 1) for rank, text in lines if rank == each) for each in "01"]


@pytest.mark.exact
@pytest.mark.distributed
@pytest.mark.parametrize(("strategy", "schedule"), [("data", "overlap"), ("zero3", "none")])
def test_a_rank_that_fails_is_named_and_calls_are_refused(torchrun, strategy, schedule):
    first, second = told(torchrun(2, "faults.py", "one_fails", strategy, schedule))
    why = "CollectiveError: rank 1 failed at embedding in embed: IndexError: index out of range in self (in call 2 of"
    assert first["failing"].startswith(why)
    assert second["failing"] == "IndexError: index out of range in self"
    for each in (first, second):
        assert all(each[what].startswith(why) for what in ("next", "another", "new")), each
        assert each["prompt"] == each["anew"] == "True", each


@pytest.mark.exact
@pytest.mark.distributed
@pytest.mark.parametrize(("strategy", "schedule"), [("data", "none"), ("zero3", "overlap")])
def test_what_fails_alike_on_all_ranks_ends_nothing(torchrun, strategy, schedule):
    for each in told(torchrun(2, "faults.py", "all_fail", strategy, schedule)):
        assert each["failing"] == "IndexError: index out of range in self", each
        assert each["backward"].startswith("ZeroDivisionError"), each
        assert each["next"] == "True", each


@pytest.mark.exact
@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["overlap", "none"])
def test_a_backward_pass_that_ends_early_is_told(torchrun, schedule):
    for each in told(torchrun(2, "faults.py", "backward_fails", "data", schedule)):
        assert each["next"].startswith("CollectiveError: rank 1 failed at its backward pass: RuntimeError"), each
