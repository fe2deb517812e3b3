"""The results of a step, and the comparison of the results of a distributed step with those of the plain model.

``step`` and ``apart`` are printed with tests, so they are self-contained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from autotp.runtime.strides import laid_like
from benchmarks.fuzz.case import Case, build
from passes.rules.table import RULES
from passes.world import ops
from passes.world.world import LocalWorld

__all__ = ["TOLERANCES", "Careful", "Numbers", "Worst", "apart", "exactly", "ill_conditioned", "plain", "step", "worst"]

#: dtype -> the allowed largest difference relative to the largest magnitude.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_MOVES = 6
_FACTOR = 16.0
#: For bfloat16 and float16, the allowed error is ``_WORSE`` times the plain model's own error, plus ``_PLACES`` eps.
_WORSE, _PLACES = 1.1, 2.0
_CANCELLED = 1e-2

Numbers = Mapping[str, Tensor]
#: The name of the quantity with the largest error, and this error as a multiple of the allowed one.
Worst = tuple[str, float]


def step(model: Any, held: nn.Module, args: Any, train: bool = True) -> dict[str, Tensor]:
    """Runs a step. Returns outputs, gradients of parameters and inputs, and all parameters, inputs, buffers afterwards."""
    with torch.set_grad_enabled(train):
        result = model(*args)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    numbers = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    weights = [torch.rand(o.shape, generator=torch.Generator().manual_seed(i)) for i, o in enumerate(outputs)]
    losses = [(o * w.to(o)).sum().double() for o, w in zip(outputs, weights, strict=True) if train and o.requires_grad]
    if losses:
        sum(losses).backward()
    if train:  # a leaf that is completely overwritten has a gradient of None or zeros
        leaves = {**dict(held.named_parameters()), **{f"input {i}": a for i, a in enumerate(args) if a.requires_grad}}
        for name, leaf in leaves.items():
            given = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            numbers[f"gradient of {name}"] = given.full_tensor() if hasattr(given, "full_tensor") else given
    left = {f"input {i}": a for i, a in enumerate(args)}
    plain = ((name, value) for name, value in vars(held).items() if isinstance(value, torch.Tensor))
    left |= {f"buffer {name}": b for name, b in (*held.named_buffers(), *plain)}
    left |= {f"parameter {name}": p for name, p in held.named_parameters()}
    left = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in left.items()}
    return numbers | {name: tensor.detach().clone() for name, tensor in left.items()}


class Careful(TorchFunctionMode):
    """Converts the operands of kernels that misread some memory formats: such torch bugs affect the plain model, too."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Runs a function on converted operands, if its rule says that it misreads some memory formats."""
        rule = RULES.get(str(func))
        if rule is None or rule.misreads is None:
            return func(*args, **(kwargs or {}))
        world = LocalWorld((1,))
        given = [ops.in_one_format(world, a) if isinstance(a, Tensor) else a for a in args]
        result = ops.in_one_format(world, func(*given, **(kwargs or {})))
        if func is torch.ops.aten.batch_norm.default and args[5]:  # training updated the copies of the statistics
            for mine, copy in zip(args[3:5], given[3:5], strict=True):
                if isinstance(mine, Tensor) and copy.data_ptr() != mine.data_ptr():
                    mine.copy_(copy.detach())
        return result


