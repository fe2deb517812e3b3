"""How the processes that run a module together agree: about plans, programs and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from autotp.errors import AutotpError, PlanMismatchError
from autotp.plans.plan import Plan
from autotp.runtime.rewrite import Rewritten
from passes.capture import Captured

__all__ = ["Agreement", "JobAgreement", "agreed", "everywhere"]


class Agreement:
    """How the processes that run a graph together agree: this one runs it alone."""

    @property
    def processes(self) -> int:
        """How many there are."""
        return 1

    def gathered(self, mine: Any) -> list[Any]:
        """Every process's value."""
        return [mine]

    def decided(self, decide: Callable[[], Any]) -> Any:
        """The first process's decision."""
        return decide()


class JobAgreement(Agreement):
    """How the processes of a ``torch.distributed`` job agree; each must make the same calls."""

    @property
    def processes(self) -> int:
        """How many there are."""
        return dist.get_world_size()

    def gathered(self, mine: Any) -> list[Any]:
        """Every process's value."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        return found

    def decided(self, decide: Callable[[], Any]) -> Any:
        """Rank 0's decision.

        Raises:
            Exception: on every rank, what rank 0 raised in place of a decision.
        """
        decided: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                decided[0] = decide()
            except Exception as error:  # noqa: BLE001 - the others wait to hear of it
                decided[1] = error
        dist.broadcast_object_list(decided, src=0)
        if decided[1] is not None:
            raise decided[1]
        return decided[0]


def agreed(
    agreement: Agreement,
    captured: Callable[[], Captured],
    decide: Callable[[Captured], Plan],
    build: Callable[[Captured, Plan], Rewritten],
) -> tuple[Plan, Rewritten]:
    """A plan and the graph sharded by it, the same on all processes.

    Args:
        agreement: of the processes.
        captured: captures the model, on every process.
        decide: gives the plan, on the first.
        build: shards the graph, on every process.

    Raises:
        AutotpError: on every process, where one fails.
        PlanMismatchError: the processes have different models.
    """
    mine: Captured | None = None
    problem: Exception | None = None
    try:
        mine = captured()
    except Exception as error:  # noqa: BLE001 - every process must hear of it before it is raised
        problem = error

    def decided() -> str:
        if problem is not None:
            raise problem
        assert mine is not None
        return decide(mine).to_json()

    plan = Plan.from_json(agreement.decided(decided))
    rewritten: Rewritten | None = None
    if mine is not None:
        try:
            rewritten = build(mine, plan)
        except Exception as error:  # noqa: BLE001
            problem = error
    reports = agreement.gathered((plan.hash, None if problem is None else f"{type(problem).__name__}: {problem}"))
    if problem is not None:
        raise problem
    for rank, (digest, failure) in enumerate(reports):
        if failure is not None:
            raise PlanMismatchError(f"rank {rank} failed to build the plan's graph: {failure}")
        if digest != reports[0][0]:
            raise PlanMismatchError(f"rank {rank} holds plan {digest}, rank 0 {reports[0][0]}; give all ranks one model")
    assert rewritten is not None
    return plan, rewritten


@contextmanager
def everywhere(doing: str) -> Iterator[None]:
    """Raises on every rank if any rank fails inside, where no collective may be called."""
    problem: Exception | None = None
    try:
        yield
    except AutotpError as error:
        problem = error
    except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it, whatever it is
        problem = AutotpError(f"{doing}: {str(error) or type(error).__name__}")
        problem.__cause__ = error
    reports = JobAgreement().gathered(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    for rank, report in enumerate(reports):
        if report is not None:
            raise AutotpError(f"rank {rank}: {report}")
