"""Agreement between the processes that run a module together, on plans, programs and schedules."""

from __future__ import annotations

import os
import pickle
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotp.errors import AutotpError, PlanMismatchError
from autotp.plans.plan import Plan, fingerprint
from autotp.runtime.rewrite import Rewritten
from autotp.runtime.watch.watch import Watch, require_sound_group, watching
from costmodel.text.numbers import whole_of
from passes.capture import Captured
from passes.torch_internals import default_store
from passes.world.process import all_gather_single, made_once, time_limit
from passes.world.whereabouts import CollectiveError, Whereabouts

__all__ = ["Agreement", "JobAgreement", "agreed", "everywhere", "join_job", "told"]

_CPU = torch.device("cpu")


class Agreement:
    """Agreement between the processes that run a graph together. In this base class, there is only one process.

    Attributes:
        whereabouts: what this process is doing, for messages and for other ranks.
    """

    def __init__(self) -> None:
        self.whereabouts = Whereabouts()

    @property
    def processes(self) -> int:
        """The number of processes."""
        return 1

    def gathered(self, mine: Any) -> list[Any]:
        """All-gathers a value: returns one per process, in the order of ranks."""
        return [mine]

    def alike(self, mine: int) -> bool:
        """Whether all processes pass the same integer, of up to 63 bits."""
        return self.gathered(mine).count(mine) == self.processes

    def decided(self, decide: Callable[[], Any]) -> Any:
        """Calls ``decide`` on the first process, and returns its result on all."""
        return decide()


class _Exchange:
    """Describes an exchange between the processes for messages, as `Whereabouts.wait` expects it."""

    operator = ""

    def __init__(self, doing: str = "the exchange by which the ranks agree") -> None:
        self.doing = doing

    def __str__(self) -> str:
        return self.doing


@contextmanager
def _met(rank: int) -> Iterator[None]:
    """Names the ranks that did not arrive, if creating the first process group of all ranks times out."""
    if dist.get_backend() == "fake":  # its other ranks never arrive, and its store keeps nothing
        yield
        return
    store = default_store()
    key = "autotp/came/{}".format
    store.set(key(rank), "")
    try:
        yield
    except dist.DistStoreError as error:
        away = [f"rank {each}" for each in range(dist.get_world_size()) if not store.check([key(each)])]
        raise CollectiveError(
            f"rank {rank}: {', '.join(away) or 'another rank'} did not join autotp.parallelize within {time_limit()}; all "
            f"ranks must call it: {error}",
            rank,
        ) from error


