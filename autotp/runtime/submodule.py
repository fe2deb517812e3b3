"""What holds a distributed module's state under the model's own names: modules that compute nothing themselves."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from autotp.errors import AutotpError
from autotp.runtime.modes import OneMode, different_otherwise, plain_attributes

__all__ = ["Submodule"]


class Submodule(OneMode):
    """A module of the model's hierarchy, with its parameters and buffers; the graph does what it did.

    What stands for one of torch's own layers is an instance of that layer's class too, so what goes by types finds it.

    Attributes:
        training: as the model's module was.
    """

    @staticmethod
    def like(path: str, module: nn.Module | None, training: Mapping[str, str]) -> Submodule:
        """An empty one for a module of the model, as that was when it was captured.

        Args:
            path: the module's.
            module: it; None: the model has none there.
            training: see `autotp.runtime.modes.training_only`.
        """
        found: Any = type(module)
        own = module is not None and found.__module__.startswith("torch.nn.modules.")
        # What has several layers, and recurrent ones, do more with their parts than hold them.
        layer = own and not issubclass(found, nn.RNNBase) and not any(True for _ in module.children())  # type: ignore[union-attr]
        kind: Any = _of_kind(found) if layer else Submodule
        made: Submodule = kind.__new__(kind)
        nn.Module.__init__(made)
        made._path = path
        if module is not None:
            made.training, made._different = module.training, different_otherwise(path, module, training)
            made._plain = plain_attributes(module)
            made.__dict__ |= made._plain
        return made

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuses.

        Raises:
            AutotpError: always; it computes nothing.
        """
        raise AutotpError(f"{self._path} is a part of a distributed module, and holds state alone")


@functools.cache
def _of_kind(layer: Any) -> Any:
    return type(layer.__name__, (Submodule, layer), {"__doc__": Submodule.__doc__, "__module__": __name__})
