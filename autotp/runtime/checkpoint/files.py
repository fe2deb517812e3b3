"""The safetensors files of a Hugging Face directory: their names and headers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotp.errors import AutotpError
from costmodel.text.files import read_text

__all__ = ["INDEX", "WHOLE", "Place", "listed", "opened", "safetensors_library", "stored_in"]

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: Maximum size of an index in bytes, enough for some million names.
_LARGEST = 2**28
#: Maximum number of names of each kind in a message.
_SHOWN = 4


@dataclass(frozen=True)
class Place:
    """One tensor of a file, as the file's header describes it."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.key} in {self.file.name}"


def safetensors_library() -> Any:
    """Imports the package safetensors, which autotp does not require.

    Raises:
        AutotpError: safetensors is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise AutotpError(
            "reading and writing Hugging Face directories needs safetensors: pip install safetensors, or transformers, "
            "which requires it"
        ) from error
    return safetensors


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Opens a file with ``safetensors.safe_open``.

    Raises:
        AutotpError: the file does not exist or is damaged, or reading it in this context fails.
    """
    library = safetensors_library()
    try:
        with library.safe_open(file, "pt") as found:
            yield found
    except (OSError, library.SafetensorError) as error:
        raise AutotpError(f"{file} is not a whole safetensors file ({error}): copy or download it again") from error


def stored_in(directory: Path) -> dict[str, Place]:
    """Key -> tensor, for all tensors of a directory's files.

    Raises:
        AutotpError: the directory or a file is missing or damaged.
    """
    if not directory.is_dir():
        raise AutotpError(f"there is no directory {directory}: give a local one, such as a download of the model")
    if (directory / WHOLE).is_file():
        return {place.key: place for place in _header(directory / WHOLE)}
    if not (directory / INDEX).is_file():
        raise AutotpError(
            f"{directory} has neither {WHOLE} nor {INDEX}: write one with save_pretrained of autotp or transformers, "
            "which converts other formats"
        )
    try:
        owners = json.loads(read_text(directory / INDEX, _LARGEST))["weight_map"]
        files = sorted(set(owners.values()))
        absent = [name for name in files if Path(name).name != name or not (directory / name).is_file()]
    except (OSError, RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AutotpError(f"{directory / INDEX} is damaged ({error!r}): copy or download it again") from error
    if absent:
        raise AutotpError(f"{directory} lacks {listed(absent)}, which {INDEX} names: copy or download what is missing")
    found = {(name, place.key): place for name in files for place in _header(directory / name)}
    for key, name in owners.items():
        if (name, key) not in found:
            raise AutotpError(f"{directory / name} lacks {key}, which {INDEX} says it has: copy or download both again")
    return {key: found[name, key] for key, name in owners.items()}


def _header(file: Path) -> list[Place]:
    with opened(file) as found:
        slices = {key: found.get_slice(key) for key in found.keys()}  # noqa: SIM118 - not a mapping
        return [Place(file, key, tuple(each.get_shape()), each.get_dtype()) for key, each in slices.items()]


def listed(names: Sequence[str], between: str = ", ") -> str:
    """Joins the first names, followed by the number of further ones; for messages."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return between.join(names[:_SHOWN]) + more
