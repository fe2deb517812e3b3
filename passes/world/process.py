"""The world of one process of a ``torch.distributed`` job: its coordinates on a mesh, and its process groups."""

from __future__ import annotations

import atexit
import math
import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # DTensor imports it later, when its default arguments would keep the group alive
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from costmodel.errors import AutotpError
from costmodel.text.numbers import MOST_DEVICES, whole_of
from passes.torch_internals import default_group, forget_groups, group_time_limit, is_zerotensor
from passes.world.pending import Pending
from passes.world.whereabouts import Whereabouts
from passes.world.world import World, reduced

__all__ = ["ProcessWorld", "all_gather_single", "made_once", "time_limit"]

#: The most bytes that a device receives in a pairwise exchange over gloo. Gloo's rings take one step per member, for which
#: every process has to wake up; pairwise messages are all sent at once, but more bytes cross an uplink that is shared.
_PAIRWISE = 64 * 2**10
#: The least bytes for each member of a group that are exchanged as single messages over gloo; see `_Messages`. For fewer,
#: the time of the collective that follows them is more than they save.
_MESSAGE = 512 * 2**10
#: The job's process group -> key -> the object that `made_once` has made.
_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
atexit.register(_MADE.clear)  # see `_let_go`
#: Torch 2.12's names, or else those of earlier versions.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _UnderWay(Pending):
    """A collective of a process group. Waits for it are recorded in ``Whereabouts``; its errors name its operator."""

    def __init__(self, world: ProcessWorld, kind: str, axes: tuple[int, ...], *rest: Any) -> None:
        super().__init__(*rest)
        self._world, self._kind, self._axes, self.operator = world, kind, axes, world.whereabouts.at

    def _arrive(self, work: Any) -> None:
        self._world.whereabouts.wait(work, self, sliced=self._axes in self._world.sliced)

    def __str__(self) -> str:
        names = self._world.device_mesh.mesh_dim_names or self._axes
        over = ", ".join(str(names[axis]) for axis in self._axes) or "all ranks"
        return f"the {self._kind} over {over}{f' for {self.operator}' if self.operator else ''}"


class _Messages:
    """Messages from and to every other member of a gloo group, as the handle of one collective.

    All receives are posted before the first send. Gloo announces a receive behind the data that it is sending on the same
    connection, and the other process sends no data before it reads this: gloo's own ``all_to_all`` and ``all_gather``,
    which send first, use a link in one direction at a time.

    Nothing but the end of a message ends a wait for it (a timeout closes the connection), so a collective of one byte each
    follows: a wait for this one can be interrupted and resumed, and when it has ended, all members have sent theirs.

    Args:
        result: has a row for each member of the group, which is received from it; this member's own row is copied.
        sent: has a row for each member, which is sent to it.
        group: the group.
        async_op: always true, as of a collective in progress.
    """

    def __init__(self, result: Tensor, sent: Tensor, *, group: dist.ProcessGroup, async_op: bool) -> None:
        own, members = dist.get_rank(group), len(result)
        others = [(own + distance) % members for distance in range(1, members)]
        receives = [dist.irecv(result[other], group=group, group_src=other) for other in reversed(others)]
        sends = [dist.isend(sent[other], group=group, group_dst=other) for other in others]
        self._messages: list[Any] = [*receives, *sends]
        flags = torch.zeros(members, dtype=torch.uint8)
        self._last = dist.all_to_all_single(flags.clone(), flags, group=group, async_op=async_op)
        with torch.no_grad():
            result[own].copy_(sent[own])

    def wait(self, *timeout: timedelta) -> None:
        self._last.wait(*timeout)
        while self._messages:  # a second wait for the same message would wait for another one
            self._messages[-1].wait()
            self._messages.pop()

    def is_completed(self) -> bool:
        return self._last.is_completed()

    def get_future(self) -> Any:
        return self._last.get_future()


