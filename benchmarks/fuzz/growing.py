"""A model under construction: its leaves, its steps, and their values."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.fuzz.case import Leaf, Ref, Step, leaf_value, refs_of, statement
from benchmarks.fuzz.draws import Operand, Seeded
from benchmarks.fuzz.views import adapted, disguised

__all__ = ["HALVES", "Growing", "Reject"]

HALVES = (torch.bfloat16, torch.float16)
_MOST = 4096
_RANKS = 128  # so many distinct values are still distinct in bfloat16 and float16
_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


class Reject(Exception):
    """Raised if a drawn step is not valid in the model."""


class Growing:
    """A model under construction: its leaves, its steps, and their values."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.dtype = rng.choices([torch.float64, torch.float32, *HALVES], [80, 6, 7, 7])[0]
        palettes = [(2, 4, 8), (2, 3, 4, 6), (1, 2, 4, 8, 12), (1, 4, 6), (3, 5, 7, 8), (2, 4, 8, 9), (4, 12, 1, 2)]
        palette = rng.choice(palettes)
        if rng.random() < 0.03:
            palette = (*palette, 0)
        if self.dtype in HALVES and rng.random() < 0.5:
            palette = (4, 8, 64, 256)
        self.draw = Seeded(rng, palette)
        self.leaves: list[Leaf] = []
        self.steps: list[Step] = []
        self.env: dict[str, Any] = {"torch": torch, "self": SimpleNamespace()}
        self.count = 0
        self.noise: set[str] = set()  # results of random operators; their only consumer is a product with 0

    # values

    def tensors(self) -> list[str]:
        """The names of all tensors so far, including leaves."""
        names = [leaf.name for leaf in self.leaves] + [step.result for step in self.steps if not step.writes]
        return [name for name in names if name not in self.noise and isinstance(self.value(name), Tensor)]

    def value(self, name: str) -> Any:
        return self.env.get(name, getattr(self.env["self"], name, None))

    def fresh(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def attempt(self, action: Any) -> bool:
        """Runs an action that changes the model; undoes it and returns False if torch or the model rejects it."""
        before = list(self.leaves), list(self.steps)
        try:
            action()
            return True
        except (Reject, RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            self.leaves, self.steps = before
            self.rerun()
            return False

    def rerun(self) -> None:
        """Recomputes all values: a step that was undone may have written to some of them in place."""
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
        """Runs a step and adds it to the model.

        Raises:
            Reject: A written value is too large (in elements or magnitude), not finite, or of dtype complex32.
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
        """The largest number of elements of a tensor."""
        return _MOST * (16 if self.dtype in HALVES else 1)

    def sane(self, value: Any) -> None:
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(tensor, Tensor):
                continue
            if tensor.dtype == torch.complex32 or tensor.numel() > self.most:
                raise Reject
            if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() and not (tensor.abs() < 1e3).all():
                raise Reject

    # leaves and operands

    def leaf(self, want: Operand) -> Ref:
        """Adds a leaf for the requested operand.

        Raises:
            Reject: The leaf would have too many elements.
        """
        if math.prod(want.shape) > self.most:
            raise Reject
        if want.kind == "ranked" and self.dtype in HALVES and math.prod(want.shape) > _RANKS:
            raise Reject
        floating = want.kind not in ("ids", "places", "mask")
        dtype = self.dtype if floating else torch.bool if want.kind == "mask" else torch.int64
        role = self.rng.choices(["input", "parameter", "buffer"], [4, 5, 1])[0] if floating else "input"
        if want.constant:
            role = "buffer"
        elif not any(leaf.role == "input" for leaf in self.leaves):
            role = "input"
        forms = ["plain"] * 4 + ["permuted", "strided"] * (len(want.shape) > 0)
        forms += ["expanded"] * (role == "input" and want.kind != "ranked" and len(want.shape) > 1 and want.shape[0] > 0)
        if want.kind == "places":
            forms = ["plain"]
        similar = [o for o in self.leaves if o.role == "parameter" and (o.shape, o.kind) == (want.shape, want.kind)]
        tied = similar[0].name if role == "parameter" and similar and self.rng.random() < 0.5 else None
        form = self.rng.choice(forms)
        trained = role == "input" and floating and self.rng.random() < 0.7
        made = Leaf(
            self.fresh({"input": "x", "parameter": "p", "buffer": "b"}[role]),
            role, want.shape, dtype, want.kind, self.count, form, want.high, tied, trained, want.axis,
        )  # fmt: skip
        self.leaves.append(made)
        self.hold(made)
        return Ref(made.name)

    def operand(self, want: Operand) -> Ref:
        """A value of the model, adapted to the requested operand by further steps, or else a new leaf."""
        chance = self.rng.random()
        if want.kind == "complex":
            return self.complex_numbers(want.shape)
        if want.constant or want.kind in ("ids", "places") or chance < 0.25:
            return self.leaf(want)
        if want.kind == "mask":
            found = self.fitting(want.shape)
            return self.emit("torch.ops.aten.gt.Scalar", found, 0.1) if found else self.leaf(want)
        found = self.fitting(want.shape)
        if found is None or (want.kind == "ranked" and not self.apart(found)):
            return self.leaf(want)
        if want.kind in ("unit", "above"):
            found = self.emit("torch.ops.aten.sigmoid.default", found)
        if want.kind == "above":
            found = self.emit("torch.ops.aten.add.Scalar", found, 1)
        return found

    def apart(self, found: Ref) -> bool:
        """Whether all magnitudes differ by more than rounding errors, so that their order is the same on all devices."""
        value = self.value(found.name).double().abs().flatten().sort().values
        least = max(1e-6, 16 * torch.finfo(self.dtype).eps) * value.max() if value.numel() else 0.0
        return bool((value.diff() > least).all())

    def complex_numbers(self, shape: tuple[int, ...]) -> Ref:
        """A complex value of the model, or one made of real values; sometimes a lazy conjugate.

        Raises:
            Reject: The model is in bfloat16 or float16, which have no complex counterparts here.
        """
        if self.dtype in HALVES:
            raise Reject
        how = self.rng.choice(["found", "parts", "parts", "pairs", "polar"])
        found = self.fitting(shape, _COMPLEX[self.dtype]) if how == "found" else None
        if found is None and how == "pairs":
            found = self.emit("torch.view_as_complex", self.emit(".contiguous", self.operand(Operand((*shape, 2)))))
        elif found is None and how == "polar":
            radius, angle = self.operand(Operand(shape, "unit")), self.operand(Operand(shape))
            found = self.emit("torch.ops.aten.polar.default", radius, angle)
        elif found is None:
            found = self.emit("torch.ops.aten.complex.default", self.operand(Operand(shape)), self.operand(Operand(shape)))
        return self.emit(".conj", found) if self.rng.random() < 0.1 else found

    def brought_back(self) -> None:
        """Converts complex values without consumers to real ones."""
        for name in self.unused():
            if self.complex(name):
                call = self.rng.choice(["view_as_real", "view_as_real", "real", "imag", "abs"])
                value = Ref(name)
                if call == "view_as_real":
                    value = self.emit("torch.ops.aten.resolve_conj.default", value)
                self.emit(f"torch.ops.aten.{call}.default", value)

    def fitting(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Ref | None:
        """A value of a dtype (by default, the model's) that is brought into a shape by views; None if there is none."""
        wanted = dtype or self.dtype
        names = [name for name in self.tensors() if self.value(name).dtype == wanted]
        for name in sorted(names, key=lambda name: self.rng.random() - 0.02 * len(name))[:6]:
            found = adapted(self.emit, self.rng, Ref(name), tuple(self.value(name).shape), shape)
            if found is not None:
                return disguised(self.emit, self.rng, found, shape)
        return None

    def complex(self, name: str) -> bool:
        """Whether a value is complex."""
        return bool(self.value(name).is_complex())

    def unused(self) -> list[str]:
        """The names of the results that no step uses."""
        used = {name for step in self.steps for a in (*step.args, *step.kwargs.values()) for name in refs_of(a)}
        leaves = {leaf.name for leaf in self.leaves}
        return [name for name in self.tensors() if name not in leaves | used]

    def outputs(self) -> list[str]:
        """The names of the outputs: unused results (at most six), and sometimes one further result."""
        leaves = {leaf.name for leaf in self.leaves}
        produced = [name for name in self.tensors() if name not in leaves and not self.complex(name)]
        ends = [name for name in self.unused() if not self.complex(name)][-6:]
        if produced and self.rng.random() < 0.3:
            ends.append(self.rng.choice(produced))
        return list(dict.fromkeys(ends)) or produced[-1:] or [self.leaves[0].name]
