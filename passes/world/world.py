"""Worlds: who takes part in a collective.

A sharded graph is the same for every device; a *world* gives it its surroundings. `passes.world.process` is one process of
a ``torch.distributed`` job. ``LocalWorld`` is every device of a mesh at once, in this process: its collectives are local
``stack`` and ``sum``. Both offer the same four primitives over the devices that they host (one, or all), each of which
returns a ``Pending`` at once. ``run`` executes reshard steps on them, padding uneven chunks so that every message has one
size; ``launch`` leaves the last step under way.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from costmodel.errors import AutotpError
from passes.layouts.layout import even_chunk, extent, in_one_format, take_block
from passes.layouts.reshard import Step
from passes.torch_internals import tree_leaves
from passes.world.draws import Draw, Stream, generator_of
from passes.world.pending import Pending
from passes.world.random_ops import DRAWN
from passes.world.seeds import Seeds
from passes.world.whereabouts import Whereabouts

__all__ = ["LOCAL", "LocalWorld", "Salt", "World", "groups", "reduced"]

#: Which operator draws: its number among those of a program, then its chunk's coordinates on the virtual axes, if any.
Salt = Sequence[int]

_MOST = 4096  # devices of a `LocalWorld`


def _padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    missing = length - tensor.shape[dim]
    if missing == 0:
        return tensor
    filler = list(tensor.shape)
    filler[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(filler)], dim)


def _within(ids: Tensor, outside: Tensor, message: str) -> Tensor:
    if outside.is_cuda:  # as torch's own lookups: the CPU does not wait for the device to find out
        torch.ops.aten._assert_async.msg(outside == 0, message)
    elif outside:
        raise IndexError(message)
    return ids


#: What every device does in the same way: zeros at the end of a dim, up to a length; the inverse; a tensor in a memory
#: format that leaves no doubt (`passes.layouts.layout.in_one_format`); checked indices (`passes.world.ops.within`).
LOCAL: Mapping[str, Callable[..., Tensor]] = {
    "pad": _padded,
    "crop": lambda tensor, dim, length: tensor.narrow(dim, 0, length).contiguous(),
    "in_one_format": in_one_format,
    "within": _within,
}


class World(nn.Module):
    """The mesh as a graph sees it.

    Args:
        mesh_shape: sizes of its axes.
        hosted: the coordinates of the devices that live in this process.

    Attributes:
        places: the chunks of every device, as coordinates on the virtual axes; here there is one, and no such axis.
        count: how many devices are hosted, each of which has all of these chunks.
    """

    places: Sequence[tuple[int, ...]]

    def __init__(self, mesh_shape: tuple[int, ...], hosted: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.mesh_shape = mesh_shape
        self.hosted = tuple(hosted)
        self.count, self.places = len(self.hosted), [()]
        self.regather: Any = None
        self.seeds, self.whereabouts = Seeds(), Whereabouts()

    def join(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Gets ready for collectives over these sets of axes."""

    def next_seed(self, draws: Sequence[Draw | None]) -> Any:
        """The seed of a pass that begins; see `passes.world.seeds.Seeds.next`."""
        return self.seeds.next(draws, self.of_first)

    def of_first(self, tensor: Tensor) -> Tensor:
        """The first process's tensor, on the CPU, of those that all processes pass."""
        return tensor

    @abstractmethod
    def all_reduce(self, parts: Sequence[Tensor], axes: tuple[int, ...], op: str = "sum") -> Pending:
        """Every device of the group gets the sum (or ``max``) of the group's tensors."""

    def all_reduce_(self, parts: Sequence[Tensor], axes: tuple[int, ...], op: str = "sum") -> Pending:
        """``all_reduce`` that may leave its results where the tensors were, which nobody else reads."""
        return self.all_reduce(parts, axes, op)

    @abstractmethod
    def all_gather(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """Every device gets the group's tensors, stacked in a new dim 0: memory of its own, of which views are given."""

    @abstractmethod
    def reduce_scatter(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """Device i of the group gets the sum of everybody's ``part[i]``."""

    @abstractmethod
    def all_to_all(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """Device i of the group gets everybody's ``part[i]``, stacked in dim 0."""

    def extra_repr(self) -> str:
        """The mesh's shape and the number of hosted devices."""
        return f"mesh={self.mesh_shape}, hosted={len(self.hosted)}"

    def run(self, steps: Iterable[Step], parts: Sequence[Tensor], values: Sequence[int] | None = None) -> list[Tensor]:
        """Executes reshard steps on the hosted devices' parts of one tensor.

        Args:
            steps: to execute.
            parts: of the devices, chunk by chunk.
            values: per chunk, the number of the value that it has, where several have one: what is the same for them moves
                once. Devices must agree on that, so the graph decides: the tensors themselves may be one object on a
                device whose part is not padded, and several on another.
        """
        return self.launch(steps, parts, values).wait()

    def launch(self, steps: Iterable[Step], parts: Sequence[Tensor], values: Sequence[int] | None = None) -> Pending:
        """``run`` that does not wait for the last step."""
        pending = Pending(parts)
        for step in steps:
            pending = getattr(self, f"_{step.kind}")(step, pending.wait())
        return pending

    def offset(self, size: int, axes: Sequence[int], like: Any = None) -> list[Any]:
        """Where each hosted device's contiguous part of a dim of ``size``, split by ``axes``, begins."""
        starts = []
        for at in self.hosted:
            start, length = 0, size
            for axis in axes:
                chunk = even_chunk(length, self.mesh_shape[axis])
                start += min(at[axis] * chunk, length)
                length = extent(length, (self.mesh_shape[axis],), (at[axis],))
            starts.append(start)
        return starts

    def own(self, tensor: Tensor, step: Step, index: int) -> Tensor:
        """A copy of the part of ``tensor`` that a slicing step leaves a hosted device; a view would keep all of it."""
        (axis,) = step.axes
        part = take_block(tensor, step.dim, step.blocks, self.mesh_shape[axis], self.hosted[index][axis])
        return part.clone(memory_format=torch.contiguous_format)

    def masked(self, tensor: Tensor, axes: Sequence[int], index: int) -> Tensor:
        """``tensor`` where a hosted device comes first along the axes, else zeros."""
        return tensor if all(self.hosted[index][axis] == 0 for axis in axes) else torch.zeros_like(tensor)

    def local(self, name: str, tensor: Tensor, *args: Any) -> Tensor:
        """What every device does to its part in the same way: the function of `LOCAL` of that name."""
        return LOCAL[name](tensor, *args)

    def seeded(
        self, seed: Any, salt: Salt, axes: Sequence[int], index: int, function: Callable, args: Any, kwargs: Any
    ) -> Any:
        """A random operator on a hosted device; see `passes.world.ops.seeded`."""
        # A scheduled pass draws this way, whatever the kernel does; and so it is as one device draws.
        if function in DRAWN and (self.seeds.repeated is not None or isinstance(seed, Stream)):
            return DRAWN[function](functools.partial(self.draw, seed, salt, axes, index), *args, **kwargs)
        with self.generator(seed, salt, axes, index, tree_leaves((args, kwargs))):
            return function(*args, **kwargs)

    def draw(self, seed: Any, salt: Salt, axes: Sequence[int], index: int, like: Tensor, method: str, *by: float) -> Tensor:
        """Random numbers on a hosted device, by a tensor's method; see `passes.overlap.primitives.draw`."""
        if isinstance(seed, Stream):
            return seed.part(salt[0], (*self.hosted[index], *salt[1:]))
        with self.generator(seed, salt, axes, index, [like]):
            return getattr(torch.empty_like(like, memory_format=torch.contiguous_format), method)(*by)

    @contextmanager
    def generator(self, seed: int, salt: Salt, axes: Sequence[int], index: int, near: Iterable[Any]) -> Iterator[None]:
        """Seeds torch's generators, of the CPU and of the devices of the tensors ``near``, for one operator."""
        devices = {t.device for t in near if isinstance(t, Tensor) and t.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(devices)):
            mixed = seed
            for number in (*salt, *(self.hosted[index][axis] for axis in axes)):
                draw = torch.Generator().manual_seed((mixed + number) % 2**63)
                mixed = int(torch.randint(2**62, (), generator=draw))
            for device in (torch.device("cpu"), *devices):
                generator_of(device).manual_seed(mixed)
            yield

    def _slice(self, step: Step, parts: list[Tensor]) -> Pending:
        return Pending(self.own(part, step, i) for i, part in enumerate(parts))

    def _mask(self, step: Step, parts: list[Tensor]) -> Pending:
        return Pending(self.masked(part, step.axes, i) for i, part in enumerate(parts))

    def _all_reduce(self, step: Step, parts: list[Tensor]) -> Pending:
        return self.all_reduce(parts, step.axes)

    def _reduce_scatter(self, step: Step, parts: list[Tensor]) -> Pending:
        (axis,) = step.axes
        ways = self.mesh_shape[axis]
        stacked = [self._split(part, step.dim, step.blocks, ways) for part in parts]
        lengths = [extent(part.shape[step.dim], (ways,), (at[axis],)) for part, at in zip(parts, self.hosted, strict=True)]

        def finish(shards: list[Tensor]) -> list[Tensor]:
            if step.blocks > 1:
                return [_join_blocks(shard, step.dim) for shard in shards]
            return [self.local("crop", shard, step.dim, n) for shard, n in zip(shards, lengths, strict=True)]

        return self.reduce_scatter(stacked, axis).then(finish)

    def _all_gather(self, step: Step, parts: list[Tensor]) -> Pending:
        (axis,) = step.axes
        ways = self.mesh_shape[axis]
        if not step.size:
            pending = self.all_gather(parts, axis)
            return pending.then(lambda gathered: [_join_dim(part, step.dim, step.blocks) for part in gathered])
        outer_ways = [self.mesh_shape[a] for a in step.outer]
        totals = [extent(step.size, outer_ways, [at[a] for a in step.outer]) for at in self.hosted]
        # every group has its own total, and every message of one group one length
        equal = [self.local("pad", part, step.dim, even_chunk(n, ways)) for part, n in zip(parts, totals, strict=True)]

        def finish(gathered: list[Tensor]) -> list[Tensor]:
            joined = [_join_dim(part, step.dim, 1) for part in gathered]
            return [self.local("crop", part, step.dim, n) for part, n in zip(joined, totals, strict=True)]

        return self.all_gather(equal, axis).then(finish)

    def _all_to_all(self, step: Step, parts: list[Tensor]) -> Pending:
        (axis,) = step.axes
        ways = self.mesh_shape[axis]
        stacked = [self._split(part, step.to_dim, step.to_blocks, ways) for part in parts]
        if step.to_blocks > 1:
            stacked = [torch.stack([_join_blocks(s, step.to_dim) for s in part]) for part in stacked]
        pending = self.all_to_all(stacked, axis)
        return pending.then(lambda found: [_join_dim(part, step.dim, step.blocks) for part in found])

    def _split(self, tensor: Tensor, dim: int, blocks: int, ways: int) -> Tensor:
        """(.. dim ..) -> (ways, .., [blocks,] chunk, ..), padded; with blocks > 1 the block dim stays before the chunk."""
        if blocks > 1:
            return torch.stack(tensor.unflatten(dim, (blocks, -1)).chunk(ways, dim + 1))
        chunk = even_chunk(tensor.shape[dim], ways)
        padded = self.local("pad", tensor, dim, chunk * ways)
        return padded.unflatten(0, (ways, chunk)) if dim == 0 else torch.stack(padded.split(chunk, dim))


def _join_blocks(tensor: Tensor, dim: int) -> Tensor:
    """(.., blocks, chunk, ..) -> (.., dim, ..)."""
    return tensor.flatten(dim, dim + 1)


def _join_dim(stacked: Tensor, dim: int, blocks: int) -> Tensor:
    """(ways, .., dim, ..) -> (.., dim, ..): the inverse of splitting every one of ``blocks`` blocks of ``dim``."""
    if blocks == 1 and dim == 0:
        return stacked.flatten(0, 1)
    parts = stacked.unbind(0)
    if blocks == 1:
        return torch.cat(parts, dim)
    return torch.cat([part.unflatten(dim, (blocks, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)


class LocalWorld(World):
    """Every device of a mesh, in this one process. As elsewhere, what arrives is contiguous, however it was sent."""

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        devices = math.prod(mesh_shape)
        if devices > _MOST:
            raise AutotpError(f"one process simulates at most {_MOST:,} devices, not {devices:,}; plan for fewer")
        super().__init__(mesh_shape, list(itertools.product(*(range(n) for n in mesh_shape))))

    def all_reduce(self, parts: Sequence[Tensor], axes: tuple[int, ...], op: str = "sum") -> Pending:
        """See ``World.all_reduce``."""
        return self._among(parts, axes, lambda stacked: [reduced(stacked, op)] * len(stacked))

    def all_reduce_(self, parts: Sequence[Tensor], axes: tuple[int, ...], op: str = "sum") -> Pending:
        """See ``World.all_reduce_``; it writes at once, so that who reads too late is found out."""
        for part, value in zip(parts, self.all_reduce(parts, axes, op).wait(), strict=True):
            part.copy_(value)
        return Pending(parts)

    def all_gather(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.all_gather``."""
        return self._among(parts, (axis,), lambda stacked: [stacked] * len(stacked))

    def reduce_scatter(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.reduce_scatter``."""
        return self._among(parts, (axis,), reduced)

    def all_to_all(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.all_to_all``."""
        return self._among(parts, (axis,), lambda stacked: stacked.transpose(0, 1))

    def _among(self, parts: Sequence[Tensor], axes: Sequence[int], share: Callable[[Tensor], Iterable[Tensor]]) -> Pending:
        """For every group, what each of its devices gets of all their tensors, as memory of its own."""
        result = list(parts)
        for group in groups(self.hosted, axes):
            stacked = torch.stack([parts[i].contiguous() for i in group])
            for i, value in zip(group, share(stacked), strict=True):
                result[i] = value.clone(memory_format=torch.contiguous_format)
        return Pending(result)


def groups(places: Iterable[Sequence[int]], axes: Sequence[int]) -> list[list[int]]:
    """The numbers of the places that differ along some axes alone, group by group."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, at in enumerate(places):
        found.setdefault(tuple(c for axis, c in enumerate(at) if axis not in axes), []).append(number)
    return list(found.values())


def reduced(stacked: Tensor, op: str = "sum") -> Tensor:
    """The sum (or ``max``) over dim 0, of the same dtype: torch's own sum of narrow integers is wider."""
    return stacked.sum(0, dtype=stacked.dtype) if op == "sum" else stacked.amax(0)
