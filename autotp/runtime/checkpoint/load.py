"""``load_pretrained``: each rank reads its parts of a Hugging Face directory's weights."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotp.errors import AutotpError
from autotp.runtime.agreement import everywhere
from autotp.runtime.checkpoint.entries import Entry, entries_of
from autotp.runtime.checkpoint.files import Place, opened, stored_in
from autotp.runtime.checkpoint.match import match
from passes.layouts.layout import Layout, Split, even_chunk, splits

__all__ = ["load_pretrained", "parts_of"]


def load_pretrained(
    parallel: nn.Module, directory: str | os.PathLike[str], *, strict: bool = True
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Reads a Hugging Face directory's weights into a distributed module, in place; a collective call.

    Each rank reads its own parts only, from ``model.safetensors`` or from the files that ``model.safetensors.index.json``
    names, one tensor at a time, and casts them to the dtypes of the module. The files may have any one name of a tied
    parameter. They may be of the model without its head where the module has one (``h.0.ln_1.weight`` for
    ``transformer.h.0.ln_1.weight``), or the other way round. Nothing is changed if the files do not fit.

    Args:
        parallel: what ``autotp.parallelize`` returned, of a model that may have been on ``meta``.
        directory: a local one, which every rank can read.
        strict: whether the files must have every parameter and persistent buffer of the module, and no other tensor. If
            not, what the files lack keeps its values, and other tensors are not read.

    Returns:
        The names that the files lack, and those that the module has no place for; both are empty if ``strict``.

    Raises:
        AutotpError: on every rank, when a file is missing or damaged, or when names, shapes or dtypes do not fit.
    """
    with everywhere(f"cannot load {os.fspath(directory)}"):
        state = entries_of(parallel)
        matched = match(state, stored_in(Path(directory)))
        matched.require(os.fspath(directory), strict)
        for entry, places in matched.places:
            _require_same(entry, places)
    with everywhere(f"cannot read all of {os.fspath(directory)}, and some parameters are changed already"), torch.no_grad():
        for entry, places in matched.places:
            _read(entry.value, places[0])
    return matched.missing, matched.unexpected


def _require_same(entry: Entry, places: Sequence[Place]) -> None:
    """Refuses files that have different values for one parameter, by two of its names."""
    for place in places[1:]:
        with opened(places[0].file) as first, opened(place.file) as other:
            for _, there in parts_of(*_resting(entry.value)):
                if not torch.equal(first.get_slice(places[0].key)[there], other.get_slice(place.key)[there]):
                    raise AutotpError(
                        f"{places[0]} and {place} differ, and are one parameter of the model ({' = '.join(entry.names)}): "
                        "distribute a model whose weights are not tied, or remove one of them from the files"
                    )


def _read(value: Tensor, place: Place) -> None:
    local = value.to_local() if isinstance(value, DTensor) else value
    # Opened anew for each tensor: pages of a file that were read count as this process's memory until it is closed.
    with opened(place.file) as file:
        for here, there in parts_of(*_resting(value)):
            local[here].copy_(file.get_slice(place.key)[there])
    if isinstance(value, DTensor):
        # The local tensor counts its changes; autograd looks at the parameter's.
        torch.autograd.graph.increment_version(value)


def _resting(value: Tensor) -> tuple[Sequence[int], Layout, tuple[int, ...], Sequence[int]]:
    """A tensor's whole shape and layout, the mesh's shape and this rank's coordinates in it."""
    if not isinstance(value, DTensor):
        return value.shape, (), (), ()
    coordinates = value.device_mesh.get_coordinate()
    assert coordinates is not None
    return value.shape, tuple(value.placements), tuple(value.device_mesh.shape), coordinates


def parts_of(
    shape: Sequence[int], layout: Layout, mesh: tuple[int, ...], coordinates: Sequence[int]
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """What `passes.layouts.layout.take` gives a device of a tensor, as slices: of its part, and of the whole tensor.

    Args:
        shape: of the whole tensor.
        layout: the tensor's.
        mesh: its shape.
        coordinates: the device's.
    """
    dims: list[list[tuple[slice, slice]]] = []
    for dim, size in enumerate(shape):
        runs, end = [], 0
        for start, stop in _runs(size, splits(layout, dim, mesh), mesh, coordinates):
            runs.append((slice(end, end + stop - start), slice(start, stop)))
            end += stop - start
        dims.append(runs)
    for each in itertools.product(*dims):
        yield tuple(here for here, _ in each), tuple(there for _, there in each)


def _runs(size: int, cuts: Sequence[Split], mesh: Sequence[int], coordinates: Sequence[int]) -> list[tuple[int, int]]:
    """The ranges of a dim that a device has: several where the blocks of the dim are split."""
    runs = [(0, size)]
    for axis, blocks in cuts:
        size = sum(stop - start for start, stop in runs) // blocks
        chunk = even_chunk(size, mesh[axis])
        start, stop = (min(size, chunk * (coordinates[axis] + end)) for end in (0, 1))
        runs = [run for block in range(blocks) for run in _within(runs, block * size + start, block * size + stop)]
    return runs


def _within(runs: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """From the ``start``-th to before the ``stop``-th element of ranges that follow one another."""
    before = 0
    for first, last in runs:
        low, high = max(first, first + start - before), min(last, first + stop - before)
        if low < high:
            yield low, high
        before += last - first
