"""Options of planning: their meaning, their defaults and their checks."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any

from autotp.errors import AutotpError
from autotp.plans.constraints import Constraint, parse
from autotp.plans.families import Family, family
from autotp.plans.plan import AXIS_NAMES, Plan, check_accumulate, check_chunks, check_compile, overlapping
from costmodel import Topology
from costmodel.errors import require, shown
from costmodel.memory import OPTIMIZERS
from costmodel.text.numbers import MOST_DEVICES, figure, whole
from passes.capture import Precision, policy_of, precision_name
from passes.layouts.layout import Layout

__all__ = ["RECOMPUTE", "Options", "machine_of", "require_plan"]

#: Values of ``recompute``, besides lists of module names.
RECOMPUTE = ("auto", "none", "selective", "full")

#: Values of ``outputs``.
OUTPUTS = ("whole", "dtensor")

#: Options that a plan fixes: together with a plan, each is left out or equal to that of the plan (see `Options.require`).
_OF_A_PLAN = (
    *("strategy", "mesh", "mode", "memory", "optimizer", "accumulate", "panels", "chunks", "constraints", "recompute"),
    "reshard_after_forward",
)


def machine_of(topology: Topology | str | os.PathLike[str]) -> Topology:
    """The topology itself, or the one loaded by a preset's name or from a TOML file.

    Raises:
        AutotpError: the argument is none of these, or cannot be read.
    """
    found = Topology.load(topology) if isinstance(topology, str | os.PathLike) else topology
    require(found, Topology, "the topology", "an autotp.Topology, a preset's name or a TOML file")
    return found


def require_no_array(name: str, value: Any) -> None:
    """Rejects arrays and tensors, whose ``==`` returns an array instead of a bool."""
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, (numbers.Number, str)):
        raise AutotpError(f"{name}={shown(value)}: give plain numbers and text, and not an array")


def require_plan(plan: Plan) -> None:
    """Rejects values that are not a `Plan`, such as a file name."""
    require(plan, Plan, "the plan", "an autotp.Plan, such as autotp.Plan.load('plan.json')")


@dataclass(frozen=True)
class Options:
    """The options of ``autotp.plan``, ``autotp.parallelize``, sweeps and the command line.

    Attributes:
        strategy: ``auto``, which does not restrict the search, or the name of a family that does (see ``autotp.FAMILIES``),
            or a `Family` itself.
        mesh: sizes of the mesh axes, outermost first; by default, the planner chooses them.
        mode: ``train`` or ``inference``.
        memory: bytes that each device may use; by default, the memory of the topology's device.
        optimizer: the optimizer whose state and step are counted: a key of ``costmodel.memory.OPTIMIZERS``.
        accumulate: the number of micro-batches per step. Gradients of parameters are reduced once, by the last micro-batch
            (see ``DistributedModule.no_sync``). The example inputs are one micro-batch of all devices together; predicted
            times are those of a whole step.
        panels: the number of panels in which each matrix product gathers its operands, where that number divides the dim
            that is cut; 1 for none. By default, operands are gathered whole unless the memory bound requires panels.
        chunks: ``{"batch": 2}``, ``{"rows": 2}`` or both: the number of chunks into which each device divides its work, so
            that the collectives of one chunk overlap with the computation of another (see ``Plan.chunks``); operands are
            then gathered whole. ``{}`` disables chunks; by default, the planner chooses.
        precision: ``bf16-mixed``, ``fp16-mixed`` or a ``torch.distributed.fsdp.MixedPrecisionPolicy``: parameters are
            stored in their own dtype, communicated and used in a narrower one, and their gradients are reduced in
            ``reduce_dtype`` (see `passes.capture.precision`). By default, dtypes stay as they are.
        schedule: how the plan will be run: ``overlap`` hides communication behind computation (the step time is that of
            `costmodel.overlap`); ``none`` does not (the step time is the plain sum).
        compile: whether TorchInductor compiles the regions between collectives when the plan runs.
        constraints: layouts that parameters, operators, inputs or outputs must have, such as
            ``"lm_head.weight=Shard(0)@x"`` (see `autotp.plans.constraints`).
        time_limit: seconds for planning, excluding the capture of the model; after that, the best plan found so far is
            returned.
        gap: where memory is short and operators are recomputed, the search ends once the step of the best plan is proven to
            exceed the shortest possible step by at most this share.
        recompute: which results are recomputed in the backward pass instead of saved for it: ``auto``: the planner decides
            (while memory is ample, only those in the model's own ``torch.utils.checkpoint``); ``none``: nothing;
            ``selective``: all but the results of matrix products, lookups in weights, and collectives; ``full``: all inside
            repeated blocks but those that leave a block, as with ``torch.utils.checkpoint`` around every block; or a list
            of module names, each of which is treated as such a block.
        reshard_after_forward: whether gathered parameters are gathered again for the backward pass (True), or kept until
            the backward pass has read them (False), as in ``torch.distributed.fsdp.fully_shard``. By default, the planner
            decides for each parameter, unless the family does.
        outputs: ``whole``: every device returns the whole outputs; ``dtensor``: outputs are returned as ``DTensor``s in the
            layouts that the planner chooses.
        observe: names of modules, or patterns that match them part by part (``blocks.*``), whose forward hooks are called,
            with ``DTensor``s in the layouts that the planner chooses.
        resting: parameter name -> its given layout at rest, on ``mesh``; the planner chooses those of all others.

    Raises:
        AutotpError: an option is wrong; the message names the choices.
    """

    # No slots: the defaults stay class attributes, from which signatures and commands take their own defaults.
    strategy: str | Family = "auto"
    _: KW_ONLY
    mesh: Sequence[int] | None = None
    mode: str = "train"
    memory: float | None = None
    optimizer: str = "adamw"
    accumulate: int = 1
    panels: int | None = None
    chunks: Mapping[str, int] | None = None
    precision: Precision = None
    schedule: str = "overlap"
    compile: bool = False
    constraints: Sequence[str] | Mapping[str, str] = ()
    time_limit: float = 120.0
    gap: float = 1e-3
    recompute: str | Sequence[str] = "auto"
    reshard_after_forward: bool | None = None
    outputs: str = "whole"
    observe: Sequence[str] = ()
    resting: Mapping[str, Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks everything that does not depend on the topology, and converts numbers to plain Python types."""
        for one in fields(self):
            require_no_array(one.name, getattr(self, one.name))
        chunks = {} if self.chunks is None else self.chunks
        check_chunks(chunks)
        if self.panels is not None and whole(self.panels, "panels") > 1 and any(count > 1 for count in chunks.values()):
            raise AutotpError(f"panels {self.panels} and chunks {dict(chunks)} exclude each other; leave one of them out")
        if self.mode not in ("train", "inference"):
            raise AutotpError(f"mode {shown(self.mode)} is unknown; choose 'train' or 'inference'")
        if self.optimizer not in tuple(OPTIMIZERS):
            raise AutotpError(f"optimizer {shown(self.optimizer)} is unknown; choose one of {', '.join(OPTIMIZERS)}")
        check_accumulate(self.accumulate)
        if self.accumulate > 1 and self.mode != "train":
            raise AutotpError(f"accumulate={self.accumulate}, but mode {self.mode!r} has no gradients; leave it out")
        self._check_mesh()
        if self.memory is not None and not (isinstance(self.memory, float) and self.memory == math.inf):
            figure(self.memory, "memory", positive=True)
        if not (isinstance(self.time_limit, float) and self.time_limit == math.inf):
            figure(self.time_limit, "time_limit")
        overlapping(self.schedule)
        check_compile(self.compile)
        if self.outputs not in OUTPUTS:
            raise AutotpError(f"outputs={shown(self.outputs)} is unknown; choose one of {', '.join(OUTPUTS)}")
        if figure(self.gap, "gap") >= 1:
            raise AutotpError(f"gap {shown(self.gap)}: give a share of the step from 0 to below 1, such as 0.001")
        _check_recompute(self.recompute)
        self._check_gathers()
        policy_of(self.precision)
        if not isinstance(self.strategy, Family):
            family(self.strategy)
        _ = self.asked
        self._write_plain()

    def _write_plain(self) -> None:
        """Converts NumPy numbers to Python numbers, because a plan that has NumPy numbers cannot be written as JSON."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in ("memory", "gap", "time_limit")}
        plain = {name: None if value is None else float(value) for name, value in plain.items()}
        plain |= {name: None if (n := getattr(self, name)) is None else int(n) for name in ("accumulate", "panels")}
        plain["mesh"] = None if self.mesh is None else tuple(map(int, self.mesh))
        plain["chunks"] = None if self.chunks is None else {kind: int(count) for kind, count in self.chunks.items()}
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def _check_mesh(self) -> None:
        mesh = self.mesh
        if mesh is None:
            return
        if not isinstance(mesh, Sequence) or isinstance(mesh, str) or not 1 <= len(mesh) <= len(AXIS_NAMES):
            raise AutotpError(f"mesh {shown(mesh)}: give 1 to {len(AXIS_NAMES)} positive sizes")
        for size in mesh:
            whole(size, f"mesh {shown(mesh)}: a size", most=MOST_DEVICES)

    def _check_gathers(self) -> None:
        asked = f"reshard_after_forward={shown(self.reshard_after_forward)}"
        if self.reshard_after_forward is not None and not isinstance(self.reshard_after_forward, bool):
            raise AutotpError(f"{asked}: give True or False, or leave it out")
        if self.reshard_after_forward is not None and self.mode != "train":
            raise AutotpError(f"{asked}, but mode {self.mode!r} has no backward pass; leave it out")
        if self.reshard_after_forward is False and (self.panels or 1) > 1:
            raise AutotpError(f"panels={self.panels} gathers parameters again, which contradicts {asked}; leave one out")

    def check(self, topology: Topology) -> None:
        """Checks the mesh and the precision against a topology.

        Raises:
            AutotpError: the mesh has another number of devices than the topology, or the topology's device has no rate for
                the dtype of the precision.
        """
        self._check_rates(topology)
        if self.mesh is not None and math.prod(self.mesh) != topology.devices:
            raise AutotpError(
                f"mesh {tuple(self.mesh)} has {math.prod(self.mesh)} devices, topology {topology.name!r} has "
                f"{topology.devices}; choose a mesh whose sizes multiply to {topology.devices}, or resize the topology"
            )

    def _check_rates(self, topology: Topology) -> None:
        """Rejects a precision for whose dtype the device has no rate."""
        policy, device = policy_of(self.precision), topology.device
        if policy is None or policy.param_dtype is None:
            return
        used = str(policy.param_dtype).removeprefix("torch.")
        if used not in device.flops:
            raise AutotpError(
                f"precision {precision_name(self.precision)!r}: device {device.name!r} has no rate for {used}, only for "
                f"{', '.join(device.flops)}; choose a precision that it computes in, or give flops.{used} in the topology "
                "(for this machine: autotp calibrate)"
            )

    @classmethod
    def of(cls, plan: Plan) -> Options:
        """The options that a plan was made with, with the mesh and the chunks that the planner chose."""
        return cls(
            plan.strategy,
            mesh=plan.mesh_shape,
            mode=plan.mode,
            memory=plan.memory_bound,
            optimizer=plan.optimizer,
            accumulate=plan.accumulate,
            panels=plan.planning.get("panels", 1),
            chunks=plan.chunks,
            precision=plan.precision,
            schedule=plan.schedule,
            compile=plan.compile,
            outputs=plan.outputs,
            observe=plan.observe,
            constraints=plan.constraints,
            recompute=plan.planning.get("recompute", "none"),
            reshard_after_forward=plan.planning.get("reshard_after_forward"),
        )

    def require(self, plan: Plan) -> None:
        """Checks that the options that are given together with a plan are those that the plan was made with.

        Raises:
            AutotpError: an option is neither its default nor that of the plan; names the option.
        """
        made, left = Options.of(plan), Options()
        for name in _OF_A_PLAN:
            mine, default, its = (each._said(name) for each in (self, left, made))
            if mine not in (default, its):
                said, planned = (shown(getattr(each, name)) for each in (self, made))
                raise AutotpError(f"{name}={said}, but the plan is for {planned}: leave {name} out, or make another plan")

    def _said(self, name: str) -> object:
        value = [one.text for one in self.asked] if name == "constraints" else getattr(self, name)
        value = value.name if isinstance(value, Family) else value
        return [*value] if isinstance(value, (list, tuple)) else value

    @property
    def family(self) -> Family:
        """The family that restricts the search, with ``reshard_after_forward`` applied."""
        found = self.strategy if isinstance(self.strategy, Family) else family(self.strategy)
        if self.reshard_after_forward is None:
            return found
        return replace(found, gathers="twice" if self.reshard_after_forward else "once")

    @property
    def trains(self) -> bool:
        """Whether a step has a backward pass."""
        return self.mode == "train"

    @property
    def hides(self) -> bool:
        """Whether communication is hidden behind computation."""
        return overlapping(self.schedule)

    @property
    def asked(self) -> tuple[Constraint, ...]:
        """The parsed constraints."""
        return parse(() if self.constraints is None else self.constraints)


def _check_recompute(way: str | Sequence[str]) -> None:
    names = not isinstance(way, str) and isinstance(way, Sequence) and all(isinstance(name, str) and name for name in way)
    if not names and way not in RECOMPUTE:
        raise AutotpError(
            f"recompute={shown(way)} is unknown; choose one of {', '.join(RECOMPUTE)}, or give a list of modules' names"
        )
