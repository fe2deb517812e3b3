"""What of a distributed module is saved and loaded: its parameters and persistent buffers, on every rank alike."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from autotp.errors import AutotpError
from autotp.runtime.module import DistributedModule

__all__ = ["Entry", "entries_of"]


@dataclass(frozen=True)
class Entry:
    """One parameter or persistent buffer, with all its names: the module's own first."""

    names: tuple[str, ...]
    value: Tensor


def entries_of(parallel: nn.Module) -> list[Entry]:
    """Every one of a distributed module, in its order.

    Raises:
        AutotpError: it is another module.
    """
    if not isinstance(parallel, DistributedModule):
        raise AutotpError(
            f"{type(parallel).__name__} is not a distributed module: pass what autotp.parallelize returned, not a module "
            "around it"
        )
    names: dict[int, list[str]] = {}
    values: dict[int, Tensor] = {}
    for name, value in parallel.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(name)
            values[id(value)] = value
    return [Entry(tuple(names[each]), value) for each, value in values.items()]
