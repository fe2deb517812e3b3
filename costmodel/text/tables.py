"""Validated access to mappings: every error names the file, the table, the key and the expected value."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import TopologyError, UnitError, shown, suggestion
from .files import read_text
from .numbers import MOST, figure, whole
from .units import Quantity, parse_quantity

__all__ = ["Table", "plain", "read_toml"]

_LARGEST_TOML = 2**21  # bytes; the published runs are 2**17
#: A key with more parts than any table here has, for which tomllib takes quadratic time. The search takes linear time: a
#: match can only begin at the start of a word, and the possessive quantifiers never backtrack.
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){8}""")


class Table:
    """A mapping with known keys.

    Args:
        data: the mapping.
        where: the file and table that it came from, for messages.
        required: keys that must be present.
        optional: keys that may be present.

    Raises:
        TopologyError: ``data`` is not a mapping, lacks a required key or has an unknown one.
    """

    def __init__(self, data: Mapping[str, Any], where: str, required: Sequence[str], optional: Sequence[str] = ()) -> None:
        """Checks the keys; see the class."""
        if not isinstance(data, Mapping):
            raise TopologyError(f"{where}: expected a table, not {shown(data)}")
        allowed = [*required, *(key for key in optional if key not in required)]
        # A misspelt key is both unknown and missing; reporting it as unknown is more helpful.
        for key in data:
            if key not in allowed:
                raise TopologyError(f"{where}: unknown key {shown(key)}{suggestion(str(key), allowed)}")
        for key in required:
            if key not in data:
                raise TopologyError(f"{where}: key {key!r} is missing. Required: {', '.join(required)}")
        self.data = data
        self.where = where

    def text(self, key: str) -> str:
        """The value of a key, which must be non-empty text."""
        value = self.data[key]
        if not isinstance(value, str) or not value:
            raise TopologyError(f"{self.where}: {key} must be non-empty text, not {shown(value)}")
        return value

    def integer(self, key: str, most: int = MOST) -> int:
        """The value of a key, which must be an integer from 1 to ``most``."""
        return whole(self.data[key], f"{self.where}: {key}", most=most, error=TopologyError)

    def quantity(self, key: str, quantity: Quantity, *, positive: bool = False) -> float:
        """The value of a key, in the quantity's base unit; see `costmodel.text.units.parse_quantity`."""
        try:
            value = parse_quantity(self.data[key], quantity)
        except UnitError as error:
            raise TopologyError(f"{self.where}: {key}: {error}") from None
        return figure(value, f"{self.where}: {key}", positive=positive, error=TopologyError)

    def number(self, key: str) -> float:
        """The value of a key, which must be a plain number of at least 0."""
        return figure(self.data[key], f"{self.where}: {key}", error=TopologyError)

    def boolean(self, key: str) -> bool:
        """The value of a key, which must be true or false."""
        value = self.data[key]
        if not isinstance(value, bool):
            raise TopologyError(f"{self.where}: {key} must be true or false, not {shown(value)}")
        return value

    def quantities(self, key: str, quantity: Quantity) -> tuple[tuple[float, ...], ...]:
        """The value of a key, which must be rows of quantities, in the base unit."""
        rows = self.data[key]
        if not isinstance(rows, list | tuple) or not rows or not all(isinstance(row, list | tuple) for row in rows):
            raise TopologyError(f"{self.where}: {key} must be a list of rows, not {shown(rows)}")
        try:
            return tuple(tuple(parse_quantity(value, quantity) for value in row) for row in rows)
        except UnitError as error:
            raise TopologyError(f"{self.where}: {key}: {error}") from None

    def mapping(self, key: str) -> Mapping[str, Any]:
        """The value of a key, which must be a table."""
        value = self.data[key]
        if not isinstance(value, Mapping):
            raise TopologyError(f"{self.where}: {key} must be a table, not {shown(value)}")
        return value

    def mappings(self, key: str) -> Sequence[Mapping[str, Any]]:
        """The value of a key, which must be a non-empty array of tables (TOML ``[[key]]``)."""
        value = self.data[key]
        if not isinstance(value, list | tuple) or not value or not all(isinstance(v, Mapping) for v in value):
            raise TopologyError(f"{self.where}: {key} must be one table or more, written [[{key}]], not {shown(value)}")
        return value


def plain(record: Any) -> dict[str, Any]:
    """A dataclass as plain JSON values, in the order of its attributes; attributes that have their defaults are omitted."""
    found: dict[str, Any] = {}
    for each in dataclasses.fields(record):
        value = getattr(record, each.name)
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        if value != default:
            found[each.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return plain(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file.

    Raises:
        TopologyError: the file cannot be opened or is not valid TOML; the message names it.
    """
    try:
        text = read_text(path, _LARGEST_TOML)
    except OSError as error:
        raise TopologyError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        if _LONG_KEY.search(text):
            raise ValueError("a key has more than 8 parts")
        return tomllib.loads(text)
    except ValueError as error:
        raise TopologyError(f"{path}: is not valid TOML: {error}") from None
    except RecursionError:
        raise TopologyError(f"{path}: is not valid TOML: tables or lists are nested too deeply") from None
