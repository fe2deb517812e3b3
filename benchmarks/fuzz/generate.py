"""Random cases: a graph of operators, generated step by step. Each step runs when it is added; invalid ones are removed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.fuzz.case import Case, Leaf, Ref, Step, refs_of, renamed
from benchmarks.fuzz.derivatives import derivative
from benchmarks.fuzz.dims import COMPLEX_TOO
from benchmarks.fuzz.draws import Operand
from benchmarks.fuzz.growing import HALVES, Growing, Reject
from benchmarks.fuzz.operators import arguments
from benchmarks.fuzz.options import random_options
from benchmarks.fuzz.views import disguised
from passes.rules.table import RULES

__all__ = ["generate"]

_NAMES = tuple(sorted(RULES))
_STRIDE = 89  # coprime to the number of rules, so that every rule has its turn and neighbors in the table are far apart
_TRANSFORMED = 256  # most elements of a value that is differentiated: a Jacobian has many more
_WRITES = ("add_", "mul_", "sub_", "copy_", "fill_", "zero_", "clamp_", "masked_fill_", "relu_", "[]=")
_UNDIFFERENTIABLE = ("aten.floor_divide", "aten.remainder.Scalar_Tensor")
_TURNED = ("real", "unit", "ranked", "complex")
_RANDOM = ("dropout", "rand_like", "randn_like")


def generate(seed: int, number: int) -> Case:
    """Case ``number`` of ``seed``, deterministically. Every rule is the focus of one of ``len(RULES)`` successive cases."""
    rng = random.Random(f"{seed}/{number}")
    focus = _NAMES[(number * _STRIDE + seed) % len(_NAMES)]
    grown = _Model(rng)
    for _ in range(20):
        if grown.attempt(lambda: grown.operator(focus)):
            break
    else:
        grown.attempt(lambda: grown.operator("aten.linear.default"))
    if not grown.leaves:  # with the drawn sizes, every operand was too large
        grown.emit("torch.ops.aten.tanh.default", grown.leaf(Operand((4, 2))))
    if rng.random() < 0.3:  # so that the gradient, too, has other strides than the kernel returns
        grown.attempt(grown.look)
    for _ in range(rng.choice([0, 1, 2, 2, 3, 4, 5, 7])):
        action = rng.random()
        if action < 0.04:
            grown.attempt(grown.layers)
        elif action < 0.08:
            grown.attempt(grown.differentiate)
        elif action < 0.18:
            grown.attempt(grown.write)
        elif action < 0.21:
            grown.attempt(grown.select)
        elif action < 0.35:
            grown.attempt(grown.view)
        else:
            grown.attempt(lambda: grown.operator(rng.choice(_NAMES)))
    grown.attempt(grown.brought_back)
    case = Case(tuple(grown.leaves), tuple(grown.steps), tuple(grown.outputs()))
    return replace(case, options=random_options(rng, case))


class _Model(Growing):
    """A model under construction, with the kinds of steps that may be added to it."""

    def operator(self, name: str) -> None:
        """Adds an operator of the rule table, with operands from the model."""
        args, kwargs = arguments(name, self.draw)
        if name in COMPLEX_TOO and self.rng.random() < 0.08:
            args = [_complex(a) for a in args]
        if "dropout" in name and self.rng.random() < 0.2:
            args[1:] = [0.3, False]
        if any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())) and self.dtype in HALVES:
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
        """Two dims to transpose in the first operand before an operator, and in its result after it, as models do.

        None in most cases.
        """
        first = args[0] if args else None
        if not isinstance(first, Operand) or first.kind not in _TURNED or len(first.shape) < 2 or self.rng.random() < 0.8:
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
        """Adds a view of a value, or a copy of it with other strides; see `disguised`."""
        names = [name for name in self.tensors() if self.value(name).dim()]
        if not names:
            raise Reject
        name = self.rng.choice(names)
        disguised(self.emit, self.rng, Ref(name), tuple(self.value(name).shape), always=True)

    def select(self) -> None:
        """Selects from a value by a mask that ``forward`` computes from constants, which determine the result's size."""
        names = [name for name in self.tensors() if self.value(name).dim()]
        if not names:
            raise Reject
        name = self.rng.choice(names)
        shape = self.value(name).shape
        dim = self.rng.randrange(len(shape))
        places = self.emit("torch.ops.aten.arange.default", shape[dim])
        compare = self.rng.choice(["gt", "ne", "le"])
        mask = self.emit(f"torch.ops.aten.{compare}.Scalar", places, self.rng.randrange(shape[dim]) if shape[dim] else 0)
        if self.rng.random() < 0.3:
            mask = self.emit("[]", self.emit(".nonzero", mask), (slice(None), 0))
        self.emit("[]", Ref(name), (*[slice(None)] * dim, mask))

    def differentiate(self) -> None:
        """Adds a transformed function of two values: mapped over rows, or differentiated once or twice."""
        names = [name for name in self.tensors() if self.value(name).dtype == self.dtype]
        names = [name for name in names if self.value(name).dim() and self.value(name).numel() <= _TRANSFORMED]
        if not names:
            raise Reject
        name = self.rng.choice(names)
        shape = tuple(self.value(name).shape)
        call, pair = derivative(self.rng, len(shape))
        found = self.emit(call, Ref(name), self.fitting(shape) or self.leaf(Operand(shape)))
        for i in range(2 * pair):
            self.emit("[]", found, i)

    def look(self) -> None:
        """Adds a transpose of the last value."""
        shape = self.value(self.steps[-1].result).shape
        self.emit(".transpose", Ref(self.steps[-1].result), self.rng.randrange(len(shape)), len(shape) - 1)

    def layers(self) -> None:
        """Repeats the last few steps on their own result, with other parameters: identical layers, which plans fold."""
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
        """Writes in place to a value or a view of it (also of buffers, inputs and parameters), or replaces a buffer."""
        leaves = {leaf.name: leaf for leaf in self.leaves}
        names = [n for n in self.tensors() if self.value(n).is_floating_point() and self.value(n).numel()]
        names = [n for n in names if n not in leaves or self.may_be_written(leaves[n])]
        if not names:
            raise Reject
        base = Ref(self.rng.choice(names))
        if base.name not in leaves and (self.rng.random() < 0.6 or self.shows_a_leaf(base.name)):
            base = self.emit(self.rng.choice([".clone", ".clone", ".contiguous"]), base)
        written = base.name
        if written in leaves and leaves[written].role == "buffer":
            if self.rng.random() < 0.4:
                self.leaves[self.leaves.index(leaves[written])] = replace(leaves[written], plain=True)
            new = self.fitting(tuple(self.value(written).shape), self.value(written).dtype)
            if new is not None and self.rng.random() < 0.4:
                self.emit("=", base, self.emit(".detach", new))
                return
        unseen = leaves[written].role == "parameter" if written in leaves else self.rng.random() < 0.2
        if unseen:  # hide the write from autograd
            base = self.emit(".detach", base)
        into = base
        if self.rng.random() < 0.7:
            into = self.part(base)
        shape, dtype = tuple(self.value(into.name).shape), self.value(into.name).dtype
        call = self.rng.choice(_WRITES)
        if written in leaves:  # no operand with a gradient: a buffer would keep its graph from step to step
            self.emit(".fill_" if call == "fill_" else ".mul_", into, 0.5)
            return
        if call in ("add_", "mul_", "sub_", "copy_", "[]="):
            given = self.fitting(shape, dtype) or self.leaf(Operand(shape))
            memory = {self.value(each.name).untyped_storage().data_ptr() for each in (given, into)}
            if len(memory) == 1:  # reading and writing the same memory is undefined in torch
                given = self.emit(".clone", given)
            if call == "[]=":
                self.emit("[]=", into, (slice(None),) * len(shape) if shape else ..., given)
            else:
                self.emit(f".{call}", into, given)
        elif call == "masked_fill_":
            self.emit(".masked_fill_", into, self.operand(Operand(shape, "mask")), 0.5)
        else:
            self.emit(f".{call}", into, *({"fill_": [0.5], "clamp_": [-0.5, 0.5]}.get(call, [])))
        if self.rng.random() < 0.5 and into != base:  # read the whole value after a write through a view
            self.emit("torch.ops.aten.tanh.default", base)

    def may_be_written(self, leaf: Leaf) -> bool:
        """Whether to write to a leaf: always for buffers, rarely for other leaves, if torch and autotp allow it."""
        if leaf.role == "buffer":
            return True
        alone = leaf.form != "expanded" and leaf.same is None and not leaf.trained
        return alone and self.rng.random() < 0.2

    def shows_a_leaf(self, name: str) -> bool:
        """Whether a value is a view of an input or parameter, or is expanded: such values must not be written to."""
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


def _complex(argument: Any) -> Any:
    if isinstance(argument, list):
        return [_complex(a) for a in argument]
    real = isinstance(argument, Operand) and argument.kind == "real" and not argument.constant
    return replace(argument, kind="complex") if real else argument


def _call(name: str) -> str:
    return "torch.ops." + ("aten.batch_norm.default" if name == "autotp.batch_norm_train.default" else name)
