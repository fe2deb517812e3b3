"""Sweeps: plans one model for many device counts and topologies, to show where more hardware stops paying off.

The model is captured once (or once per device count, if its batch grows with the count) and planned at every point.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from autotp.errors import AutotpError, BatchError, MemoryBoundError, TimeLimitError
from autotp.planner import plan_captured
from autotp.plans.families import FAMILIES
from autotp.plans.options import Options, machine_of
from autotp.plans.plan import Plan
from costmodel import Topology, TopologyError
from costmodel.energy import per_token, step_energy, step_money
from costmodel.errors import require, shown
from costmodel.text.numbers import MOST_DEVICES, whole
from passes.capture import Captured, Precision, capture
from passes.rules.table import flop_of
from passes.torch_internals import tree_flatten

__all__ = ["Point", "batch_of", "example_of", "forward_flop", "sweep", "takes_devices"]

#: Most entries of a list of topologies, device counts or families.
_MOST = 10_000
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Point:
    """The best plan for one number of devices of one topology. If there is no plan, ``reason`` says why and the plan's
    figures are None. Energy and money are also None if the device's powers or price are not known.

    Attributes:
        topology: the name of the topology.
        devices: the number of devices.
        unit: what ``tokens`` counts: "tokens", or "samples" for a model without integer inputs.
        tokens: of one step, on all devices together.
        reason: why there is no plan; None if there is one.
        strategy: the requested strategy with the fastest plan.
        mesh: sizes of the mesh axes, outermost first.
        family: the fastest of the known families that were planned (``auto`` is not one); None if none was.
        family_seconds: seconds of its step.
        step_seconds: seconds of the best plan's step.
        tokens_per_second: tokens per second and device.
        mfu: model FLOP utilisation: FLOP of the model's products in a step (three times those of the forward pass in
            training), over the FLOP of all devices in that time at the peak rate of the model's dtype.
        exposed_seconds: seconds of the step with communication that is not hidden.
        exposed_share: ``exposed_seconds`` over ``step_seconds``.
        memory_bytes: bytes on each device.
        energy_per_step, energy_per_token: joules, of all devices together.
        money_per_step, money_per_token: in the currency of the topology's price.
        optimal: whether the solver proved the plan optimal.
        gap: if not, its relative distance to the proven bound.
    """

    topology: str
    devices: int
    unit: str = "tokens"
    tokens: int | None = None
    reason: str | None = None
    strategy: str | None = None
    mesh: tuple[int, ...] | None = None
    family: str | None = None
    family_seconds: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    exposed_seconds: float | None = None
    exposed_share: float | None = None
    memory_bytes: float | None = None
    energy_per_step: float | None = None
    energy_per_token: float | None = None
    money_per_step: float | None = None
    money_per_token: float | None = None
    optimal: bool | None = None
    gap: float | None = None

    @property
    def planned(self) -> bool:
        """Whether there is a plan."""
        return self.reason is None

    def to_dict(self) -> dict[str, Any]:
        """The point as plain JSON values."""
        return asdict(self) | {"mesh": None if self.mesh is None else list(self.mesh)}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The attributes' names, in order."""
        return tuple(field.name for field in fields(cls))


@dataclass(frozen=True, slots=True)
class _Workload:
    """One captured model, with the quantities from which the figures of its points are computed."""

    captured: Captured
    tokens: int
    unit: str
    flop: float
    dtype: str


def _listed(what: str, given: Any) -> list[Any]:
    try:
        if not isinstance(given, str) and len(found := [*itertools.islice(given, _MOST + 1)]) <= _MOST:
            return found
    except TypeError:
        pass
    raise AutotpError(f"{what} is {shown(given)}: give a list, of at most {_MOST:,}")


