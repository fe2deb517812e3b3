"""Writes a topology as TOML that `Topology.load` reads back exactly, with comments for units and notes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .text.units import Quantity, format_quantity
from .topology import Topology

__all__ = ["topology_toml"]

_QUANTITIES: Mapping[str, Quantity] = {
    "memory": "memory",
    "memory_bandwidth": "bandwidth",
    "launch": "time",
    "host": "time",
    "bandwidth": "bandwidth",
    "latency": "time",
    "overhead": "time",
    "copying": "bandwidth",
    "point_to_point": "bandwidth",
    "idle_power": "power",
    "busy_power": "power",
}


def topology_toml(
    topology: Topology, header: Iterable[str] = (), notes: Mapping[tuple[str, ...], str] | None = None
) -> str:
    """A topology as the text of a TOML file, all figures in base units.

    Args:
        topology: what to write.
        header: lines of a comment at the top, without the ``#``.
        notes: comments on figures, by their path: ``("device", "half_size")``, ``("device", "flops", "float32")``,
            ``("levels", "node", "all_reduce")``.
    """
    data, notes = topology.to_dict(), notes or {}
    lines = [_comment(line) for line in header]
    lines += [f"name = {_value(data['name'])}", f"library = {_value(data['library'])}", "", "[device]"]
    lines += _table(data["device"], ("device",), notes)
    for level in data["levels"]:
        lines += ["", "[[levels]]", *_table(level, ("levels", level["name"]), notes, prefix="levels.")]
    return "\n".join(lines) + "\n"


def _table(
    data: Mapping[str, Any], where: tuple[str, ...], notes: Mapping[tuple[str, ...], str], prefix: str = ""
) -> list[str]:
    """Writes plain keys first, because in TOML all keys after a table's header belong to that table."""
    plain = {key: value for key, value in data.items() if not isinstance(value, Mapping)}
    lines = [_line(key, value, notes.get((*where, key))) for key, value in plain.items()]
    for key, table in data.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{prefix or 'device.'}{key}]"]
            # Notes on measured collectives are by the collective's name, without the word "measured".
            path = where if key == "measured" else (*where, key)
            lines += [_line(name, value, notes.get((*path, name)), key) for name, value in table.items()]
    return lines


def _line(key: str, value: Any, note: str | None, table: str = "") -> str:
    comments = [_readable(key, value, table), note or ""]
    text = "; ".join(comment for comment in comments if comment)
    return f"{key} = {_value(value)}" + (f"  {_comment(text)}" if text else "")


def _readable(key: str, value: Any, table: str) -> str:
    if isinstance(value, Mapping):
        return ", ".join(_readable(name, figure, "") for name, figure in value.items())
    quantity = "rate" if table == "flops" else None if table else _QUANTITIES.get(key)
    return format_quantity(value, quantity) if quantity is not None and not isinstance(value, str) else ""


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML has the escapes of JSON, but also requires one for U+007F, and does not allow surrogate pairs.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(figure)}" for key, figure in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    # repr is the shortest text that reads back as the same number.
    return repr(int(value) if isinstance(value, int) else float(value))


def _comment(text: str) -> str:
    # A control character would end the comment, or make the file invalid.
    return f"# {''.join(c if c.isprintable() else ' ' for c in text)}".rstrip()
