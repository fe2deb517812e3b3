"""``load_pretrained``: each rank reads its parts of a Hugging Face directory's weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotp.errors import AutotpError
from autotp.runtime.agreement import everywhere
from autotp.runtime.checkpoint.entries import Entry, entries_of
from autotp.runtime.checkpoint.files import Place, opened, stored_in
from autotp.runtime.checkpoint.match import match
from autotp.runtime.checkpoint.parts import parts_of, resting
from costmodel.errors import require
from costmodel.text.files import require_path, spelled

__all__ = ["load_pretrained"]


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
    with everywhere(f"cannot load {spelled(directory)}"):
        require_path(directory, "a directory")
        require(strict, bool, "strict", "True or False")
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
            for _, there in parts_of(*resting(entry.value)):
                if not torch.equal(first.get_slice(places[0].key)[there], other.get_slice(place.key)[there]):
                    raise AutotpError(
                        f"{places[0]} and {place} differ, and are one parameter of the model ({' = '.join(entry.names)}): "
                        "distribute a model whose weights are not tied, or remove one of them from the files"
                    )


def _read(value: Tensor, place: Place) -> None:
    local = value.to_local() if isinstance(value, DTensor) else value
    # Opened anew for each tensor: pages of a file that were read count as this process's memory until it is closed.
    with opened(place.file) as file:
        for here, there in parts_of(*resting(value)):
            local[here].copy_(file.get_slice(place.key)[there])
    if isinstance(value, DTensor):
        # The local tensor counts its changes; autograd looks at the parameter's.
        torch.autograd.graph.increment_version(value)
