"""Worlds: the devices of a mesh that a process hosts, and their collectives.

A sharded graph is the same for every device; a *world* provides what depends on the device. `passes.world.process` is one
process of a ``torch.distributed`` job. ``LocalWorld`` hosts all devices of a mesh in one process: its collectives are local
``stack`` and ``sum``. Both implement the same four primitives over the devices that they host (one, or all), each of which
returns a ``Pending`` at once. ``run`` executes reshard steps with these primitives, and pads uneven chunks so that all
messages of a group have the same size; ``launch`` does not wait for the last step.
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

#: Identifies a random operator: its number within a program, then its chunk's coordinates on the virtual axes, if any.
Salt = Sequence[int]

_MOST = 4096  # the largest number of devices of a `LocalWorld`


def _padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    missing = length - tensor.shape[dim]
    if missing == 0:
        return tensor
    filler = list(tensor.shape)
    filler[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(filler)], dim)


def _within(ids: Tensor, outside: Tensor, message: str) -> Tensor:
    if outside.is_cuda:  # asynchronous, as in torch's own lookups: the CPU does not wait for the device
        torch.ops.aten._assert_async.msg(outside == 0, message)
    elif outside:
        raise IndexError(message)
    return ids


def _put(tensor: Tensor, panel: Tensor, dim: int, cuts: int, panels: int, number: int) -> Tensor:
    dim %= tensor.dim()
    tensor.unflatten(dim, (cuts, panels, -1)).select(dim + 1, number).copy_(panel.unflatten(dim, (cuts, -1)))
    return tensor


#: Functions of a part that are the same on all devices: ``pad`` appends zeros to a dim up to a length, ``crop`` is the
#: inverse, ``in_one_format`` makes the memory format unambiguous (`passes.layouts.layout.in_one_format`), ``within``
#: checks indices (`passes.world.ops.within`), and ``put`` writes one of several panels of a tensor to its place.
LOCAL: Mapping[str, Callable[..., Tensor]] = {
    "pad": _padded,
    "crop": lambda tensor, dim, length: tensor.narrow(dim, 0, length).contiguous(),
    "in_one_format": in_one_format,
    "within": _within,
    "put": _put,
}


class World(nn.Module):
    """The devices of a mesh that this process hosts, and the collectives between the devices of the mesh.

    Args:
        mesh_shape: sizes of the mesh axes.
        hosted: the coordinates of the hosted devices.

    Attributes:
        places: the coordinates of each chunk on the virtual axes (`passes.world.chunked`); without such axes, ``[()]``.
        count: the number of hosted devices, each of which has all these chunks.
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
        """Prepares for collectives over these sets of axes."""

    def next_seed(self, draws: Sequence[Draw | None]) -> Any:
        """The seed of a pass; see `passes.world.seeds.Seeds.next`."""
        return self.seeds.next(draws, self.of_first)

    def of_first(self, tensor: Tensor) -> Tensor:
        """The first process's CPU tensor. All processes must call this, with tensors of the same shape."""
        return tensor

    @abstractmethod
    def all_reduce(self, parts: Sequence[Tensor], axes: tuple[int, ...], op: str = "sum") -> Pending:
        """Every device of the group gets the sum (or ``max``) of the group's tensors."""

    def all_reduce_(self, parts: Sequence[Tensor], axes: tuple[int, ...], op: str = "sum") -> Pending:
        """``all_reduce`` that may overwrite ``parts`` with the results; the caller must not read them again."""
        return self.all_reduce(parts, axes, op)

    @abstractmethod
    def all_gather(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """Every device gets the group's tensors, stacked in a new dim 0; the result may be a view of new memory."""

    @abstractmethod
    def reduce_scatter(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """Device i of the group gets the sum of ``part[i]`` over the group."""

    @abstractmethod
    def all_to_all(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """Device i of the group gets ``part[i]`` of all devices of the group, stacked in dim 0."""

    def extra_repr(self) -> str:
        """The mesh's shape and the number of hosted devices."""
        return f"mesh={self.mesh_shape}, hosted={len(self.hosted)}"

    def run(self, steps: Iterable[Step], parts: Sequence[Tensor], values: Sequence[int] | None = None) -> list[Tensor]:
        """Executes reshard steps on the hosted devices' parts of one tensor.

        Args:
            steps: the steps, in order.
            parts: the parts of the hosted devices, chunk by chunk.
            values: for each chunk, the number of its value; chunks with equal numbers share one collective. By default,
                all differ. Devices must agree on this, so the graph states it: chunks with equal values may be one tensor
                on a device whose part is not padded, and several on another.
        """
        return self.launch(steps, parts, values).wait()

    def launch(self, steps: Iterable[Step], parts: Sequence[Tensor], values: Sequence[int] | None = None) -> Pending:
        """``run`` without waiting for the last step."""
        pending = Pending(parts)
        for step in steps:
            pending = getattr(self, f"_{step.kind}")(step, pending.wait())
        return pending

    def offset(self, size: int, axes: Sequence[int], like: Any = None) -> list[Any]:
        """The first index of each hosted device's contiguous part of a dim of ``size`` that ``axes`` split."""
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
        """A copy of a hosted device's part of ``tensor`` after a ``slice``; a view would keep the whole tensor alive."""
        (axis,) = step.axes
        part = take_block(tensor, step.dim, step.blocks, self.mesh_shape[axis], self.hosted[index][axis])
        return part.clone(memory_format=torch.contiguous_format)

    def masked(self, tensor: Tensor, axes: Sequence[int], index: int) -> Tensor:
        """``tensor`` on a hosted device whose coordinates on the axes are all 0, zeros on others."""
        return tensor if all(self.hosted[index][axis] == 0 for axis in axes) else torch.zeros_like(tensor)

    def local(self, name: str, tensor: Tensor, *args: Any) -> Tensor:
        """Applies the function of `LOCAL` with this name to one device's part."""
        return LOCAL[name](tensor, *args)

    def seeded(
        self, seed: Any, salt: Salt, axes: Sequence[int], index: int, function: Callable, args: Any, kwargs: Any
    ) -> Any:
        """Runs a random operator on a hosted device; see `passes.world.ops.seeded`."""
        # Scheduled graphs draw by `DRAWN` instead of torch's kernels, so a repeated pass must too; a `Stream` is no seed.
        if function in DRAWN and (self.seeds.repeated is not None or isinstance(seed, Stream)):
            return DRAWN[function](functools.partial(self.draw, seed, salt, axes, index), *args, **kwargs)
        with self.generator(seed, salt, axes, index, tree_leaves((args, kwargs))):
            return function(*args, **kwargs)

    def draw(self, seed: Any, salt: Salt, axes: Sequence[int], index: int, like: Tensor, method: str, *by: float) -> Tensor:
        """Random numbers on a hosted device, from a tensor's method; see `passes.overlap.primitives.draw`."""
        if isinstance(seed, Stream):
            return seed.part(salt[0], (*self.hosted[index], *salt[1:]))
        with self.generator(seed, salt, axes, index, [like]):
            return getattr(torch.empty_like(like, memory_format=torch.contiguous_format), method)(*by)

    @contextmanager
    def generator(self, seed: int, salt: Salt, axes: Sequence[int], index: int, near: Iterable[Any]) -> Iterator[None]:
        """Context of one operator: seeds torch's generators of the CPU and of the GPUs of the tensors ``near``."""
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
        # totals differ between groups, but all messages of one group must have the same length
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
    """(ways, .., dim, ..) -> (.., dim, ..): the inverse of splitting each of ``blocks`` blocks of ``dim``."""
    if blocks == 1 and dim == 0:
        return stacked.flatten(0, 1)
    parts = stacked.unbind(0)
    if blocks == 1:
        return torch.cat(parts, dim)
    return torch.cat([part.unflatten(dim, (blocks, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)


class LocalWorld(World):
    """All devices of a mesh in one process. As in other worlds, results of collectives are contiguous for any operands.

    Raises:
        AutotpError: the mesh has more than 4,096 devices.
    """

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        devices = math.prod(mesh_shape)
        if devices > _MOST:
            raise AutotpError(f"one process simulates at most {_MOST:,} devices, not {devices:,}; plan for fewer")
        super().__init__(mesh_shape, list(itertools.product(*(range(n) for n in mesh_shape))))

    def all_reduce(self, parts: Sequence[Tensor], axes: tuple[int, ...], op: str = "sum") -> Pending:
        """See ``World.all_reduce``."""
        return self._among(parts, axes, lambda stacked: [reduced(stacked, op)] * len(stacked))

    def all_reduce_(self, parts: Sequence[Tensor], axes: tuple[int, ...], op: str = "sum") -> Pending:
        """See ``World.all_reduce_``. Overwrites ``parts`` at once, so that later reads of them are detected."""
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
        """Applies ``share`` to the stacked tensors of each group, and gives each device a copy of its result."""
        result = list(parts)
        for group in groups(self.hosted, axes):
            stacked = torch.stack([parts[i].contiguous() for i in group])
            for i, value in zip(group, share(stacked), strict=True):
                result[i] = value.clone(memory_format=torch.contiguous_format)
        return Pending(result)


def groups(places: Iterable[Sequence[int]], axes: Sequence[int]) -> list[list[int]]:
    """Groups of the indices of places that differ only along ``axes``."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, at in enumerate(places):
        found.setdefault(tuple(c for axis, c in enumerate(at) if axis not in axes), []).append(number)
    return list(found.values())


def reduced(stacked: Tensor, op: str = "sum") -> Tensor:
    """The sum (or ``max``) over dim 0, in the tensor's dtype: torch's own sum widens narrow integers."""
    return stacked.sum(0, dtype=stacked.dtype) if op == "sum" else stacked.amax(0)
