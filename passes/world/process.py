"""The world of one process of a ``torch.distributed`` job: its place on a mesh, and its process groups."""

from __future__ import annotations

import atexit
import math
import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # DTensor imports it later, when its default arguments would keep the group alive
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from passes.world.world import Pending, World, reduced

__all__ = ["ProcessWorld"]


#: Bytes that a device may receive of a group for gloo to exchange them pairwise. Its rings take a step, for which every
#: process has to wake, for every member; of pairs all go at once, but where an uplink is shared more crosses it.
_PAIRWISE = 64 * 2**10


class ProcessWorld(World):
    """This process's place on a ``DeviceMesh``, and its process groups.

    Args:
        mesh: the device mesh; its axes are the plan's.
        groups: see ``join``.
    """

    def __init__(self, mesh: DeviceMesh, groups: Iterable[tuple[int, ...]] = ()) -> None:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "this rank is not part of the mesh"
        super().__init__(tuple(mesh.shape), [tuple(coordinate)])
        self.device_mesh = mesh
        self._process_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.join(groups)
        atexit.register(_let_go, weakref.ref(self), weakref.ref(mesh))

    def join(self, groups: Iterable[tuple[int, ...]]) -> None:
        """See ``World.join``; every process has to join the same groups."""
        for axes in sorted(set(groups) - self._process_groups.keys()):
            self._process_groups[axes] = self._make_group(axes)

    def _make_group(self, axes: tuple[int, ...]) -> dist.ProcessGroup:
        if len(axes) == 1:
            return self.device_mesh.get_group(axes[0])
        ranks = self.device_mesh.mesh
        rest = [a for a in range(ranks.dim()) if a not in axes]
        mine = None
        for members in ranks.permute(*rest, *axes).reshape(-1, math.prod(ranks.shape[a] for a in axes)).tolist():
            group = dist.new_group(members)
            if dist.get_rank() in members:
                mine = group
        assert mine is not None
        return mine

    def of_first(self, tensor: Tensor) -> Tensor:
        """See ``World.of_first``; over gloo, so that no process waits for a GPU."""
        if () not in self._process_groups and "gloo" not in str(dist.get_backend()):
            self._process_groups[()] = dist.new_group(backend="gloo")
        dist.broadcast(tensor, src=0, group=self._process_groups.get(()))
        return tensor

    def all_reduce(self, parts: Sequence[Tensor], axes: tuple[int, ...], op: str = "sum") -> Pending:
        """See ``World.all_reduce``."""
        return self.all_reduce_([parts[0].clone(memory_format=torch.contiguous_format)], axes, op)

    def all_reduce_(self, parts: Sequence[Tensor], axes: tuple[int, ...], op: str = "sum") -> Pending:
        """See ``World.all_reduce_``."""
        value = parts[0]
        # of one element, gloo's ring is no slower
        if value.numel() > 1 and self._pairwise(value, axes):
            return self._everybodys(value, axes).then(lambda given: [reduced(given[0], op)])
        reduction = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        work = dist.all_reduce(value, reduction, group=self._process_groups[axes], async_op=True)
        return Pending([value], work)

    def all_gather(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.all_gather``."""
        if self._pairwise(parts[0], (axis,)):
            return self._everybodys(parts[0], (axis,))
        part = _as_bytes(_in_memory(parts[0]))
        result = part.new_empty((self.mesh_shape[axis], *part.shape))
        group = self._process_groups[(axis,)]
        work = dist.all_gather_single(result.view(-1), part.view(-1), group=group, async_op=True)
        return Pending([result.view(parts[0].dtype)], work, part)

    def reduce_scatter(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.reduce_scatter``."""
        part = _in_memory(parts[0])
        group = self._process_groups[(axis,)]
        if dist.get_backend(group) == "gloo":  # whose own is an all_reduce: twice the bytes, and more latency
            return self.all_to_all([part], axis).then(lambda given: [reduced(given[0])])
        result = part.new_empty(part.shape[1:])
        work = dist.reduce_scatter_single(result.view(-1), part.view(-1), group=group, async_op=True)
        return Pending([result], work, part)

    def all_to_all(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.all_to_all``."""
        return self._exchanged(parts[0], (axis,))

    def _exchanged(self, parts: Tensor, axes: tuple[int, ...]) -> Pending:
        part = _as_bytes(_in_memory(parts))
        result = torch.empty_like(part)
        work = dist.all_to_all_single(result.view(-1), part.view(-1), group=self._process_groups[axes], async_op=True)
        return Pending([result.view(parts.dtype)], work, part)

    def _everybodys(self, part: Tensor, axes: tuple[int, ...]) -> Pending:
        """The group's tensors, stacked, by pairwise exchange: what ``all_gather`` gives."""
        return self._exchanged(part.expand(self._process_groups[axes].size(), *part.shape), axes)

    def _pairwise(self, part: Tensor, axes: tuple[int, ...]) -> bool:
        """Whether everybody's tensors are better exchanged pair by pair."""
        group = self._process_groups[axes]
        return (group.size() - 1) * part.nbytes <= _PAIRWISE and dist.get_backend(group) == "gloo"


def _let_go(world: weakref.ref[ProcessWorld], mesh: weakref.ref[DeviceMesh]) -> None:
    """Forgets a world's process groups before the interpreter ends.

    The threads of a group that is still there at the end may need the interpreter to free a tensor, and then abort the
    process (pytorch issue 190489). ``destroy_process_group`` does not end them: the world and its ``DeviceMesh`` hold them,
    and caches of DTensor's may hold the mesh when the world is gone.
    """
    held, known = world(), mesh()
    if held is not None:
        held._process_groups.clear()
    if known is not None:
        for each in (known, getattr(known, "_root_mesh", None)):
            getattr(each, "_pg_registry", {}).clear()


def _in_memory(tensor: Tensor) -> Tensor:
    """A tensor without gaps. Some zeros that autograd makes (the gradient of ``sgn``) have no memory at all."""
    return tensor.clone(memory_format=torch.contiguous_format) if tensor._is_zerotensor() else tensor.contiguous()


def _as_bytes(tensor: Tensor) -> Tensor:
    """Booleans travel as bytes: not every backend knows them."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