def sweep(
    factory: Callable[..., Any],
    topologies: Iterable[Topology | str],
    devices: Iterable[int],
    *,
    strategies: Sequence[str] = ("auto",),
    families: bool = False,
    tokens: int | None = None,
    mode: str = Options.mode,
    memory: float | None = Options.memory,
    optimizer: str = Options.optimizer,
    accumulate: int = Options.accumulate,
    panels: int | None = Options.panels,
    precision: Precision = Options.precision,
    time_limit: float = Options.time_limit,
    progress: Callable[[str], None] | None = None,
) -> list[Point]:
    """Plans a model for every device count of every topology. Needs no device; the model may be on ``meta``.

    Args:
        factory: returns ``(model, args)``, ``(model, args, kwargs)`` or ``(model, kwargs)``. One that takes an argument
            ``devices`` is called for every count and may make the batch that many times larger (weak scaling); any
            other is called once, and every point does the same work (strong scaling).
        topologies: ``Topology`` objects, names or paths of files; each is resized to every count.
        devices: the counts.
        strategies: ``auto`` or families; each point has the fastest of their plans.
        families: whether to plan every family as well, and report the fastest one.
        tokens: of one step, on all devices together; by default, the number of elements of the first integer input or, if
            there is none, of samples (dim 0 of the first input), times ``accumulate``.
        mode, memory, optimizer, accumulate, panels, precision, time_limit: of each plan; see
            `autotp.plans.options.Options`. Plans overlap communication with computation.
        progress: called with a description before each capture and each plan.

    Returns:
        One point per topology and count, in that order. A point has a reason instead of a plan if the topology cannot have
        that count, no plan fits the memory or divides the batch, or the time limit is reached before one is found.

    Raises:
        AutotpError: an argument is invalid.
        TopologyError: a topology cannot be read.
        CaptureError: ``torch.export`` cannot export the model.
    """
    given = {"topologies": topologies, "devices": devices, "strategies": strategies}
    topologies, devices, strategies = (_listed(what, each) for what, each in given.items())
    require(families, bool, "families", "True or False")
    if progress is not None and not callable(progress):
        raise AutotpError(f"progress is {shown(progress)}: give a function that takes a text, or leave it out")
    if not callable(factory) or isinstance(factory, nn.Module):
        raise AutotpError(f"factory is {shown(factory)}: give a function that returns a model and its inputs")
    machines = [machine_of(t) for t in topologies]
    counts = list(dict.fromkeys(whole(count, "devices", most=MOST_DEVICES) for count in devices))
    tokens = None if tokens is None else whole(tokens, "tokens")
    _check_sweep(machines, counts)
    for name in strategies:
        Options(name)
    names = list(dict.fromkeys([*strategies, *(n for n in FAMILIES if families and n != "auto")]))
    if not names:
        raise AutotpError(f"strategies is empty; choose of {', '.join(FAMILIES)}")
    first = Options(
        mode=mode,
        memory=memory,
        optimizer=optimizer,
        accumulate=accumulate,
        panels=panels,
        precision=precision,
        time_limit=time_limit,
    )
    asked = [replace(first, strategy=name) for name in names]
    for machine in machines:
        first.check(machine)
    say = progress or (lambda _: None)
    weak = takes_devices(factory)
    workloads: dict[int, _Workload] = {}
    points = []
    for machine in machines:
        for count in counts:
            key = count if weak else 0
            try:
                resized = machine.resized(count)
            except TopologyError as error:
                points.append(Point(machine.name, count, reason=str(error)))
                continue
            if key not in workloads:
                say(f"capturing the model{f' for {count} devices' if weak else ''}")
                workloads[key] = _workload(factory(devices=count) if weak else factory(), tokens, first)
            plans, reasons = {}, []
            for name, options in zip(names, asked, strict=True):
                say(f"planning {name} for {count} devices of {machine.name}")
                try:
                    plans[name] = plan_captured(workloads[key].captured, resized, options)
                except (MemoryBoundError, BatchError, TimeLimitError) as error:
                    reasons.append(str(error))
            points.append(_point(machine.name, resized, workloads[key], plans, reasons))
    return points


def takes_devices(factory: Callable[..., Any]) -> bool:
    """Whether a factory has an argument ``devices``, so that its batch depends on the device count."""
    try:
        return "devices" in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False


def example_of(made: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any] | None]:
    """The model, the positional and the keyword example inputs in the return value of a factory.

    Raises:
        AutotpError: the factory returned something else.
    """
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        raise AutotpError(
            f"the factory returned {_types(made)}; "
            "expected (model, args), (model, args, kwargs) or (model, kwargs), the model an nn.Module"
        )
    args: Any = parts[1] if len(parts) > 1 else ()
    kwargs: Any = parts[2] if len(parts) > 2 else None
    if len(parts) == 2 and isinstance(args, Mapping):
        args, kwargs = (), args
    if isinstance(args, Tensor):
        args = (args,)
    if not isinstance(args, tuple | list) or not (kwargs is None or isinstance(kwargs, Mapping)):
        raise AutotpError(
            f"the factory returned {_types(made)}; "
            "args must be a tuple of positional inputs and kwargs a dict from names to inputs"
        )
    if args or kwargs:
        try:
            tree_flatten((args, kwargs))
            inspect.signature(parts[0].forward).bind(*args, **(kwargs or {}))
        except RecursionError:
            raise AutotpError("the factory returned inputs that contain themselves") from None
        except (TypeError, ValueError) as error:
            raise AutotpError(f"the inputs that the factory returned do not fit the model's forward: {error}") from None
    return parts[0], tuple(args), None if kwargs is None else dict(kwargs)


