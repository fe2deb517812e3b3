"""Assigns the tensors of files to the parameters and buffers of a module by name, and compares shapes and dtypes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from autotp.errors import AutotpError
from autotp.runtime.checkpoint.entries import Entry
from autotp.runtime.checkpoint.files import Place, listed

__all__ = ["Matched", "match"]


@dataclass(frozen=True)
class Matched:
    """The assignment of the files' tensors to a module's entries.

    Attributes:
        places: pairs of an entry and its tensors in the files, of which a tied entry may have several.
        missing: the first names of the entries that the files lack.
        unexpected: the keys of the files for which the module has no name.
    """

    places: Sequence[tuple[Entry, Sequence[Place]]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def require(self, directory: str, strict: bool) -> None:
        """Checks that the files fit the module.

        Args:
            directory: of the files, for the message.
            strict: whether missing and unexpected tensors are errors.

        Raises:
            AutotpError: names the missing and unexpected tensors, and those whose shapes or kinds of dtype differ.
        """
        wrong = []
        if strict and self.missing:
            wrong.append(f"the files lack {listed(self.missing)}")
        if strict and self.unexpected:
            wrong.append(f"the model has no {listed(self.unexpected)}")
        advice = "Give the directory of this model, or strict=False to load what both have"
        shapes = [
            f"{entry.names[0]} has shape {tuple(entry.value.shape)}, and {place} has {place.shape}"
            for entry, places in self.places
            for place in places
            if place.shape != tuple(entry.value.shape)
        ]
        kinds = [
            f"{entry.names[0]} is {entry.value.dtype}, and {place} is {place.dtype}"
            for entry, places in self.places
            for place in places
            if _kind(entry.value) != ("floating" if "F" in place.dtype else "complex" if "C" in place.dtype else "whole")
        ]
        if shapes or kinds:
            wrong += [listed(each, "; ") for each in (shapes, kinds) if each]
            advice = "Make the model of the configuration that the files were saved with"
        if wrong:
            raise AutotpError(f"{directory} does not fit the model: {'; '.join(wrong)}. {advice}")


def match(state: Sequence[Entry], stored: Mapping[str, Place]) -> Matched:
    """Finds each entry in the files by any of its names, with or without the base model's prefix.

    Args:
        state: the module's entries.
        stored: key -> tensor of the files.

    Raises:
        AutotpError: the names fit equally well with several prefixes.
    """
    owners = {name: entry for entry in state for name in entry.names}
    found: dict[str, list[Place]] = {}
    unexpected = []
    for key, name in _renamed(stored, owners).items():
        if name in owners:
            found.setdefault(owners[name].names[0], []).append(stored[key])
        else:
            unexpected.append(key)
    missing = tuple(entry.names[0] for entry in state if entry.names[0] not in found)
    places = [(entry, found[entry.names[0]]) for entry in state if entry.names[0] in found]
    return Matched(places, missing, tuple(unexpected))


def _renamed(keys: Collection[str], names: Collection[str]) -> dict[str, str]:
    """Key -> the model's name. Keys may lack the base model's prefix, or have it although the model's names do not.

    A key for which the model has no name is mapped to itself.
    """

    def by(added: str, dropped: str) -> dict[str, str]:
        tried = {key: (key, added + key, key.removeprefix(dropped)) for key in keys}
        return {key: next((name for name in each if name in names), key) for key, each in tried.items()}

    def prefixes(of: Collection[str]) -> list[str]:
        return sorted({f"{name.partition('.')[0]}." for name in of if "." in name})

    # No prefix comes first, so it wins unless a prefix fits better.
    ways = [("", ""), *((prefix, "") for prefix in prefixes(names)), *(("", prefix) for prefix in prefixes(keys))]
    results = {way: by(*way) for way in ways}
    fitting = {way: sum(name in names for name in result.values()) for way, result in results.items()}
    best = max(fitting.values())
    winners = [way for way in ways if fitting[way] == best]
    if winners[0] != ("", "") and len(winners) > 1:
        shown = listed([added + dropped for added, dropped in winners])
        raise AutotpError(
            f"the files' names fit the model's equally well by {shown} before them: rename the tensors in the files"
        )
    return results[winners[0]]


def _kind(value: Tensor) -> str:
    return "floating" if value.is_floating_point() else "complex" if value.is_complex() else "whole"
