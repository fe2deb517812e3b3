"""The JSON form of a plan: its keys, and how they are parsed and checked."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, FailFast, Field, TypeAdapter, ValidationError
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from typing_extensions import TypedDict

from autotp.errors import AutotpError
from autotp.plans.planned_operator import Count, Figure, PlannedOperator, Predicted
from costmodel.errors import shown
from costmodel.memory import OPTIMIZERS
from passes.layouts.layout import Layout, blocks_of, is_shard, place
from passes.sharding.chunk import CHUNKS

__all__ = ["AS_WRITTEN", "FORMAT", "LARGEST_FILE", "Written", "decode_layout", "encode_layout", "read"]

#: Version of the JSON form; plans of another version are refused.
FORMAT: Final = 8

#: The largest plan file that is read, in bytes; an operator takes about 700 bytes.
LARGEST_FILE: Final = 2**26

_DIMS, _BLOCKS = 64, 2**31  # upper bounds on the dims of a tensor, in torch, and on the blocks of a dim


def _one_of(names: Collection[str], name: str) -> str:
    if name not in names:
        raise ValueError(f"it should be one of {', '.join(names)}")
    return name


def _placement(item: Any) -> Any:
    split = isinstance(item, list) and len(item) == 2 and all(type(number) is int for number in item)
    if item == "R" or (split and 0 <= item[0] < _DIMS and 1 <= item[1] < _BLOCKS):
        return item
    raise ValueError('it should be "R" or [dim, blocks]')


_Kind = Annotated[str, AfterValidator(functools.partial(_one_of, CHUNKS))]
_Optimizer = Annotated[str, AfterValidator(functools.partial(_one_of, OPTIMIZERS))]
_Placement = Annotated[Any, AfterValidator(_placement)]


class _Repriced(TypedDict):
    """Of a repriced plan: the topology that it was made for, and its predicted step there."""

    topology: str
    step_seconds: Figure


class _Planning(TypedDict, total=False):
    """The keys of ``planning`` that are checked; any other key is kept as it is."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    capture_seconds: Figure
    seconds: Figure
    variables: Annotated[int, Field(ge=0, le=2**48)]
    meshes: Annotated[int, Field(ge=0, le=2**48)]
    panels: Count | None
    recompute: str | list[str]
    reshard_after_forward: bool | None
    repriced: _Repriced


@dataclass(frozen=True, slots=True)
class Written:
    """The keys of the file, most of them attributes of `autotp.Plan`. A ``memory_bound`` of null means no bound."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    format: Literal[8]
    hash: str
    strategy: str
    mesh_shape: tuple[Count, ...]
    mesh_axes: tuple[str, ...]
    optimal: bool
    gap: Annotated[float, Field(ge=0)]
    model_hash: str
    mode: Literal["train", "inference"]
    optimizer: _Optimizer
    memory_bound: Figure | None
    topology: dict[str, Any]
    predicted: Predicted
    chunks: dict[_Kind, Count]
    chunked: dict[_Kind, int]
    whole: dict[str, str]
    schedule: Literal["overlap", "none"]
    compile: bool
    constraints: tuple[str, ...]
    accumulate: Count
    planning: _Planning
    layouts: dict[str, tuple[_Placement, ...]]
    operators: Annotated[tuple[PlannedOperator, ...], FailFast()]
    precision: str | None
    gathered_once: tuple[str, ...]
    batch_axes: tuple[str, ...]
    outputs: Literal["whole", "dtensor"]
    observe: tuple[str, ...]


#: The keys whose values are attributes of `Plan` without conversion.
AS_WRITTEN = tuple(
    field.name for field in fields(Written) if field.name not in ("format", "hash", "topology", "layouts", "memory_bound")
)


@functools.cache
def _adapter() -> TypeAdapter[Written]:
    return TypeAdapter(Written)


def read(text: str, source: str) -> Written:
    """Parses and checks the JSON text of a plan.

    Args:
        text: JSON.
        source: the origin of the text, such as its path, for error messages.

    Raises:
        AutotpError: the text is not JSON or is of another version, or a key is missing, unknown or wrong; names the key.
    """
    try:
        return _adapter().validate_json(text)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)
    first = next((one for one in wrong if one["loc"] == ("format",)), wrong[0])
    if first["type"] == "json_invalid":
        raise AutotpError(f"{source}: not JSON ({first['msg']}); was it written by Plan.save?")
    if first["loc"] in ((), ("format",)):
        given = None if first["type"] == "missing" else first["input"]
        older = type(given) is int and given < FORMAT
        why = ": an earlier version of autotp wrote this plan, and what a plan says has changed since" if older else ""
        raise AutotpError(f"{source}: key 'format' is {shown(given)}, expected {FORMAT}{why}; make the plan again")
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    key = ".".join(map(str, first["loc"]))
    given = "" if first["type"] == "missing" else f", not {shown(first['input'])}"
    raise AutotpError(f"{source}: key {shown(key)}: {first['msg']}{given}{more}; make the plan again")


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