class ProcessWorld(World):
    """One process of a job: its coordinates on a ``DeviceMesh``, and its process groups.

    Args:
        mesh: the device mesh; its axes are the plan's.
        groups: the sets of axes that need a process group; see ``join``.
        whereabouts: the state of this process; by default, a new one, which no other thread reads.

    Attributes:
        sliced: the sets of axes whose process groups use gloo, so that waits can be interrupted and resumed.
    """

    def __init__(
        self, mesh: DeviceMesh, groups: Iterable[tuple[int, ...]] = (), whereabouts: Whereabouts | None = None
    ) -> None:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "this rank is not part of the mesh"
        super().__init__(tuple(mesh.shape), [tuple(coordinate)])
        self.device_mesh, self.sliced = mesh, set[tuple[int, ...]]()
        if whereabouts is not None:
            self.whereabouts = whereabouts
        self._process_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._across = set[tuple[int, ...]]()
        self.join(groups)
        atexit.register(_let_go, weakref.ref(self), weakref.ref(mesh))

    def join(self, groups: Iterable[tuple[int, ...]]) -> None:
        """See ``World.join``. All processes must join the same groups."""
        local = _ranks_of_node()
        for axes in sorted(set(groups) - self._process_groups.keys()):
            group = self._process_groups[axes] = self._make_group(axes)
            with suppress(RuntimeError):  # torch's fake process group has no time limit
                group.set_timeout(time_limit())
            if dist.get_backend(group) == "gloo":
                self.sliced.add(axes)
                if len({rank // local for rank in dist.get_process_group_ranks(group)}) > 1:
                    self._across.add(axes)

    def _make_group(self, axes: tuple[int, ...]) -> dist.ProcessGroup:
        if len(axes) == 1:
            return self.device_mesh.get_group(axes[0])
        ranks = self.device_mesh.mesh
        rest = [a for a in range(ranks.dim()) if a not in axes]
        several = ranks.permute(*rest, *axes).reshape(-1, math.prod(ranks.shape[a] for a in axes)).tolist()
        made = [made_once(("group", *members), dist.new_group, members) for members in several]
        return next(group for group, members in zip(made, several, strict=True) if dist.get_rank() in members)

    def of_first(self, tensor: Tensor) -> Tensor:
        """See ``World.of_first``. Uses gloo, so that no process waits for a GPU, or torch's fake group in a fake job."""
        if () not in self._process_groups:
            whole: Any = dist.group.WORLD if dist.get_backend() in ("gloo", "fake") else None
            self._process_groups[()] = whole or made_once("gloo", dist.new_group, timeout=time_limit(), backend="gloo")
            if dist.get_backend(self._process_groups[()]) == "gloo":
                self.sliced.add(())
        self.whereabouts.at = "the random numbers of a pass"
        return self._begun("broadcast", (), tensor, None, dist.broadcast, tensor, 0).wait()[0]

    def all_reduce(self, parts: Sequence[Tensor], axes: tuple[int, ...], op: str = "sum") -> Pending:
        """See ``World.all_reduce``."""
        return self.all_reduce_([parts[0].clone(memory_format=torch.contiguous_format)], axes, op)

    def all_reduce_(self, parts: Sequence[Tensor], axes: tuple[int, ...], op: str = "sum") -> Pending:
        """See ``World.all_reduce_``."""
        value = parts[0]
        # for a single element, gloo's ring is no slower
        if value.numel() > 1 and self._pairwise(value, axes):
            return self._everybodys(value, axes).then(lambda given: [reduced(given[0], op)])
        reduction = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        return self._begun("all_reduce", axes, value, None, dist.all_reduce, value, reduction)

    def all_gather(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.all_gather``."""
        if self._pairwise(parts[0], (axis,)):
            return self._everybodys(parts[0], (axis,))
        part, members = _as_bytes(_in_memory(parts[0])), self.mesh_shape[axis]
        result = part.new_empty((members, *part.shape))
        whole = result.view(parts[0].dtype)
        if members == 2 and self._single_messages(result, (axis,)):  # in larger groups, gloo's ring is as fast
            return self._begun("all_gather", (axis,), whole, part, _Messages, result, part.expand_as(result))
        return self._begun("all_gather", (axis,), whole, part, all_gather_single, result.view(-1), part.view(-1))

    def reduce_scatter(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.reduce_scatter``."""
        part = _in_memory(parts[0])
        if (axis,) in self.sliced:  # gloo's reduce_scatter is an all_reduce: twice the bytes, and more latency
            return self.all_to_all([part], axis).then(lambda given: [reduced(given[0])])
        result = part.new_empty(part.shape[1:])
        return self._begun("reduce_scatter", (axis,), result, part, reduce_scatter_single, result.view(-1), part.view(-1))

    def all_to_all(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.all_to_all``."""
        return self._exchanged(parts[0], (axis,))

    def _exchanged(self, parts: Tensor, axes: tuple[int, ...]) -> Pending:
        part = _as_bytes(_in_memory(parts))
        result = torch.empty_like(part)
        whole = result.view(parts.dtype)
        if self._single_messages(result, axes):
            return self._begun("all_to_all", axes, whole, part, _Messages, result, part)
        return self._begun("all_to_all", axes, whole, part, dist.all_to_all_single, result.view(-1), part.view(-1))

    def _begun(
        self, kind: str, axes: tuple[int, ...], result: Tensor, sent: Any, begin: Callable[..., Any], *given: Any
    ) -> Pending:
        """Launches a collective by calling ``begin``, and returns it."""
        made = _UnderWay(self, kind, axes, [result], None, sent)
        try:
            made._work = begin(*given, group=self._process_groups[axes], async_op=True)
        except (RuntimeError, AssertionError) as error:
            if get_proxy_mode() is not None:
                told = "a distributed module cannot be exported: its graph is one rank's. Export the model itself"
                raise AutotpError(told) from error
            raise self.whereabouts.failed(made, error) from error
        return made

    def _everybodys(self, part: Tensor, axes: tuple[int, ...]) -> Pending:
        """The group's tensors, stacked, as from ``all_gather``, but by pairwise exchange."""
        return self._exchanged(part.expand(self._process_groups[axes].size(), *part.shape), axes)

    def _single_messages(self, result: Tensor, axes: tuple[int, ...]) -> bool:
        """Whether to exchange the rows of a tensor as messages. Within a node, the directions of a link do not matter."""
        return axes in self._across and result.device.type == "cpu" and result.nbytes >= len(result) * _MESSAGE

    def _pairwise(self, part: Tensor, axes: tuple[int, ...]) -> bool:
        """Whether to gather the group's tensors by pairwise exchange, instead of gloo's ring."""
        group = self._process_groups[axes]
        return axes in self.sliced and (group.size() - 1) * part.nbytes <= _PAIRWISE


def _ranks_of_node() -> int:
    """The number of ranks of each node, as torchrun states it; 1 if it did not start this process."""
    return whole_of(os.environ.get("LOCAL_WORLD_SIZE", "1"), "environment: LOCAL_WORLD_SIZE", most=MOST_DEVICES)


def made_once(key: Hashable, make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of ``make(*args, **options)``, cached for the job: groups keep threads and connections until it ends.

    Args:
        key: identifies the result. All processes must request the same keys in the same order.
        make: makes a process group, or a mesh, which has several.
        args, options: arguments of ``make``.
    """
    job = default_group()
    if job not in _MADE:
        _MADE.clear()  # a mesh of an earlier job would keep that job's group alive
    made = _MADE.setdefault(job, {})
    if key not in made:
        made[key] = make(*args, **options)
    return made[key]


def time_limit() -> timedelta:
    """The timeout of the job's process group; groups that are made later do not inherit it, and have torch's default."""
    return group_time_limit(default_group())


def _let_go(world: weakref.ref[ProcessWorld], mesh: weakref.ref[DeviceMesh]) -> None:
    """Releases a world's process groups before the interpreter exits.

    If a group still exists then, its threads may need the interpreter to free a tensor, and abort the process (pytorch
    issue 190489). ``destroy_process_group`` does not end the threads: the world and its ``DeviceMesh`` keep the groups
    alive, and DTensor's caches may keep the mesh alive after the world is gone.
    """
    held, known = world(), mesh()
    if held is not None:
        held._process_groups.clear()
    if known is not None:
        forget_groups(known)


def _in_memory(tensor: Tensor) -> Tensor:
    """The tensor, contiguous. Some zeros that autograd makes (the gradient of ``sgn``) have no memory at all."""
    return tensor.clone(memory_format=torch.contiguous_format) if is_zerotensor(tensor) else tensor.contiguous()


def _as_bytes(tensor: Tensor) -> Tensor:
    """The tensor, with booleans viewed as bytes, since not every backend supports booleans."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
