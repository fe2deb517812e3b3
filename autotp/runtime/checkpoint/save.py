"""``save_pretrained``: a distributed module's weights as a directory that transformers loads."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotp.errors import AutotpError
from autotp.runtime.agreement import JobAgreement, everywhere, told
from autotp.runtime.checkpoint.entries import Entry, entries_of
from autotp.runtime.checkpoint.files import INDEX, WHOLE, safetensors_library
from costmodel import parse_quantity
from costmodel.text.files import move_atomically, regular_target, require_path, spelled
from costmodel.text.numbers import figure

__all__ = ["save_pretrained", "staged"]

_PART = "model-{:05d}-of-{:05d}.safetensors"
#: Unit of sizes in lower case -> its spelling for `costmodel.parse_quantity`.
_CASES = {unit.lower(): unit for unit in ("B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")}
#: Prefix of the names of temporary folders.
_STAGING = ".autotp-"
#: Files of weights that an earlier call, or transformers, may have left in a directory.
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def save_pretrained(
    parallel: nn.Module,
    directory: str | os.PathLike[str],
    *,
    config: Any = None,
    max_shard_size: float | str = 5e9,
) -> None:
    """Writes a distributed module as a directory that ``from_pretrained`` of transformers loads; a collective call.

    Every rank must pass the same module and ``max_shard_size``. Tensors are gathered one at a time. Rank 0 holds those of
    one file at a time, and writes ``model.safetensors``, or several files and ``model.safetensors.index.json``. A tied
    parameter is written once, by its first name. Existing weights in the directory are replaced once all files are written;
    if writing fails, they stay unchanged. If the process is killed while it replaces them, the directory has no index:
    loading it fails, or reads the old weights if these are in one file.

    Args:
        parallel: what ``autotp.parallelize`` returned.
        directory: created if it does not exist; rank 0's argument is used.
        config: the model's, such as ``model.config``, written to ``config.json`` with the dtype of the parameters; by
            default, no ``config.json`` is written.
        max_shard_size: maximum size of a file, in bytes or as text such as ``"2 GB"``, in upper or lower case, as in
            transformers; a larger tensor is written to a file of its own.

    Raises:
        AutotpError: on every rank, if an argument is wrong or the directory cannot be written.
    """
    wrong = f"cannot save to {spelled(directory)}"
    with everywhere(wrong):
        require_path(directory, "a directory")
        state, first = entries_of(parallel), dist.get_rank() == 0
        files = _files(state, _size(max_shard_size))
        if config is not None and not callable(getattr(config, "save_pretrained", None)):
            raise AutotpError(f"config is a {type(config).__name__}, which has no save_pretrained: pass model.config")
        if first:
            safetensors_library()
    target = Path(directory)
    with staged(target, INDEX, _WEIGHTS) as folder:
        for name, entries in files.items():
            whole = {entry.names[0]: kept for entry in entries if (kept := _gathered(entry, target)) is not None}
            with everywhere(wrong):
                if first:
                    safetensors_library().torch.save_file(whole, folder / name, metadata={"format": "pt"})
            del whole
        with everywhere(wrong):
            if first:
                _write_index(folder, files)
                _write_config(folder, config, state)


@contextmanager
def staged(target: Path, last: str, replaced: re.Pattern[str] | None = None) -> Iterator[Path]:
    """Yields a temporary folder, whose files and folders are moved into a directory once all ranks have written theirs.

    The directory is unchanged until then. While the files are moved, which takes milliseconds, the file ``last`` does not
    exist: a directory without it was left by a process that was killed. A collective call.

    Args:
        target: the directory; created if it does not exist.
        last: name of the file without which the directory cannot be loaded; it is moved last.
        replaced: pattern of names of files in the directory that are removed unless new files replace them.

    Raises:
        AutotpError: on every rank, if the directory cannot be written.
    """
    wrong = f"cannot save to {target}"
    staging: Path | None = None
    try:
        with everywhere(wrong):
            if dist.get_rank() == 0:
                staging = _staging(target)
        yield JobAgreement().decided(lambda: staging)
        with everywhere(wrong):
            pass  # all ranks have written
        with everywhere(wrong):
            if staging is not None:
                _publish(staging, target, last, replaced)
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def _size(given: float | str) -> float:
    """The size of a file in bytes. As in transformers, the unit's case is ignored: ``"200KB"`` and ``"10gb"`` are valid."""
    if isinstance(given, str):
        given = re.sub(r"[a-z]+$", lambda unit: _CASES.get(unit[0].lower(), unit[0]), given.strip(), flags=re.IGNORECASE)
    return figure(parse_quantity(given, "memory"), "max_shard_size", positive=True)


