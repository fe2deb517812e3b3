"""Random cases: a graph of operators, generated step by step. Each step runs when it is added; invalid ones are removed."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.fuzz.case import Case, Leaf, Ref, Step, leaf_value, refs_of, renamed, statement
from benchmarks.fuzz.draws import Operand, Seeded
from benchmarks.fuzz.operators import arguments
from benchmarks.fuzz.options import random_options
from benchmarks.fuzz.views import adapted, disguised
from passes.rules.table import RULES

__all__ = ["generate"]

_NAMES = tuple(sorted(RULES))
_STRIDE = 89  # coprime to the number of rules: all of them come round, neighbours in the table far apart
_MOST = 4096
_WRITES = ("add_", "mul_", "sub_", "copy_", "fill_", "zero_", "clamp_", "masked_fill_", "relu_", "[]=")
_UNDIFFERENTIABLE = ("aten.floor_divide", "aten.remainder.Scalar_Tensor")
_RANDOM = ("dropout", "rand_like", "randn_like")
_HALVES = (torch.bfloat16, torch.float16)


class Reject(Exception):
    """A drawn step is not valid in a model."""


def generate(seed: int, number: int) -> Case:
    """Case ``number`` of ``seed``, which is always the same. Every rule is the focus of one case in ``len(RULES)``."""
    rng = random.Random(f"{seed}/{number}")
    focus = _NAMES[(number * _STRIDE + seed) % len(_NAMES)]
    grown = _Growing(rng)
    for _ in range(20):
        if grown.attempt(lambda: grown.operator(focus)):
            break
    else:
        grown.attempt(lambda: grown.operator("aten.linear.default"))
    if rng.random() < 0.3:  # so that the gradient, too, lies otherwise than the kernel would have it
        grown.attempt(grown.look)
    for _ in range(rng.choice([0, 1, 2, 2, 3, 4, 5, 7])):
        action = rng.random()
        if action < 0.04:
            grown.attempt(grown.layers)
        elif action < 0.15:
            grown.attempt(grown.write)
        elif action < 0.3:
            grown.attempt(grown.view)
        else:
            grown.attempt(lambda: grown.operator(rng.choice(_NAMES)))
    case = Case(tuple(grown.leaves), tuple(grown.steps), tuple(grown.outputs()))
    return replace(case, options=random_options(rng, case))


class _Growing:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.dtype = rng.choices([torch.float64, torch.float32, *_HALVES], [80, 6, 7, 7])[0]
        palettes = [(2, 4, 8), (2, 3, 4, 6), (1, 2, 4, 8, 12), (1, 4, 6), (3, 5, 7, 8), (2, 4, 8, 9), (4, 12, 1, 2)]
        palette = rng.choice(palettes)
        if rng.random() < 0.03:
            palette = (*palette, 0)
        if self.dtype in _HALVES and rng.random() < 0.5:
            palette = (4, 8, 64, 256)
        self.draw = Seeded(rng, palette)
        self.leaves: list[Leaf] = []
        self.steps: list[Step] = []
        self.env: dict[str, Any] = {"torch": torch, "self": SimpleNamespace()}
        self.count = 0
        self.noise: set[str] = set()  # results of random operators, which nothing but a product with 0 reads

    # values

    def tensors(self) -> list[str]:
        """Names of all tensors so far, leaves too."""
        names = [leaf.name for leaf in self.leaves] + [step.result for step in self.steps if not step.writes]
        return [name for name in names if name not in self.noise and isinstance(self.value(name), Tensor)]

    def value(self, name: str) -> Any:
        return self.env.get(name, getattr(self.env["self"], name, None))

    def fresh(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def attempt(self, action: Any) -> bool:
        """Does something to the model, or leaves it as it was if torch would not take it."""
        before = list(self.leaves), list(self.steps)
        try:
            action()
            return True
        except (Reject, RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            self.leaves, self.steps = before
            self.again()
            return False

    def again(self) -> None:
        """All values anew: a step that was taken back may have written to some."""
        self.env = {"torch": torch, "self": SimpleNamespace()}
        for leaf in self.leaves:
            self.hold(leaf)
        for step in self.steps:
            exec(self.line(step), self.env)  # noqa: S102

    def hold(self, leaf: Leaf) -> None:
        tensor = self.value(leaf.same) if leaf.same else leaf_value(leaf)
        if leaf.role == "input":
            self.env[leaf.name] = tensor
        else:
            setattr(self.env["self"], leaf.name, tensor)

    def line(self, step: Step) -> str:
        return statement(step, {leaf.name: f"self.{leaf.name}" for leaf in self.leaves if leaf.role != "input"})

    def emit(self, call: str, *args: Any, **kwargs: Any) -> Ref:
        """Adds a step, and runs it.

        Raises:
            Reject: its result is too large, or not finite.
        """
        step = Step(self.fresh("v"), call, args, kwargs)
        with torch.no_grad():
            exec(self.line(step), self.env)  # noqa: S102
        self.steps.append(step)
        written = {name for name in refs_of(list(args[:1]))} if step.writes else {step.result}
        for name in written:
            self.sane(self.value(name))
        return Ref(step.result)

    @property
    def most(self) -> int:
        """How many elements a tensor may have."""
        return _MOST * (16 if self.dtype in _HALVES else 1)

    def sane(self, value: Any) -> None:
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(tensor, Tensor):
                continue
            if tensor.is_complex() or tensor.numel() > self.most:
                raise Reject
            if tensor.is_floating_point() and tensor.numel() and not (tensor.abs() < 1e3).all():
                raise Reject

    # leaves and operands

    def leaf(self, want: Operand) -> Ref:
        """A leaf of the wanted kind.

        Raises:
            Reject: it would be too large.
        """
        if math.prod(want.shape) > self.most:
            raise Reject
        floating = want.kind not in ("ids", "mask")
        dtype = self.dtype if floating else torch.int64 if want.kind == "ids" else torch.bool
        role = self.rng.choices(["input", "parameter", "buffer"], [4, 5, 1])[0] if floating else "input"
        if want.constant:
            role = "buffer"
        elif not any(leaf.role == "input" for leaf in self.leaves):
            role = "input"
        forms = ["plain"] * 4 + ["permuted", "strided"] * (len(want.shape) > 0)
        forms += ["expanded"] * (role == "input" and len(want.shape) > 1 and want.shape[0] > 0)
        similar = [o for o in self.leaves if o.role == "parameter" and (o.shape, o.kind) == (want.shape, want.kind)]
        tied = similar[0].name if role == "parameter" and similar and self.rng.random() < 0.5 else None
        form = self.rng.choice(forms)
        trained = role == "input" and floating and self.rng.random() < 0.7
        made = Leaf(
            self.fresh({"input": "x", "parameter": "p", "buffer": "b"}[role]),
            role, want.shape, dtype, want.kind, self.count, form, want.high, tied, trained,
        )  # fmt: skip
        self.leaves.append(made)
        self.hold(made)
        return Ref(made.name)

    def operand(self, want: Operand) -> Ref:
        """A value of the model that is what is wanted, after a view or two; or a leaf."""
        chance = self.rng.random()
        if want.constant or want.kind == "ids" or chance < 0.25:
            return self.leaf(want)
        if want.kind == "mask":
            found = self.fitting(want.shape)
            return self.emit("torch.ops.aten.gt.Scalar", found, 0.1) if found else self.leaf(want)
        found = self.fitting(want.shape)
        if found is None:
            return self.leaf(want)
        if want.kind in ("unit", "above"):
            found = self.emit("torch.ops.aten.sigmoid.default", found)
        if want.kind == "above":
            found = self.emit("torch.ops.aten.add.Scalar", found, 1)
        return found

    def fitting(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Ref | None:
        """A floating-point value in that shape, in some company."""
        wanted = dtype or self.dtype
        names = [name for name in self.tensors() if self.value(name).dtype == wanted]
        for name in sorted(names, key=lambda name: self.rng.random() - 0.02 * len(name))[:6]:
            found = adapted(self.emit, self.rng, Ref(name), tuple(self.value(name).shape), shape)
            if found is not None:
                return disguised(self.emit, self.rng, found, shape)
        return None

    # what is added

    def operator(self, name: str) -> None:
        """An operator of the table, its operands from the model."""
        args, kwargs = arguments(name, self.draw)
        if "dropout" in name and self.rng.random() < 0.2:
            args[1:] = [0.3, False]
        if any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())) and self.dtype in _HALVES:
            args = [torch.float32 if isinstance(a, torch.dtype) else a for a in args]
        turned = self.turning(args)
        first = [self.turned(args[0], *turned)] if turned else []
        given = [*first, *map(self.supplied, args[len(first) :])]
        if name.startswith(_UNDIFFERENTIABLE):
            given = [self.emit(".detach", a) if isinstance(a, Ref) else a for a in given]
        raw = found = self.emit(_call(name), *given, **kwargs)
        value = self.value(found.name)
        if turned and isinstance(value, (list, tuple)) and isinstance(value[0], Tensor):
            found = self.emit("[]", found, 0)
            value = self.value(found.name)
        if turned and isinstance(value, Tensor) and value.dim() > max(turned):
            found = self.emit(".transpose", found, *turned)
        if isinstance(value, (list, tuple)):
            for i, tensor in enumerate(value):
                if isinstance(tensor, Tensor):
                    self.emit("[]", found, i)
        elif any(kind in name for kind in _RANDOM):
            self.noise |= {raw.name, found.name}
            self.emit("torch.ops.aten.mul.Scalar", found, 0.0)

    def turning(self, args: list[Any]) -> tuple[int, int] | None:
        """Dims that an operator's data are transposed by before it, and its result after it, as models do."""
        first = args[0] if args else None
        if not isinstance(first, Operand) or first.kind != "real" or len(first.shape) < 2 or self.rng.random() < 0.8:
            return None
        a, b = sorted(self.rng.sample(range(len(first.shape)), 2))
        return a, b

    def turned(self, want: Operand, a: int, b: int) -> Ref:
        shape = list(want.shape)
        shape[a], shape[b] = shape[b], shape[a]
        return self.emit(".transpose", self.operand(replace(want, shape=tuple(shape))), a, b)

    def supplied(self, argument: Any) -> Any:
        if isinstance(argument, Operand):
            return self.operand(argument)
        return [self.supplied(a) for a in argument] if isinstance(argument, list) else argument

    def view(self) -> None:
        """Some value otherwise: transposed, sliced, with or without dims of 1."""
        names = [name for name in self.tensors() if self.value(name).dim()]
        if not names:
            raise Reject
        name = self.rng.choice(names)
        disguised(self.emit, self.rng, Ref(name), tuple(self.value(name).shape), always=True)

    def look(self) -> None:
        """The last value, transposed."""
        shape = self.value(self.steps[-1].result).shape
        self.emit(".transpose", Ref(self.steps[-1].result), self.rng.randrange(len(shape)), len(shape) - 1)

    def layers(self) -> None:
        """The last few steps once more, with other parameters, on what they gave: layers that are folded into one."""
        block = self.steps[-self.rng.randint(1, 4) :]
        if any(step.writes or step.call == "[]" for step in block):
            raise Reject
        inside = {step.result for step in block}
        outside = [name for step in block for name in refs_of([*step.args]) if name not in inside]
        last = self.value(block[-1].result)
        begins = [n for n in outside if self.value(n).shape == last.shape and self.value(n).dtype == last.dtype]
        if not begins:
            raise Reject
        leaves = {leaf.name: leaf for leaf in self.leaves}
        for _ in range(self.rng.choice([1, 2])):
            names = {begins[0]: block[-1].result}
            for name in outside:
                if name in leaves and leaves[name].role == "parameter" and name not in names:
                    old = leaves[name]
                    new = replace(old, name=self.fresh("p"), seed=self.count, same=None)
                    self.leaves.append(new)
                    self.hold(new)
                    names[name] = new.name
            block = [self.once_more(step, names) for step in block]

    def once_more(self, step: Step, names: dict[str, str]) -> Step:
        found = self.emit(step.call, *(renamed(a, names) for a in step.args), **step.kwargs)
        names[step.result] = found.name
        return self.steps[-1]

    def write(self) -> None:
        """Writes into a value, or into a view of it; also into buffers."""
        leaves = {leaf.name: leaf for leaf in self.leaves}
        names = [n for n in self.tensors() if self.value(n).is_floating_point() and self.value(n).numel()]
        names = [n for n in names if n not in leaves or leaves[n].role == "buffer"]
        if not names:
            raise Reject
        base = Ref(self.rng.choice(names))
        if base.name not in leaves and (self.rng.random() < 0.6 or self.shows_a_leaf(base.name)):
            base = self.emit(self.rng.choice([".clone", ".clone", ".contiguous"]), base)
        into = base
        if self.rng.random() < 0.7:
            into = self.part(base)
        shape, dtype = tuple(self.value(into.name).shape), self.value(into.name).dtype
        call = self.rng.choice(_WRITES)
        if base.name in leaves:  # a gradient through a buffer would be kept from step to step
            self.emit(".fill_" if call == "fill_" else ".mul_", into, 0.5)
            return
        if call in ("add_", "mul_", "sub_", "copy_", "[]="):
            given = self.fitting(shape, dtype) or self.leaf(Operand(shape))
            memory = {self.value(each.name).untyped_storage().data_ptr() for each in (given, into)}
            if len(memory) == 1:  # what is read while it is written: torch leaves open what that gives
                given = self.emit(".clone", given)
            if call == "[]=":
                self.emit("[]=", into, (slice(None),) * len(shape) if shape else ..., given)
            else:
                self.emit(f".{call}", into, given)
        elif call == "masked_fill_":
            self.emit(".masked_fill_", into, self.operand(Operand(shape, "mask")), 0.5)
        else:
            self.emit(f".{call}", into, *({"fill_": [0.5], "clamp_": [-0.5, 0.5]}.get(call, [])))
        if self.rng.random() < 0.5 and into != base:  # read what was written, beside the view of it
            self.emit("torch.ops.aten.tanh.default", base)

    def shows_a_leaf(self, name: str) -> bool:
        """Whether a value is a view of a leaf, or is expanded: neither may be written to."""
        value = self.value(name)
        memory = {self.value(leaf.name).untyped_storage().data_ptr() for leaf in self.leaves if leaf.role != "buffer"}
        return value.untyped_storage().data_ptr() in memory or 0 in value.stride()

    def part(self, base: Ref) -> Ref:
        shape = self.value(base.name).shape
        if not len(shape):
            return base
        dim = self.rng.randrange(len(shape))
        if self.rng.random() < 0.3:
            return self.emit(".transpose", base, dim, self.rng.randrange(len(shape)))
        if self.rng.random() < 0.3:
            return self.emit(".select", base, dim, self.rng.randrange(shape[dim]))
        start = self.rng.randrange(shape[dim])
        chosen = slice(start, self.rng.randint(start + 1, shape[dim]), self.rng.choice([None, None, 2]))
        return self.emit("[]", base, (*[slice(None)] * dim, chosen))

    def outputs(self) -> list[str]:
        """What nothing else uses, and sometimes a value that something does."""
        used = {name for step in self.steps for name in refs_of([*step.args])}
        produced = [n for n in self.tensors() if n not in {leaf.name for leaf in self.leaves}]
        ends = [name for name in produced if name not in used][-6:]
        if produced and self.rng.random() < 0.3:
            ends.append(self.rng.choice(produced))
        return list(dict.fromkeys(ends)) or produced[-1:] or [self.leaves[0].name]


def _call(name: str) -> str:
    return "torch.ops." + ("aten.batch_norm.default" if name == "autotp.batch_norm_train.default" else name)
