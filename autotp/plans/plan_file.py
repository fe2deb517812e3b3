"""The JSON form of a plan: what its keys are, and how they are read."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from autotp.errors import AutotpError
from autotp.plans.planned_operator import PlannedOperator, Predicted
from costmodel.memory import OPTIMIZERS
from passes.layouts.layout import Layout, blocks_of, is_shard, place
from passes.sharding.chunk import CHUNKS

__all__ = ["AS_WRITTEN", "FORMAT", "Written", "decode_layout", "encode_layout", "read"]

#: Version of the JSON form; plans of another version are refused.
FORMAT: Final = 8


def _one_of(names: Collection[str], name: str) -> str:
    if name not in names:
        raise ValueError(f"it should be one of {', '.join(names)}")
    return name


def _placement(item: Any) -> Any:
    split = isinstance(item, list) and len(item) == 2 and all(type(number) is int for number in item)
    if item in ("R", "P") or (split and item[0] >= 0 and item[1] >= 1):
        return item
    raise ValueError('it should be "R", "P" or [dim, blocks]')


_Count = Annotated[int, Field(ge=1)]
_Kind = Annotated[str, AfterValidator(functools.partial(_one_of, CHUNKS))]
_Optimizer = Annotated[str, AfterValidator(functools.partial(_one_of, OPTIMIZERS))]
_Placement = Annotated[Any, AfterValidator(_placement)]


@dataclass(frozen=True, slots=True)
class Written:
    """The keys of the file; what they mean, `autotp.Plan` says. ``memory_bound`` is null for none."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    format: Literal[8]
    hash: str
    strategy: str
    mesh_shape: tuple[_Count, ...]
    mesh_axes: tuple[str, ...]
    optimal: bool
    gap: Annotated[float, Field(ge=0)]
    model_hash: str
    mode: Literal["train", "inference"]
    optimizer: _Optimizer
    memory_bound: float | None
    topology: dict[str, Any]
    predicted: Predicted
    chunks: dict[_Kind, _Count]
    chunked: dict[_Kind, int]
    whole: dict[str, str]
    schedule: Literal["overlap", "none"]
    compile: bool
    constraints: tuple[str, ...]
    accumulate: _Count
    planning: dict[str, Any]
    layouts: dict[str, tuple[_Placement, ...]]
    operators: tuple[PlannedOperator, ...]
    precision: str | None
    gathered_once: tuple[str, ...]
    batch_axes: tuple[str, ...]
    outputs: Literal["whole", "dtensor"]


#: The keys that a plan has as they are.
AS_WRITTEN = tuple(
    field.name for field in fields(Written) if field.name not in ("format", "hash", "topology", "layouts", "memory_bound")
)


@functools.cache
def _adapter() -> TypeAdapter[Written]:
    return TypeAdapter(Written)


def read(text: str, source: str) -> Written:
    """Reads and checks a plan's text.

    Args:
        text: JSON.
        source: where it is from, for messages.

    Raises:
        AutotpError: it is not JSON, of another version, or some key is missing, unknown or wrong; names the key.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise AutotpError(f"{source}: not JSON ({error}); was it written by Plan.save?") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        older = type(found) is int and found < FORMAT
        why = ": an earlier version of autotp wrote this plan, and what a plan says has changed since" if older else ""
        raise AutotpError(f"{source}: key 'format' is {found!r}, expected {FORMAT}{why}; make the plan again")
    try:
        return _adapter().validate_json(text)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)
        first, more = wrong[0], f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        key = ".".join(map(str, first["loc"]))
        given = "" if first["type"] == "missing" else f", not {_short(first['input'])}"
        raise AutotpError(f"{source}: key {key!r}: {first['msg']}{given}{more}; make the plan again") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def encode_layout(layout: Layout) -> list[Any]:
    """A layout as JSON: per axis ``"R"``, ``"P"`` or ``[dim, blocks]``."""
    return [
        [p.dim, blocks_of(p)] if is_shard(p) else "P" if isinstance(p, Partial) else "R"  # type: ignore[attr-defined]
        for p in layout
    ]


def decode_layout(data: Sequence[Any]) -> Layout:
    """The inverse of ``encode_layout``."""
    placements: list[Placement] = []
    for item in data:
        placements.append(Partial() if item == "P" else Replicate() if item == "R" else place(*item))
    return tuple(placements)