def _staging(target: Path) -> Path:
    """Makes a temporary folder in the directory, from which files can be moved without a copy."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=target, prefix=_STAGING))
    except OSError as error:
        raise AutotpError(f"cannot save to {target}: {error}; give a directory that rank 0 can make or write to") from error


def _gathered(entry: Entry, target: Path) -> Tensor | None:
    """The whole tensor on rank 0, None on other ranks; a collective call."""
    value = entry.value
    with torch.no_grad(), told(f"gathering {entry.names[0]} for {target}"):
        whole = value.full_tensor() if isinstance(value, DTensor) else value.detach()
    return whole.cpu().contiguous() if dist.get_rank() == 0 else None


def _bytes(entry: Entry) -> int:
    return entry.value.numel() * entry.value.element_size()


def _files(state: Sequence[Entry], limit: float) -> dict[str, list[Entry]]:
    """File name -> its entries, in the module's order."""
    parts: list[list[Entry]] = [[]]
    held = 0
    for entry in state:
        if parts[-1] and held + _bytes(entry) > limit:
            parts.append([])
            held = 0
        parts[-1].append(entry)
        held += _bytes(entry)
    return {_PART.format(i, len(parts)) if len(parts) > 1 else WHOLE: part for i, part in enumerate(parts, start=1)}


def _write_index(staging: Path, files: Mapping[str, Sequence[Entry]]) -> None:
    if len(files) > 1:
        total = sum(_bytes(entry) for part in files.values() for entry in part)
        owners = {entry.names[0]: name for name, part in files.items() for entry in part}
        index = {"metadata": {"total_size": total}, "weight_map": owners}
        (staging / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_config(staging: Path, config: Any, state: Sequence[Entry]) -> None:
    if config is not None:
        written = copy.deepcopy(config)
        dtype = next((entry.value.dtype for entry in state if entry.value.is_floating_point()), None)
        # By default, from_pretrained casts the weights to the configuration's dtype.
        if dtype is not None and hasattr(written, "dtype"):
            written.dtype = str(dtype).removeprefix("torch.")
        written.save_pretrained(staging)


def _publish(staging: Path, target: Path, last: str, replaced: re.Pattern[str] | None) -> None:
    """Moves the written files into the directory, then removes replaced files and what killed calls have left.

    The old ``last`` is removed first: if this call were killed in between, an old index could name a mixture of old and new
    files of the same names. If a move fails, the old files are restored, except where the file system has no hard links.
    """
    mask = os.umask(0)
    os.umask(mask)
    made = sorted(staging.iterdir(), key=lambda file: (file.name == last, file.name))
    places = [(file, target / file.name if file.is_dir() else regular_target(target / file.name)) for file in made]
    before, undo = Path(tempfile.mkdtemp(dir=target, prefix=_STAGING)), ExitStack()

    def keep(place: Path) -> None:
        if not place.exists():
            undo.callback(place.unlink, missing_ok=True)
            return
        with suppress(OSError):
            os.link(place, before / place.name)
            undo.callback(os.replace, before / place.name, place)

    def discard() -> None:
        for file in sorted(target.iterdir()):
            if replaced is not None and replaced.fullmatch(file.name) and file.name not in {each.name for each in made}:
                keep(file)
                file.unlink()

    def move(file: Path, place: Path) -> None:
        if file.name == last:
            discard()  # without an index, an old single file would be loaded
        if file.is_dir():
            if place.is_dir():
                place.rename(before / place.name)
                undo.callback(os.rename, before / place.name, place)
            file.rename(place)
            undo.callback(os.rename, place, file)
            return
        if file.suffix == ".safetensors":
            file.chmod(0o666 & ~mask)  # safetensors makes files that other users cannot read
        if file.name != last:
            keep(place)
        move_atomically(file, place)

    try:
        if made and made[-1].name == last:
            keep(places[-1][1])
            places[-1][1].unlink(missing_ok=True)
        for file, place in places:
            move(file, place)
        discard()
    except Exception:
        with suppress(OSError):
            undo.close()
        shutil.rmtree(before, ignore_errors=True)
        raise
    for left in target.glob(f"{_STAGING}*"):
        shutil.rmtree(left, ignore_errors=True)
