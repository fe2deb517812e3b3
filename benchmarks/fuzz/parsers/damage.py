"""Random damage to the values of a file, to its text, and to the words of a command line."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["WORDS", "Raw", "as_json", "as_toml", "damaged_text", "damaged_tree", "damaged_words"]


@dataclass(frozen=True)
class Raw:
    """A value that is written to files verbatim."""

    text: str


_DIGITS = "1234567890"
_NESTED = [("[" * depth + "]" * depth) for depth in (60, 5_000)] + ['{"a":' * 60 + "1" + "}" * 60]
_NUMBERS: Sequence[Any] = (
    *(0, -1, 1, 2, 3, 7, 63, 64, 2**18, 2**18 + 1, 2**31, 2**48 + 1, 2**63, 2**64, 10**9, 10**40, -(10**40)),
    *(Raw(_DIGITS * count) for count in (10, 430, 500)),
    *(5e-324, 1e-310, 1e-31, 1e31, 1e308, -0.0, 0.5, float("inf"), float("nan")),
    *map(Raw, ("1e999", "1e-999", "1_0", "0x10", "00", "+1", "٣", "²", "1.", "nan", "-inf")),
)
_TEXTS: Sequence[Any] = (
    *("", " ", "x" * 100_000, "a\0b", "[/]", "[/markup]", "[bold red]x", "[link=file:///]x[/link]", ":smile:", "\\", "\\["),
    *(
        "\x1b[31m",
        "a\nb",
        "é",
        "😀",
        "\u202e",
        "$\\frac{",
        "<b>&",
        "x,y,z",
        "auto",
        "R",
        "P",
        "+9",
        "v0",
        "1",
        "²",
        "10" * 3_000,
    ),
    *("Shard(0)@x", "S(99999)@x", "*=R", "80 GB", "1e999 GB", "5e-324 s", "1 parsec", "bf16-mixed", "param_dtype=bfloat16"),
)
_OTHER: Sequence[Any] = (None, True, False, [], {}, [[]], {"": {}}, *map(Raw, _NESTED))

#: Words that replace words of command lines, or are added to them.
WORDS = (
    *(text for text in _TEXTS if isinstance(text, str) and "\0" not in text),
    *(
        "²",
        "٣",
        "-1",
        "0",
        "1",
        "2",
        "4",
        "2,2",
        "2x2",
        "10" * 20,
        "1" * 5_000,
        str(10**9),
        "1e999",
        "nan",
        "1" + ",1" * 5_000,
    ),
    *(
        "batch=²",
        "batch=2",
        "rows=10000000000",
        "batch=2,batch=2",
        "x=",
        "=",
        "--",
        "-",
        "--json",
        "--all",
        "--help",
        "--unknown",
    ),
    *(
        "plan.json",
        "machine.toml",
        "net.py:build",
        "net.py:leave",
        "net.py:nothing",
        "net.py:odd",
        "net.py:deep",
        "net.py:",
    ),
    *(
        "config.json",
        "config.json:batch=²",
        "config.json:batch=1000000000",
        "missing/config.json",
        "missing.toml",
        ".",
        "/",
    ),
    *(
        "fifo",
        "fifo.toml",
        "fifo.json",
        "fifo.py:build",
        "/dev/zero",
        "/dev/null",
        "/dev/stdin",
        "n" * 300,
        "d/" * 3_000 + "x.toml",
    ),
    *(
        "runs.csv",
        "runs.toml",
        "gpt",
        "os:getcwd",
        "..:x",
        "no.such.module:build",
        "dgx-a100",
        "cpu",
        "tpu-v4-torus",
        "local",
    ),
    *(
        "0.weight=Shard(0)@x",
        "*" * 2_000 + "=R",
        "a=S(" + "9" * 5_000 + ")@x",
        "all_reduce",
        "linear",
        "32 MB",
        "0 B",
        "x",
        "x,y",
    ),
)


def damaged_tree(rng: random.Random, tree: Any) -> Any:
    """A copy of a tree of values with one to four changes: values are replaced, scaled, copied, renamed or removed."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        places = list(_places(tree))
        if places:
            _change(rng, *rng.choice(places), places)
    return tree


