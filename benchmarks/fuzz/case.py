"""Cases of the fuzzer: a small module as data, from which its source and values are generated, and the options of its run.

The printed module is the module that runs: ``source`` returns its text, and ``build`` executes this text.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Case", "Leaf", "Options", "Ref", "Step", "build", "execute", "leaf_value", "lines_of", "refs_of", "renamed", "source",
    "statement", "value_of",
]  # fmt: skip

_FILES = itertools.count()
_CASTS = tuple(f"torch.ops.aten.{cast}." for cast in ("to", "_to_copy", "type_as"))
_DRAW = """def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
"""


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a value by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that the module starts from.

    Attributes:
        name: The name of the tensor.
        role: "input", "parameter" or "buffer".
        shape, dtype: The shape and dtype of the tensor.
        kind: The kind of its values, see ``benchmarks.fuzz.draws.Operand``.
        seed: The seed of its values.
        form: The memory format: "plain", "permuted", "strided" or "expanded".
        high, axis: See ``Operand``; for the kinds "ids" and "places" only.
        same: The name of the parameter that it is tied to.
        trained: Whether an input requires a gradient.
        plain: Whether a buffer is a plain attribute rather than a registered buffer.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = "real"
    seed: int = 0
    form: str = "plain"
    high: int = 0
    same: str | None = None
    trained: bool = False
    axis: int = 0
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One line of ``forward``.

    Attributes:
        result: The name of its value, or of the step itself if it only writes in place.
        call: An operator (``torch.ops.aten.add.Tensor``), a method (``.add_``), ``[]`` (an item or a slice), ``[]=``
            or ``=`` (replaces a buffer).
        args, kwargs: Numbers, lists, ``Ref``.
    """

    result: str
    call: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def writes(self) -> bool:
        """Whether the step writes to its first argument and has no result."""
        return self.call in ("=", "[]=") or (self.call.startswith(".") and self.call.endswith("_"))


@dataclass(frozen=True, slots=True)
class Options:
    """How a case is planned and run.

    Attributes:
        family, mesh, schedule, chunks, panels, constraints, memory, recompute, reshard_after_forward: As in
            ``autotp.plan``.
        free: Communication is almost free on the machine, so that plans communicate more.
        training: The module's mode; ``inference`` plans and runs without gradients.
        served: (step, index of the operator in the step) -> the factor of each mesh axis, instead of the planned strategy.
        rests: Parameter -> its encoded layout at rest, instead of the planned one.
    """

    family: str = "auto"
    mesh: tuple[int, ...] = (2,)
    schedule: str = "none"
    chunks: Mapping[str, int] = field(default_factory=dict)
    panels: int | None = None
    constraints: tuple[str, ...] = ()
    memory: float | None = None
    recompute: str = "none"
    reshard_after_forward: bool | None = None
    free: bool = True
    training: bool = True
    inference: bool = False
    served: Mapping[tuple[str, int], tuple[str | None, ...]] = field(default_factory=dict)
    rests: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return int(torch.Size(self.mesh).numel())


@dataclass(frozen=True, slots=True)
class Case:
    """A module, its inputs, and the options of its run."""

    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    options: Options = field(default_factory=Options)

    @property
    def inputs(self) -> tuple[Leaf, ...]:
        """The arguments of ``forward``."""
        return tuple(leaf for leaf in self.leaves if leaf.role == "input")

    @property
    def dtype(self) -> torch.dtype:
        """The least precise floating-point dtype of its leaves and of the arguments of its steps."""
        dtypes = {leaf.dtype for leaf in self.leaves}
        dtypes |= {a for step in self.steps for a in (*step.args, *step.kwargs.values()) if isinstance(a, torch.dtype)}
        floating = [dtype for dtype in dtypes if dtype.is_floating_point]
        return max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)

    def where(self, **changes: Any) -> Case:
        """Returns the same case with changed options."""
        return replace(self, options=replace(self.options, **changes))


def refs_of(value: Any) -> list[str]:
    """The names of the values that an argument of a step refers to."""
    if isinstance(value, Ref):
        return [value.name]
    if isinstance(value, (list, tuple)):
        return [name for item in value for name in refs_of(item)]
    return []


def renamed(value: Any, names: dict[str, str]) -> Any:
    """An argument of a step whose references are renamed by ``names``."""
    if isinstance(value, Ref):
        return Ref(names.get(value.name, value.name))
    if isinstance(value, list):
        return [renamed(v, names) for v in value]
    return tuple(renamed(v, names) for v in value) if isinstance(value, tuple) else value


def value_of(value: Any, known: Mapping[str, Any] | None = None) -> str:
    """An argument of a step as source text; ``known`` maps names to the text that replaces them."""
    if isinstance(value, Ref):
        return str((known or {}).get(value.name, value.name))
    if isinstance(value, list):
        return "[" + ", ".join(value_of(v, known) for v in value) + "]"
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, slice):
        start, stop, step = ("" if v is None else str(v) for v in (value.start, value.stop, value.step))
        return f"{start}:{stop}" + (f":{step}" if step else "")
    if isinstance(value, float) and not torch.isfinite(torch.tensor(value)):
        return f'float("{value}")'
    return repr(value)


def statement(step: Step, known: Mapping[str, str] | None = None) -> str:
    """A step as a line of source text."""
    first, *rest = [value_of(a, known) for a in step.args]
    named = [f"{key}={value_of(value, known)}" for key, value in step.kwargs.items()]
    target = "" if step.writes else f"{step.result} = "
    if step.call == "=":
        return f"{first} = {rest[0]}"
    if step.call in ("[]", "[]="):
        place = step.args[1]
        where = ", ".join(value_of(p, known) for p in place) if isinstance(place, tuple) else rest[0]
        return f"{target}{first}[{where}]" if step.call == "[]" else f"{first}[{where}] = {rest[-1]}"
    if step.call.startswith("."):
        return f"{target}{first}{step.call}({', '.join([*rest, *named])})"
    return f"{target}{step.call}({', '.join([first, *rest, *named])})"


