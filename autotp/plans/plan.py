"""A plan: a mesh, a strategy per operator, a layout at rest per parameter, and their predicted cost."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, fx

from autotp.errors import AutotpError, PlanMismatchError
from autotp.plans.plan_file import AS_WRITTEN, FORMAT, LARGEST_FILE, Written, decode_layout, encode_layout, read
from autotp.plans.planned_operator import PlannedOperator, Predicted
from costmodel import Topology
from costmodel.errors import shown
from costmodel.text.files import read_text, require_path, write_atomically
from costmodel.text.numbers import whole
from passes.capture import Captured, Precision, policy_of, precision_name
from passes.graph import note_of
from passes.layouts.layout import Layout, describe
from passes.sharding.chunk import CHUNKS

__all__ = [
    "AXIS_NAMES",
    "FORMAT",
    "Plan",
    "PlannedOperator",
    "Predicted",
    "check_accumulate",
    "check_chunks",
    "check_compile",
    "decode_layout",
    "encode_layout",
    "fingerprint",
    "overlapping",
]

#: Names of mesh axes, outermost first.
AXIS_NAMES = ("x", "y", "z", "w")


@dataclass(frozen=True, slots=True)
class Plan:
    """The planner's result: a mesh, strategies, layouts and their predicted cost. Saved as JSON, never pickled.

    Attributes:
        strategy: the name of the family that restricted the search.
        mesh_shape, mesh_axes: sizes and names of the mesh axes, outermost first.
        topology: the machine that the plan was made for.
        operators: every operator of the captured graph, in order.
        layouts: name of a parameter, or of a buffer that is a cache -> its layout at rest.
        optimal, gap: whether the plan is proven optimal; otherwise the distance of its step time to the proven lower bound,
            as a share of the step. The bound also holds for plans with chunks.
        predicted: the predicted times and memory of a step; see ``Predicted``.
        model_hash: identifies the captured graph.
        mode, optimizer: the mode and the optimizer for which time and memory are predicted.
        accumulate: micro-batches per step. ``predicted`` and the operators' seconds are of all of them together.
        memory_bound: bytes that each device may use.
        chunks: kind of chunks -> their number (1 if missing). The collectives of one chunk overlap with the computation of
            another: chunks of ``batch``, the whole batch, or of ``rows``, the rows of matrix products that communicate.
        chunked: kind of chunks -> number of operators that are divided.
        whole: name of an operator that is not divided, though it reads chunks or is a product that communicates -> reason.
        batch_axes: names of the mesh axes that split the batch in any operator.
        gathered_once: names of the parameters whose gathered copies are kept from the forward to the backward pass (as with
            ``reshard_after_forward=False`` in FSDP2); all others that the backward pass reads are gathered again.
        precision: the dtypes to compute and reduce in (``bf16-mixed``, or a policy as text); None: the model's own dtypes.
        outputs: ``whole``: every device returns the whole outputs; ``dtensor``: they keep the layouts of the plan.
        observe: names of modules, or patterns, whose forward hooks are called (see `autotp.plans.options.Options`).
        schedule: how the plan is to be run, and was predicted: ``overlap`` or ``none``.
        compile: whether TorchInductor is to compile the regions between collectives.
        constraints: the user's constraints, as texts (see `autotp.plans.constraints`).
        planning: how the plan was found: statistics (times in seconds, sizes) and some of the options.
    """

    strategy: str
    mesh_shape: tuple[int, ...]
    mesh_axes: tuple[str, ...]
    topology: Topology
    operators: tuple[PlannedOperator, ...]
    layouts: Mapping[str, Layout]
    optimal: bool
    gap: float
    predicted: Predicted
    model_hash: str
    mode: str
    optimizer: str
    memory_bound: float
    chunks: Mapping[str, int] = field(default_factory=dict)
    chunked: Mapping[str, int] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    schedule: str = "none"
    compile: bool = False
    constraints: tuple[str, ...] = ()
    accumulate: int = 1
    planning: Mapping[str, Any] = field(default_factory=dict)
    precision: str | None = None
    gathered_once: tuple[str, ...] = ()
    batch_axes: tuple[str, ...] = ()
    outputs: str = "whole"
    observe: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks the chunks and the number of micro-batches.

        Raises:
            AutotpError: a kind of chunks is unknown, or a number is not positive.
        """
        check_chunks(self.chunks)
        check_accumulate(self.accumulate)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.topology.devices

    @property
    def batch_ways(self) -> int:
        """The number of parts that the mesh splits the batch into: as many ranks can each be given a part of their own."""
        sizes = dict(zip(self.mesh_axes, self.mesh_shape, strict=True))
        return math.prod(sizes[axis] for axis in self.batch_axes)

    @property
    def assignments(self) -> Mapping[str, tuple[str | None, ...]]:
        """Operator name -> its assignment: per mesh axis, the factor that the axis shards (see `PlannedOperator`)."""
        return {op.name: op.assignment for op in self.operators}

    @property
    def parameters(self) -> Mapping[str, str]:
        """Name of a parameter, or of a buffer that is a cache -> its layout at rest, as readable text."""
        return {name: describe(layout, self.mesh_axes) for name, layout in self.layouts.items()}

    @property
    def replicated(self) -> list[str]:
        """Names of the operators that have no rule and are computed whole on every device."""
        return [op.name for op in self.operators if op.replicated]

    @property
    def repeated(self) -> Mapping[str, bool]:
        """Name of a recomputed operator -> whether the collectives that reshard its results are repeated too."""
        return {op.name: op.recomputed == "all" for op in self.operators if op.recomputed}

    @property
    def recomputed(self) -> list[str]:
        """Names of the operators whose results the backward pass recomputes, instead of reading saved ones."""
        return list(self.repeated)

    def resting(self, parameter: str) -> Layout:
        """The layout of a parameter at rest.

        Raises:
            PlanMismatchError: the plan has no such parameter.
        """
        if not isinstance(parameter, str) or parameter not in self.layouts:
            raise PlanMismatchError(f"the plan has no parameter {shown(parameter)}; it was made for another model")
        return self.layouts[parameter]

    def asked(self, precision: Precision) -> str | None:
        """The plan's precision, checked against a requested one; None requests none.

        Raises:
            PlanMismatchError: another precision is requested.
        """
        wanted = precision_name(precision)
        if wanted is not None and wanted != self.precision:
            raise PlanMismatchError(f"the plan has precision={self.precision!r}, not {wanted!r}; leave it out or plan anew")
        return self.precision

    @property
    def bound_ratio(self) -> float | None:
        """Bytes that matrix products with a weight move, over their communication lower bounds; None without any."""
        bound = sum(op.bound_bytes for op in self.operators)
        return sum(op.bytes_moved for op in self.operators if op.bound_bytes) / bound if bound else None

    @property
    def hash(self) -> str:
        """A hash of everything in the plan that determines the distributed graph, and of nothing else."""
        decided: dict[str, Any] = {
            "model": self.model_hash,
            "mesh": self.mesh_shape,
            "operators": {op.name: op.assignment for op in self.operators},
            "panels": {op.name: op.panels for op in self.operators if op.panels > 1},
            "parameters": {name: encode_layout(layout) for name, layout in self.layouts.items()},
        }
        if any(count > 1 for count in self.chunks.values()):
            decided["chunks"] = {kind: count for kind, count in self.chunks.items() if count > 1}
        if self.gathered_once:
            decided["gathered_once"] = self.gathered_once
        if self.recomputed:
            decided["recomputed"] = {op.name: op.recomputed for op in self.operators if op.recomputed}
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash(self.hash)

    def to_json(self) -> str:
        """The plan as JSON text."""
        written = Written(
            format=FORMAT,
            hash=self.hash,
            memory_bound=None if self.memory_bound == float("inf") else self.memory_bound,
            topology=self.topology.to_dict(),
            layouts={name: tuple(encode_layout(layout)) for name, layout in self.layouts.items()},
            **{name: getattr(self, name) for name in AS_WRITTEN},
        )
        return json.dumps(asdict(written), indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> Plan:
        """Reads a plan from the JSON text of ``to_json``; ``source`` names the text in error messages.

        Raises:
            AutotpError: the text is not a plan of this version, or contradicts itself; names the key.
        """
        written = read(text, source)
        plan = cls(
            **{name: getattr(written, name) for name in AS_WRITTEN},
            topology=Topology.from_dict(written.topology, f"{source}: topology"),
            layouts={name: decode_layout(layout) for name, layout in written.layouts.items()},
            memory_bound=float("inf") if written.memory_bound is None else written.memory_bound,
        )
        if written.hash != plan.hash:
            raise AutotpError(f"{source}: the plan was changed by hand (hash {written.hash}, content {plan.hash})")
        try:
            plan.check()
        except AutotpError as error:
            raise AutotpError(f"{source}: {error}") from None
        return plan

    def check(self) -> None:
        """Checks that the plan is consistent, as far as that can be seen without the model.

        Raises:
            AutotpError: a key contradicts others; names the key.
        """
        axes, names = len(self.mesh_shape), {op.name for op in self.operators}
        wrong = {
            "mesh_axes": self.mesh_axes != AXIS_NAMES[:axes] or len(self.mesh_axes) != axes,
            "mesh_shape": math.prod(self.mesh_shape) != self.devices,
            "operators": len(names) < len(self.operators)
            or any(len(op.assignment) != axes or op.fold not in names for op in self.operators)
            or any(set(sharding) - set(self.mesh_axes) for op in self.operators for sharding in op.strategy.values()),
            "layouts": any(len(layout) != axes for layout in self.layouts.values()),
            "batch_axes": bool(set(self.batch_axes) - set(self.mesh_axes))
            or len(set(self.batch_axes)) < len(self.batch_axes),
            "gathered_once": bool(set(self.gathered_once) - self.layouts.keys()),
            "whole": bool(self.whole.keys() - names),
        }
        for key, contradicts in wrong.items():
            if contradicts:
                raise AutotpError(
                    f"key {key!r} contradicts the mesh {self.mesh_shape} of {self.devices:,} devices, the operators or the "
                    "parameters; make the plan again"
                )
        policy_of(self.precision)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the plan to a file as JSON, atomically: the file is written completely or not at all.

        Raises:
            AutotpError: ``path`` is not a path.
            OSError: the file cannot be written.
        """
        require_path(path, "a plan's file")
        write_atomically(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike) -> Plan:
        """Reads a saved plan.

        Raises:
            AutotpError: the file cannot be read, or is not a plan of this version.
        """
        require_path(path, "a plan's file")
        try:
            text = read_text(path, LARGEST_FILE)
        except OSError as error:
            raise AutotpError(f"{path}: cannot read the plan: {error.strerror}") from error
        return cls.from_json(text, str(path))


def check_chunks(chunks: Mapping[str, int]) -> None:
    """Checks the kinds and the numbers of chunks.

    Raises:
        AutotpError: a kind of chunks is unknown, or a number is not positive.
    """
    if not isinstance(chunks, Mapping):
        raise AutotpError(f"chunks: {shown(chunks)} is wrong; give a mapping such as {{'batch': 2}}")
    for kind, count in chunks.items():
        if kind not in CHUNKS:
            raise AutotpError(f"chunks: {shown(kind)} is wrong; give {' and '.join(CHUNKS)} positive numbers")
        whole(count, f"chunks: {kind!r}")


def check_accumulate(count: int) -> None:
    """Checks a number of micro-batches.

    Raises:
        AutotpError: it is not a positive whole number.
    """
    whole(count, "accumulate (the number of micro-batches that make a step)")


def check_compile(compile: bool) -> None:
    """Checks that ``compile`` is a bool.

    Raises:
        AutotpError: it is neither True nor False.
    """
    if not isinstance(compile, bool):
        raise AutotpError(f"compile={shown(compile)}: give True or False")


def overlapping(schedule: str) -> bool:
    """Whether the schedule of this name overlaps communication with computation.

    Raises:
        AutotpError: no schedule has this name.
    """
    if not isinstance(schedule, str) or schedule not in ("overlap", "none"):
        raise AutotpError(f"schedule={shown(schedule)} is unknown; choose 'overlap' or 'none'")
    return schedule == "overlap"


def fingerprint(captured: Captured) -> str:
    """A hash of a captured graph: of its operators, arguments, shapes and dtypes."""
    digest = hashlib.sha256()

    def show(argument: Any) -> str:
        return argument.name if isinstance(argument, fx.Node) else repr(argument)

    for node in captured.graph_module.graph.nodes:
        value = node.meta.get("val")
        kind = f"{tuple(value.shape)}{value.dtype}" if isinstance(value, Tensor) else ""
        if (cast := note_of(node).cast) is not None:
            kind += f" {tuple(cast)}"
        args = fx.node.map_aggregate((node.args, node.kwargs), show)
        target = captured.parameters.get(node.name, node.name) if node.op == "placeholder" else _target(node)
        digest.update(f"{node.op} {node.name} {target} {args} {kind}\n".encode())
    return digest.hexdigest()[:16]


def _target(node: fx.Node) -> str:
    text = str(node.target)
    return text if " at 0x" not in text else f"{node.target.__module__}.{node.target.__name__}"  # type: ignore[union-attr]