def _places(tree: Any) -> Any:
    """Yields every container of a tree with each of its keys."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from _places(value)


def _change(rng: random.Random, holder: Any, key: Any, places: Sequence[tuple[Any, Any]]) -> None:
    other, its = rng.choice(places)
    kind = rng.choice(["number", "text", "other", "other key", "copy", "drop", "rename", "scale", "again"])
    if kind == "drop":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[rng.choice([text for text in _TEXTS if len(text) < 100])] = holder.pop(key)
    elif kind == "again" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif kind == "scale" and isinstance(holder[key], int | float):
        holder[key] = holder[key] * rng.choice([-1, 0, 2, 3, 1e-20, 1e20])
    elif kind == "copy" and its in (other if isinstance(other, dict) else range(len(other))):
        holder[key] = copy.deepcopy(other[its])
    else:
        holder[key] = copy.deepcopy(rng.choice({"number": _NUMBERS, "text": _TEXTS}.get(kind, _OTHER)))


def as_json(tree: Any) -> str:
    """A tree as JSON, with its `Raw` values verbatim."""
    raw: list[str] = []

    def plain(value: Raw) -> str:
        raw.append(value.text)
        return f"@raw{len(raw) - 1}@"

    text = json.dumps(tree, default=plain)
    for number, value in enumerate(raw):
        text = text.replace(f'"@raw{number}@"', value)
    return text


def as_toml(tree: Any) -> str:
    """A tree as TOML: one line per top-level key, nested tables inline."""
    return (
        "".join(f"{_key(key)} = {_value(value)}\n" for key, value in tree.items())
        if isinstance(tree, dict)
        else _value(tree)
    )


def _key(key: str) -> str:
    return json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return (
        value.text
        if isinstance(value, Raw)
        else json.dumps(value, ensure_ascii=False).replace("Infinity", "inf").replace("NaN", "nan")
    )


def damaged_text(rng: random.Random, text: str) -> bytes:
    """A text, one to eight parts of which are removed, repeated, or replaced by random bytes, long keys or numbers."""
    data = bytearray(text.encode(errors="surrogatepass"))
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(data) + 1)
        part = slice(at, at + rng.choice([1, 3, 20, 200]))
        ways: Sequence[Callable[[], bytes]] = (
            lambda: bytes(rng.randrange(256) for _ in data[part]),  # noqa: B023 - called before `data` and `part` change
            lambda: b"",
            lambda: bytes(data[part]) * rng.choice([2, 50]),  # noqa: B023
            lambda: rng.choice(
                [b"[" * 5_000, b".a" * 5_000, b'{"a":' * 500, b"9" * 5_000, b"\0", b"\xff\xfe", b"\r", b'"', b"#"]
            ),
            lambda: b"a" + b".a" * 50_000 + b" = 1\n",
        )
        data[part] = rng.choices(ways, [4, 4, 3, 3, 1])[0]()
    return bytes(data)


def damaged_words(rng: random.Random, words: Sequence[str]) -> tuple[str, ...]:
    """A command line with one to three words replaced, left out, repeated, swapped or added."""
    found = list(words)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = rng.randrange(1, max(2, len(found)))
        kind = rng.choice(["replace"] * 5 + ["drop", "repeat", "swap", "add"])
        if kind == "add" or at >= len(found):
            found.insert(at, rng.choice(WORDS))
        elif kind == "replace":
            found[at] = rng.choice(WORDS)
        elif kind == "drop":
            del found[at]
        elif kind == "repeat":
            found.insert(at, found[at])
        else:
            other = rng.randrange(1, len(found))
            found[at], found[other] = found[other], found[at]
    return tuple(found)