def _leaf(leaf: Leaf, dtype: torch.dtype | None) -> str:
    """The expression that creates a leaf; ``dtype``, if given, replaces a floating-point dtype."""
    shape = list(leaf.shape)
    order = list(range(len(shape)))[::-1]
    if leaf.form == "permuted":
        shape = shape[::-1]
    elif leaf.form == "strided":
        shape[-1] *= 2
    elif leaf.form == "expanded":
        shape[0] = 1
    text = f"draw({', '.join(map(str, [leaf.seed, *shape]))})"
    if leaf.kind in ("unit", "above"):
        text += ".sigmoid()" + " + 1" * (leaf.kind == "above")
    elif leaf.kind == "ranked":
        text = f"(({text}.flatten().argsort() + 1) / 256.0).double().reshape({shape})"
    elif leaf.kind == "places":
        wide = [*shape[: leaf.axis], leaf.high, *shape[leaf.axis + 1 :]]
        drawn = f"draw({', '.join(map(str, [leaf.seed, *wide]))})"
        text = f"{drawn}.argsort({leaf.axis}).narrow({leaf.axis}, 0, {shape[leaf.axis]})"
    elif leaf.kind == "sorted":
        text += ".sort().values"
    elif leaf.kind == "ids":
        text = f"({text}.abs() * 1000).long() % {leaf.high}"
    elif leaf.kind == "mask":
        text += " > 0"
    if leaf.kind == "above":
        text = f"({text})"
    if leaf.dtype.is_floating_point and leaf.dtype != torch.float64:
        text += f".to({leaf.dtype})"
    if dtype is not None and leaf.dtype.is_floating_point:
        text += f".to({dtype})"
    tail = {"permuted": f".permute({order})", "strided": "[..., ::2]", "expanded": f".expand({list(leaf.shape)})"}
    if leaf.form in tail:
        text = f"({text}){tail[leaf.form]}" if leaf.kind in ("ids", "mask") else text + tail[leaf.form]
    return text


def leaf_value(leaf: Leaf) -> Tensor:
    """The tensor of a leaf."""
    draw = execute(_DRAW)["draw"]
    return eval(_leaf(leaf, None), {"draw": draw, "torch": torch})  # noqa: S307


def _widened(step: Step, dtype: torch.dtype | None) -> Step:
    def wide(value: Any) -> Any:
        return dtype if dtype is not None and isinstance(value, torch.dtype) and value.is_floating_point else value

    return replace(step, args=tuple(map(wide, step.args)), kwargs={k: wide(v) for k, v in step.kwargs.items()})


def _copied(step: Step, dtype: torch.dtype | None) -> str:
    """A suffix that keeps a cast a copy, which may be written in place: with one dtype for all, it would be an alias."""
    return ".clone()" if dtype is not None and step.call.startswith(_CASTS) else ""


def source(case: Case, dtype: torch.dtype | None = None) -> str:
    """The source text of the module and its inputs; ``dtype``, if given, replaces all floating-point dtypes."""
    held = [leaf for leaf in case.leaves if leaf.role != "input"]
    lines = [
        *_DRAW.splitlines(),
        "",
        "",
        "class M(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
    ]
    for leaf in held:
        if leaf.role == "parameter":
            made = f"self.{leaf.same}" if leaf.same else f"nn.Parameter({_leaf(leaf, dtype)})"
            lines.append(f"        self.{leaf.name} = {made}")
        elif leaf.plain:
            lines.append(f"        self.{leaf.name} = {_leaf(leaf, dtype)}")
        else:
            lines.append(f'        self.register_buffer("{leaf.name}", {_leaf(leaf, dtype)})')
    known = {leaf.name: f"self.{leaf.name}" for leaf in held}
    lines += ["", f"    def forward({', '.join(['self', *(leaf.name for leaf in case.inputs)])}):"]
    lines += [f"        {statement(_widened(step, dtype), known)}{_copied(step, dtype)}" for step in case.steps]
    lines.append(f"        return {', '.join(known.get(name, name) for name in case.outputs)}")
    lines += ["", "", "def build():", f"    model = M().train({case.options.training})"]
    for leaf in case.inputs:
        grad = ".requires_grad_()" if leaf.trained and not case.options.inference else ""
        made = _leaf(leaf, dtype)
        lines.append(f"    {leaf.name} = {f'({made}){grad}' if grad and leaf.form == 'plain' else made + grad}")
    names = "".join(f"{leaf.name}, " for leaf in case.inputs)
    return "\n".join([*lines, f"    return model, ({names.rstrip()})", ""])


def execute(text: str) -> dict[str, Any]:
    """Runs source text and returns its namespace. Its file name is unique, for captured graphs to refer to its lines."""
    file = f"<fuzz {next(_FILES)}>"
    names: dict[str, Any] = {"torch": torch, "nn": nn, "__name__": "fuzz"}
    exec(compile(text, file, "exec"), names)  # noqa: S102 - the text is made above
    return names


def build(case: Case, dtype: torch.dtype | None = None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module and its inputs."""
    model, args = execute(source(case, dtype))["build"]()
    return model, args


def lines_of(case: Case) -> Mapping[int, str]:
    """Line number in the source text -> the name of the step at this line."""
    lines = source(case).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("    def forward")) + 2
    return {first + i: step.result for i, step in enumerate(case.steps)}
