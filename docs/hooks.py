"""Generates pages of the site from the program, so that they are always current.

A page asks for it by a comment, ``<!-- made: commands -->``; the functions of `MADE` make it. `Shared` is for docstrings.
"""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import griffe
import sympy
import typer
from mkdocs.exceptions import PluginError

_ASKED = re.compile(r"<!-- made: (\w+) -->")

_SECTION = re.compile(r"^\s*(Args|Attributes):$", re.MULTILINE)
#: An entry of several names: its indent, the names, its first line, and the lines that are indented further.
_TOGETHER = re.compile(r"^([ ]+)(\w+(?:, \w+)+): (.+)((?:\n\1[ ]+.+)*)$", re.MULTILINE)

#: Modules of the cost model whose formulas are shown.
_FORMULAS = ("compute", "overlap", "pipeline", "energy", "memory", "bounds", "volumes")


class Shared(griffe.Extension):
    """Splits shared entries of docstrings, such as ``args, kwargs: example inputs``, into one per name."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the object's docstring, and hides `__post_init__`."""
        if obj.name == "__post_init__":
            obj.public = False
        if obj.docstring is not None and _SECTION.search(obj.docstring.value):
            obj.docstring.value = _TOGETHER.sub(_apart, obj.docstring.value)


def _apart(found: re.Match[str]) -> str:
    indent, names, said, more = found.groups()
    first, *others = names.split(", ")
    entries = [f"{indent}{first}: {said}{more}"]
    entries += [f"{indent}{name}: {f'see ``{first}``.' if more else said}" for name in others]
    return "\n".join(entries)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces the comments of a page with generated content."""

    def made(found: re.Match[str]) -> str:
        if found[1] not in MADE:
            raise PluginError(f"{page.file.src_uri}: nothing is called {found[1]!r}; there are {', '.join(MADE)}")
        return "\n".join(MADE[found[1]]())

    return _ASKED.sub(made, markdown)


def commands() -> Iterator[str]:
    """The commands with their arguments and options, from the signatures of their functions."""
    from autotp.cli import app

    for command in app.registered_commands:
        function = command.callback
        assert function is not None
        signature = inspect.signature(function).parameters
        hints = [(name, hint) for name, hint in _hints(function).items() if hasattr(hint, "__metadata__")]  # no context
        parameters = [_Parameter(hint, signature[hint[0]]) for hint in hints]
        arguments = [p for p in parameters if p.positional]
        options = [p for p in parameters if not p.positional]
        usage = ["autotp", str(command.name), *(p.shown for p in arguments)]
        usage += [f"{p.shown} {p.kind.upper()}" for p in options if p.required]
        summary, *more = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        examples = [part for part in more if part.startswith(("autotp ", "torchrun "))]
        yield f"\n## {command.name} {{ #{command.name} }}\n\n{summary}\n"
        yield from (f"{part}\n" for part in more if part not in examples)
        yield "```\n" + " ".join(usage + ["[OPTIONS]"]) + "\n```\n"
        if examples:
            yield "```sh\n" + "\n".join(examples) + "\n```\n"
        yield "| | | |\n|---|---|---|"
        yield from (f"| `{p.shown}` | {p.kind} | {_cell(p.help)} |" for p in arguments + options)


class _Parameter:
    """One argument or option of a command."""

    def __init__(self, hint: tuple[str, Any], parameter: inspect.Parameter) -> None:
        (name, annotation), default = hint, parameter.default
        declared, info = (
            annotation.__args__[0] if hasattr(annotation, "__args__") else annotation,
            annotation.__metadata__[0],
        )
        kinds = [kind for kind in getattr(declared, "__args__", (declared,)) if kind is not type(None)]
        self.positional = isinstance(info, typer.models.ArgumentInfo)
        self.required = default is inspect.Parameter.empty
        # A first option's name stands where a default would.
        words = [word for word in (info.default, *(info.param_decls or ())) if str(word).startswith("-")]
        word = words[0] if words else "--" + name.replace("_", "-")
        self.shown = word if not self.positional else name.upper() if self.required else f"[{name.upper()}]"
        self.kind = {Path: "file", int: "number", float: "number", bool: ""}.get(kinds[0], "text")
        plain = not self.required and default is not None and not isinstance(default, bool)
        self.help = (info.help or "") + (" Required." if self.required else f" Default: `{default}`." if plain else "")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(function, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != "return"}


def families() -> Iterator[str]:
    """The families of strategies."""
    from autotp import FAMILIES

    yield "| name | most mesh axes | what it is |\n|---|---|---|"
    for family in FAMILIES.values():
        yield f"| `{family.name}` | {family.axes} | {_cell(family.summary)} |"


def presets() -> Iterator[str]:
    """The built-in topologies."""
    from costmodel import Topology, format_quantity

    yield "| preset | device | memory | levels, innermost first: size, bandwidth, latency |\n|---|---|---|---|"
    for name in Topology.preset_names():
        machine = Topology.load(name)
        levels = "; ".join(
            f"{one.name} {one.size}, {format_quantity(one.bandwidth, 'bandwidth')}, {format_quantity(one.latency, 'time')}"
            for one in machine.levels
        )
        memory = format_quantity(machine.device.memory, "memory")
        yield f"| `{name}` | {_cell(machine.device.name)} | {memory} | {_cell(levels)} |"


def rules() -> Iterator[str]:
    """The rule table."""
    from passes.rules.table import RULES

    operators: dict[str, list[str]] = {}
    for name, rule in sorted(RULES.items()):
        form = f"`{rule.form}`" if isinstance(rule.form, str) else f"from shapes and arguments: `{_builder(rule.form)}`"
        operators.setdefault(form, []).append(f"`{name.removesuffix('.default')}`")
    yield "| rule | operators |\n|---|---|"
    yield from (f"| {_cell(form)} | {', '.join(names)} |" for form, names in operators.items())


def _builder(form: Any) -> str:
    form = getattr(form, "func", form)
    return str(getattr(form, "__qualname__", form)).split(".")[0]


def formulas() -> Iterator[str]:
    """Every formula of the cost model."""
    from costmodel import collectives

    yield "## collectives\n\n| collective | algorithm | libraries | seconds |\n|---|---|---|---|"
    for kind, algorithms in collectives.ALGORITHMS.items():
        for name, formula in algorithms.items():
            libraries = ", ".join(library for library, has in collectives.LIBRARIES.items() if name in has)
            yield f"| {kind} | {name} | {libraries} | `{formula}` |"
    for name in _FORMULAS:
        module = importlib.import_module(f"costmodel.{name}")
        yield f"\n## {name}\n\n| name | formula |\n|---|---|"
        for key, value in vars(module).items():
            if name == "memory" and key == "expression":
                for optimizer in module.OPTIMIZERS:
                    yield f"| state of `{optimizer}`, bytes | `{value(optimizer)}` |"
            elif key.isupper() and isinstance(value, sympy.Expr) and not value.is_Symbol:
                yield f"| `{key}` | {_cell(f'`{value}`')} |"
            elif key.isupper() and isinstance(value, dict | type(collectives.ALGORITHMS)):
                yield from (f"| `{key}[{one!r}]` | `{e}` |" for one, e in value.items() if isinstance(e, sympy.Expr))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


MADE: dict[str, Callable[[], Iterator[str]]] = {
    "commands": commands,
    "families": families,
    "presets": presets,
    "rules": rules,
    "formulas": formulas,
}
