"""What holds a distributed module's state under the model's own names: modules that compute nothing themselves."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from autotp.errors import AutotpError
from autotp.modes import OneMode, different_within

__all__ = ["Submodule", "plain_attributes", "require_as_captured"]

_PLAIN = (bool, int, float, str, tuple, type(None))


class Submodule(OneMode):
    """A module of the model's hierarchy, with its parameters and buffers; the graph does what it did.

    What stands for one of torch's own layers is an instance of that layer's class too, so what goes by types finds it.

    Attributes:
        training: as the model's module was.
    """

    _plain: Mapping[str, Any] = {}
    _path = ""

    @staticmethod
    def like(module: nn.Module | None) -> Submodule:
        """An empty one for a module of the model; None: for none."""
        found: Any = type(module)
        own = module is not None and found.__module__.startswith("torch.nn.modules.")
        # What has several layers, and recurrent ones, do more with their parts than hold them.
        layer = own and not issubclass(found, nn.RNNBase) and not any(True for _ in module.children())  # type: ignore[union-attr]
        kind: Any = _of_kind(found) if layer else Submodule
        made: Submodule = kind.__new__(kind)
        nn.Module.__init__(made)
        return made

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuses.

        Raises:
            AutotpError: always; it computes nothing.
        """
        raise AutotpError(f"{self._path or 'this'} is a part of a distributed module, and holds state alone")

    def adopt(self, path: str, module: nn.Module, training: Mapping[str, str]) -> None:
        """Takes over what a module of the model was when it was captured.

        Args:
            path: the module's.
            module: it.
            training: see `autotp.modes.different_within`.
        """
        self.training, self._path = module.training, path
        self._different = different_within(path, module, training)
        self._plain = plain_attributes(module)
        self.__dict__ |= self._plain

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._plain:
            require_as_captured(self._path, self._plain, name, value)
        super().__setattr__(name, value)


@functools.cache
def _of_kind(layer: Any) -> Any:
    return type(layer.__name__, (Submodule, layer), {"__doc__": Submodule.__doc__, "__module__": __name__})


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's own public attributes that are numbers, text and the like."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    return {name: value for name, value in own.items() if isinstance(value, _PLAIN)}


def require_as_captured(path: str, known: Mapping[str, Any], name: str, value: Any) -> None:
    """Refuses another value of an attribute than the graph was captured with.

    Raises:
        AutotpError: it is another.
    """
    if not (type(value) is type(known[name]) and value == known[name]):
        raise AutotpError(
            f"{path}.{name} was {known[name]!r} when the model was captured, and the graph stays so: it cannot become "
            f"{value!r}. Set it on the model, and distribute that"
        )
