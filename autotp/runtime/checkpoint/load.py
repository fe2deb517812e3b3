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

    Each rank reads only its own parts, from ``model.safetensors`` or from the files that ``model.safetensors.index.json``
    names, one tensor at a time, and casts them to the dtypes of the module. A tied parameter may be stored by any of its
    names. The files may be of the base model although the module has a head (``h.0.ln_1.weight`` for
    ``transformer.h.0.ln_1.weight``), or vice versa. If the files do not fit, the module is not changed.

    Args:
        parallel: what ``autotp.parallelize`` returned; the model may have been on ``meta``.
        directory: a local directory that every rank can read.
        strict: whether the files must have every parameter and persistent buffer of the module, and no other tensor. If
            not, parameters and buffers that the files lack keep their values, and other tensors are not read.

    Returns:
        The names that the files lack, and the files' keys that the module lacks; both are empty if ``strict``.

    Raises:
        AutotpError: on every rank, if a file is missing or damaged, or if names, shapes or dtypes do not fit.
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
    """Raises if the files store different values for two names of a tied parameter; compares this rank's parts."""
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
    # Opened again for each tensor: the pages read count as this process's memory until the file is closed.
    with opened(place.file) as file:
        for here, there in parts_of(*resting(value)):
            local[here].copy_(file.get_slice(place.key)[there])
    if isinstance(value, DTensor):
        # copy_ increments the version of the local tensor only; autograd checks the parameter's.
        torch.autograd.graph.increment_version(value)
