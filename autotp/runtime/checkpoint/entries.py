"""The parameters and persistent buffers of a distributed module, which are saved and loaded; the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from autotp.errors import AutotpError
from autotp.runtime.module import DistributedModule

__all__ = ["Entry", "entries_of"]


@dataclass(frozen=True)
class Entry:
    """One parameter or persistent buffer, with all its names, in the order of the module's state dict."""

    names: tuple[str, ...]
    value: Tensor


def entries_of(parallel: nn.Module) -> list[Entry]:
    """The entries of a distributed module, in the order of its state dict.

    Raises:
        AutotpError: ``parallel`` is not a distributed module.
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