class JobAgreement(Agreement):
    """Agreement between the processes of a ``torch.distributed`` job. All of them must make the same calls.

    Args:
        watched: whether to start a thread that watches the processes (`autotp.runtime.watch`). The agreement then has a
            process group of its own, so that its collectives are never matched with those of the computation; in place
            of NCCL, it uses gloo, so that no process waits for a GPU.

    Raises:
        CollectiveError: a rank has failed in this process group.
    """

    def __init__(self, *, watched: bool = False) -> None:
        require_sound_group()
        self.whereabouts = Whereabouts(dist.get_rank())
        self._groups: list[Any] = []
        if watched and dist.get_world_size() > 1:
            backend = "gloo" if dist.get_backend() == "nccl" else None  # torch's fake backend has no other
            with _met(self.whereabouts.rank):
                self._groups.append(made_once("agreement", dist.new_group, timeout=time_limit(), backend=backend))
            weakref.finalize(self, _ended, watching(self.whereabouts), self._groups)
        self._sliced = dist.get_backend(self._group) == "gloo"
        on_gpus = dist.get_backend(self._group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else _CPU

    @property
    def _group(self) -> Any:
        return self._groups[0] if self._groups else None

    @property
    def processes(self) -> int:
        """The number of processes."""
        return dist.get_world_size()

    def gathered(self, mine: Any) -> list[Any]:
        """All-gathers a value: returns one per process, in the order of ranks."""
        sent = _packed(mine)
        sizes = [int(size) for size in self._gathered(torch.tensor([sent.numel()], device=_CPU))]
        padded = torch.cat([sent, sent.new_zeros(max(sizes) - sent.numel())])
        every = self._gathered(padded)
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(every, sizes, strict=True)]

    def alike(self, mine: int) -> bool:
        """Whether all processes pass the same integer, of up to 63 bits."""
        return bool((self._gathered(torch.tensor([mine], device=_CPU)) == mine).all())

    def require_same(self, options: Mapping[str, Any]) -> None:
        """Checks that all processes were given the same options.

        Args:
            options: name of an option -> its value, compared by its ``repr``.

        Raises:
            PlanMismatchError: on every process, if an option differs; names the ranks and the option.
        """
        mine = {name: repr(value) for name, value in options.items()}
        if self.alike(zlib.crc32(str(sorted(mine.items())).encode())):
            return
        every = self.gathered(mine)
        for rank, other in enumerate(every):
            for name in sorted(other.keys() | every[0].keys()):
                if other.get(name) != every[0].get(name):
                    raise PlanMismatchError(
                        f"{name} is {other.get(name)} on rank {rank}, and {every[0].get(name)} on rank 0: give all ranks "
                        "one model and the same options"
                    )

    def decided(self, decide: Callable[[], Any]) -> Any:
        """Calls ``decide`` on rank 0, and returns its result on all ranks.

        Raises:
            Exception: on every rank, the exception that ``decide`` raised on rank 0.
        """
        sent = torch.empty(0, dtype=torch.uint8, device=_CPU)
        if self.whereabouts.rank == 0:
            try:
                sent = _packed((decide(), None))
            except Exception as error:  # noqa: BLE001 - the other ranks wait for a result
                error.add_note("This happened on rank 0, which decides for all ranks.")
                sent = _packed((None, _sendable(error)))
        size = self._of_rank_0(torch.tensor([sent.numel()], device=_CPU))
        decided = self._of_rank_0(sent if sent.numel() else torch.empty(int(size), dtype=torch.uint8, device=_CPU))
        decision, problem = pickle.loads(decided.numpy().tobytes())
        if problem is not None:
            raise problem
        return decision

    def _gathered(self, mine: Tensor) -> Tensor:
        given = mine.to(self._device)
        found = given.new_empty((self.processes, *given.shape))
        self._wait(all_gather_single, found.view(-1), given)
        return found.cpu()

    def _of_rank_0(self, tensor: Tensor) -> Tensor:
        given = tensor.to(self._device)
        self._wait(dist.broadcast, given, 0)
        return given.cpu()

    def _wait(self, begin: Callable[..., Any], *given: Any) -> None:
        try:
            work = begin(*given, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self.whereabouts.failed(_Exchange(), error) from error
        self.whereabouts.wait(work, _Exchange(), sliced=self._sliced)


def _packed(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _sendable(error: Exception) -> Exception:
    """The error itself if it can be pickled, else an ``AutotpError`` with the same text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a foreign error may hold anything
        return AutotpError(f"{type(error).__name__}: {error}")
    return error


def _ended(watch: Watch | None, groups: list[Any]) -> None:
    if watch is not None:
        watch.stop()
    groups.clear()  # a group must not outlive the job (see `passes.world.process`)


def join_job(instead: str, backend: str, **options: Any) -> None:
    """Creates the process group of the job that torchrun started.

    Args:
        instead: what to do if there is no job: the beginning of the error message.
        backend, options: arguments of ``torch.distributed.init_process_group``.

    Raises:
        AutotpError: an environment variable that torchrun sets is missing or invalid, or the rendezvous fails.
    """
    missing = [key for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
    if missing:
        raise AutotpError(f"{instead} ({', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set)")
    world, most = whole_of(os.environ["WORLD_SIZE"], "environment: WORLD_SIZE"), 2**16 - 1
    whole_of(os.environ["RANK"], "environment: RANK", least=0, most=world - 1)
    whole_of(os.environ["MASTER_PORT"], "environment: MASTER_PORT", least=0, most=most)
    try:
        store, rank, world = next(dist.rendezvous("env://"))
        # After destroy_process_group, the job's store still has the addresses of that group: use another prefix.
        own = dist.PrefixStore(f"autotp/{store.add(f'autotp/groups of rank {rank}', 1)}", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=world, **options)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise AutotpError(f"the {world} processes of the job did not meet at {where}: {error}") from error


def agreed(
    agreement: Agreement,
    captured: Callable[[], Captured],
    decide: Callable[[Captured], Plan],
    build: Callable[[Captured, Plan], Rewritten],
) -> tuple[Plan, Rewritten]:
    """Makes a plan on the first process, shards the graph by it on every process, and checks that all have the same.

    Args:
        agreement: the agreement of the processes.
        captured: captures the model; called on every process.
        decide: makes the plan; called on the first process only.
        build: shards the graph; called on every process.

    Returns:
        The plan and the sharded graph.

    Raises:
        AutotpError: on every process, if one fails.
        PlanMismatchError: the processes have different models, or inputs of different shapes.
    """
    mine: Captured | None = None
    problem: Exception | None = None
    try:
        mine = captured()
    except Exception as error:  # noqa: BLE001 - raised once all processes know of it
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
    if any(failure is not None for _, failure in reports):
        graphs = agreement.gathered(None if mine is None else fingerprint(mine))
        other = next(
            (rank for rank, graph in enumerate(graphs) if None not in (graph, graphs[0]) and graph != graphs[0]), 0
        )
        if other:
            raise PlanMismatchError(
                f"ranks have different models, or inputs of different shapes or dtypes: rank 0's graph is {graphs[0]}, "
                f"rank {other}'s {graphs[other]}; build the same model, and give inputs of the same kind, on every rank"
            ) from problem
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
def told(doing: str) -> Iterator[None]:
    """Turns a failure of torch's own collectives in this context into an error that says what the ranks were doing.

    Raises:
        CollectiveError: a collective failed.
    """
    try:
        yield
    except RuntimeError as error:
        raise Whereabouts(dist.get_rank()).failed(_Exchange(doing), error) from error


@contextmanager
def everywhere(doing: str, join: Callable[[], None] | None = None) -> Iterator[None]:
    """Raises an ``AutotpError`` on every rank if any rank fails in this context. No collective may be called inside.

    Args:
        doing: the beginning of the message, such as ``cannot parallelize``.
        join: creates the process group, if there is none. If it fails, an error raised inside takes precedence.
    """
    if join is None and not dist.is_initialized():
        raise AutotpError(f"{doing}: no process group; autotp.parallelize, which comes first, makes one")
    problem: Exception | None = None
    try:
        yield
    except AutotpError as error:
        problem = error
    except Exception as error:  # noqa: BLE001 - the other ranks must know of any failure
        problem = AutotpError(f"{doing}: {str(error) or type(error).__name__}")
        problem.__cause__ = error
    try:
        if join is not None:
            join()
    except AutotpError as error:
        raise problem or error from None
    reports = JobAgreement().gathered(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    for rank, report in enumerate(reports):
        if report is not None:
            raise AutotpError(f"rank {rank}: {report}")