def apart(ours: Tensor, theirs: Tensor, scale: float) -> float:
    """The largest difference divided by ``scale``.

    Infinite if shapes, dtypes, non-finite values, or any values of a dtype that is not floating-point differ.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if not theirs.numel():
        return 0.0
    if not theirs.is_floating_point():
        return 0.0 if torch.equal(ours, theirs) else math.inf
    ours, theirs = ours.double(), theirs.double()
    finite = theirs.isfinite()
    odd = torch.where(finite, 0.0, theirs).nan_to_num(nan=1.5), torch.where(finite, 0.0, ours).nan_to_num(nan=1.5)
    if not torch.equal(ours.isfinite(), finite) or not torch.equal(*odd):
        return math.inf
    most = float((ours - theirs)[finite].abs().max()) if finite.any() else 0.0
    return most / scale if most else 0.0


def _magnitude(tensor: Tensor) -> float:
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    finite = tensor.double().abs()[tensor.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def worst(case: Case, ours: Numbers, theirs: Numbers, exact: Numbers | None) -> Worst:
    """The quantity with the largest error relative to the allowed error; a ratio above 1 is wrong unless ill-conditioned.

    A gradient may be a sum of terms that cancel. Its error is therefore relative to at least a millionth of the largest
    gradient, and at least a hundredth of the outputs' weights in the loss, which are up to 1.
    """
    dtype = case.dtype
    largest = max((_magnitude(t) for name, t in theirs.items() if name.startswith("gradient")), default=0.0)
    furthest: Worst = ("", 0.0)
    if ours.keys() != theirs.keys():
        return f"names {sorted(ours.keys() ^ theirs.keys())}", math.inf
    for name, want in theirs.items():
        floor = max(1e-6 * largest, _CANCELLED) if name.startswith("gradient") else 0.0
        scale = max(_magnitude(want), floor, 1e-30)
        off = apart(ours[name], want, scale)
        if exact is None:
            ratio = off / TOLERANCES[dtype]
        elif not off or ours[name].shape != want.shape or ours[name].dtype != want.dtype:
            ratio = off
        else:
            ratio = _halves(ours[name], want, exact[name], scale, torch.finfo(dtype).eps)
        if ratio > furthest[1]:
            furthest = name, ratio
    return furthest


def _halves(ours: Tensor, theirs: Tensor, exact: Tensor, scale: float, eps: float) -> float:
    """Our error divided by the allowed one: a little more than the plain model's error, plus a few eps.

    Both errors are against float64. Elements where the plain model or float64 is not finite are ignored: where only the
    plain model overflows, a finite value is correct, too.
    """
    finite = theirs.isfinite() & exact.isfinite()
    if not ours[finite].isfinite().all():
        return math.inf
    errors = [apart(t.double()[finite], exact.double()[finite], scale) for t in (ours, theirs)]
    return errors[0] / (_WORSE * errors[1] + _PLACES * eps)


def exactly(case: Case) -> Numbers | None:
    """The results of the plain model in float64, the reference for bfloat16 and float16; None for other dtypes."""
    if case.dtype in TOLERANCES:
        return None
    model, args = build(case, torch.float64)
    with Careful():
        return step(model, model, args, not case.options.inference)


def plain(case: Case, moved: int | None = None) -> Numbers:
    """The results of the plain model. A seed ``moved`` perturbs weights, inputs and all operands by one ulp."""
    model, args = build(case)
    if moved is None:
        with Careful():
            return step(model, model, args, not case.options.inference)
    _move(model, args, moved)
    with Careful(), _Jittered(moved):
        return step(model, model, args, not case.options.inference)


class _Jittered(TorchDispatchMode):
    """Perturbs all floating-point operands of all operators, also in the backward pass, by one ulp, like rounding.

    Each consumer gets its own perturbation, because a plan holds a value in several layouts that are rounded separately:
    the difference of a reduced sum and the same sum as partial sums is a rounding error; in the plain model, it is 0.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if not any(value.alias_info is not None for value in (*func._schema.arguments, *func._schema.returns)):
            args, kwargs = tree_map(self._read, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _read(self, value: Any) -> Any:
        # a zero tensor, such as the gradient of a sign, has no storage
        if not isinstance(value, Tensor) or not value.is_floating_point() or value._is_zerotensor():
            return value
        found = _moved(value, self.generator)
        # keep the strides: kernels dispatch on them, and some misread them
        return found if 0 in value.stride() else laid_like(found, value.stride())


def ill_conditioned(case: Case, name: str, ours: Numbers, theirs: Numbers) -> bool:
    """Whether perturbations of the plain model by one ulp change this quantity about as much as it is off."""
    scale = max(_magnitude(theirs[name]), 1e-30) if name in theirs else 1.0
    off = apart(ours[name], theirs[name], scale) if name in ours and name in theirs else math.inf
    moved = [apart(plain(case, i)[name], theirs[name], scale) for i in range(_MOVES)]
    most = max(moved)
    return off <= _FACTOR * most if math.isfinite(off) else not math.isfinite(most)


def _moved(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Moves every element up or down by one ulp, or not at all; zeros are kept."""
    way = torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor)
    return torch.where((way == 0) | (tensor == 0), tensor, torch.nextafter(tensor, way * math.inf))


def _move(model: nn.Module, args: tuple[Tensor, ...], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers(), *args):
            if tensor.is_floating_point():
                tensor = tensor if tensor.is_contiguous() or 0 not in tensor.stride() else tensor[:1]
                tensor.copy_(_moved(tensor, generator))
