"""Jobs whose ranks go apart, or stop, or compute what they should not: what is said of it."""

import pytest


@pytest.mark.distributed
def test_debug_names_the_first_operator_that_goes_wrong(torchrun):
    done = torchrun(2, "monitors.py")
    assert "passed" in done.stdout, done.stdout + done.stderr
    print(done.stdout)


def found(done):
    assert done.stdout.count("FOUND") == 2, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("FOUND"))


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


@pytest.mark.exact
@pytest.mark.distributed
def test_a_rank_that_comes_late_is_waited_for(torchrun):
    done = torchrun(2, "faults.py", "late")
    assert found(done) == ["FOUND nothing"] * 2
    assert "rank 1 runs at" in done.stderr and "(late)" in done.stderr