def _types(made: Any) -> str:
    return f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple) else type(made).__name__


def forward_flop(captured: Captured) -> float:
    """FLOP of all products of a captured model's forward pass (matrix products, convolutions, attention)."""
    return sum(flop_of(node) for node in captured.graph_module.graph.nodes if node.op == "call_function")


def batch_of(captured: Captured) -> tuple[int, str]:
    """The size of a batch: (elements of the first integer input, "tokens"), or (dim 0 of the first input, "samples")."""
    inputs = [value for name, value in captured.placeholders.items() if name in captured.inputs]
    for value in inputs:
        if value.dtype in _INTEGERS:
            return max(1, value.numel()), "tokens"
    return next((int(value.shape[0]) for value in inputs if value.ndim and value.shape[0]), 1), "samples"


def _check_sweep(machines: Sequence[Topology], counts: Sequence[int]) -> None:
    names = [machine.name for machine in machines]
    for what, given in (("topologies", machines), ("devices", counts)):
        if not given:
            raise AutotpError(f"{what} is empty; a sweep needs one at least")
    for name in names:
        if names.count(name) > 1:
            raise AutotpError(f"two of the topologies are named {name!r}; points are identified by it, so rename one")


def _workload(made: Any, tokens: int | None, options: Options) -> _Workload:
    model, args, kwargs = example_of(made)
    captured = capture(model, args, kwargs, options.precision, options.outputs, options.observe)
    counted, unit = batch_of(captured)
    times, passes = options.accumulate, 3 if options.trains else 1
    flop = forward_flop(captured) * passes * times
    return _Workload(captured, tokens or counted * times, "tokens" if tokens else unit, flop, _dtype(captured))


def _dtype(captured: Captured) -> str:
    """The dtype of most elements of parameters or, without any, of the first floating-point input."""
    sizes: dict[torch.dtype, int] = {}
    values = captured.placeholders
    for name, value in values.items():
        if name in captured.parameters:
            sizes[value.dtype] = sizes.get(value.dtype, 0) + value.numel()
    inputs = [value.dtype for name, value in values.items() if name in captured.inputs and value.is_floating_point()]
    chosen = max(sizes, key=lambda dtype: sizes[dtype]) if sizes else next(iter(inputs), torch.float32)
    return str(chosen).removeprefix("torch.")


def _point(name: str, machine: Topology, work: _Workload, plans: Mapping[str, Plan], reasons: Sequence[str]) -> Point:
    if not plans:
        return Point(name, machine.devices, work.unit, work.tokens, reason=reasons[0])
    order = sorted(plans, key=lambda key: plans[key].predicted.step_seconds)
    known = next((key for key in order if key != "auto"), None)
    best = plans[order[0]]
    predicted, device = best.predicted, machine.device
    seconds = predicted.step_seconds
    energy = step_energy(device, machine.devices, predicted.compute_seconds, seconds)
    money = step_money(device, machine.devices, seconds)
    whole = seconds * machine.devices
    return Point(
        topology=name,
        devices=machine.devices,
        unit=work.unit,
        tokens=work.tokens,
        strategy=order[0],
        mesh=best.mesh_shape,
        family=known,
        family_seconds=None if known is None else plans[known].predicted.step_seconds,
        step_seconds=seconds,
        tokens_per_second=work.tokens / whole if whole else None,
        mfu=work.flop / (whole * device.peak(work.dtype)) if whole else None,
        exposed_seconds=predicted.exposed_seconds,
        exposed_share=predicted.exposed_seconds / seconds if seconds else 0.0,
        memory_bytes=predicted.memory_bytes,
        energy_per_step=_number(energy),
        energy_per_token=_number(per_token(energy, work.tokens)),
        money_per_step=_number(money),
        money_per_token=_number(per_token(money, work.tokens)),
        optimal=best.optimal,
        gap=best.gap,
    )


def _number(amount: Any) -> float | None:
    return None if amount is None else float(amount)
