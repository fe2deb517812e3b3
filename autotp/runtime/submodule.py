"""What holds a distributed module's state under the model's own names: modules that compute nothing themselves."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autotp.errors import AutotpError
from autotp.runtime.programs.observed import unobserved

__all__ = ["Sealed", "Submodule", "plain_attributes"]

_PLAIN = (bool, int, float, str, tuple, type(None))
#: torch's own modules that only hold others, or parameters.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
#: What containers of parameters know besides.
_KNOWN = ("_size", "_keys")


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's own public attributes that are numbers, text and the like."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    return {name: value for name, value in own.items() if isinstance(value, _PLAIN)}


class Sealed(nn.Module):
    """A module that stands for one that was captured: what its graph cannot follow is refused."""

    _path = ""
    _plain: Mapping[str, Any] = {}  # what `plain_attributes` found
    _sealed = False  # whether it has all its parameters and modules

    def __setattr__(self, name: str, value: Any) -> None:
        where = f"{self._path}.{name}".lstrip(".")
        if name in self._plain and not (type(value) is type(self._plain[name]) and value == self._plain[name]):
            raise AutotpError(
                f"{self._path or type(self).__name__}.{name} was {self._plain[name]!r} when the model was captured, and "
                f"the graph cannot follow a change to {value!r}. Set it on the model, and distribute the model again"
            )
        held = {**self.__dict__.get("_modules", {}), **self.__dict__.get("_parameters", {})}
        caches = {name: each for name, each in self.__dict__.get("_buffers", {}).items() if isinstance(each, DTensor)}
        held |= caches
        if self._sealed and (isinstance(value, (nn.Module, nn.Parameter)) or name in held) and held.get(name) is not value:
            kind = "module" if isinstance(value, nn.Module) else "cache" if name in caches else "parameter"
            raise AutotpError(
                f"{where}: the graph cannot follow a {kind} that takes the place of another, or is new. Change the model "
                "before it is distributed (adapters too); to change values, copy into the parameter under torch.no_grad(), "
                "or load a state dict without assign=True"
            )
        super().__setattr__(name, value)


class Submodule(Sealed):
    """A module of the model's hierarchy, with its parameters and buffers; the graph does what it did.

    What stands for one of torch's own layers is an instance of that layer's class too, so what goes by types finds it; a
    container can be indexed, iterated and measured as the model's.

    Attributes:
        training: as the model's module was; which program a call runs depends on it.
    """

    _name = ""
    _observed = False
    _shown = ""

    @staticmethod
    def like(path: str, module: nn.Module) -> Submodule:
        """An empty one for a module of the model, as that was when it was captured.

        Args:
            path: the module's.
            module: it.
        """
        found: Any = type(module)
        own = found.__module__.startswith("torch.nn.modules.")
        # What has several layers, and recurrent ones, do more with their parts than hold them.
        layer = own and not issubclass(found, nn.RNNBase) and not any(True for _ in module.children())
        kind: Any = _of_kind(found) if layer or found in _CONTAINERS else Submodule
        made: Submodule = kind.__new__(kind)
        nn.Module.__init__(made)
        made._path, made._name, made.training = path, module._get_name(), module.training
        for table in ("_parameters", "_buffers", "_modules"):
            getattr(made, table).update({name: None for name, value in getattr(module, table).items() if value is None})
        made._shown = module.extra_repr()
        made._plain = plain_attributes(module)
        made.__dict__ |= made._plain | {name: vars(module)[name] for name in _KNOWN if name in vars(module)}
        return made

    def extra_repr(self) -> str:
        """What the model's module shows of itself."""
        return self._shown

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuses.

        Raises:
            AutotpError: always; it computes nothing.
        """
        raise AutotpError(f"{self._path} is a part of a distributed module, and holds state alone")

    def register_forward_hook(self, hook: Any, **options: Any) -> RemovableHandle:  # type: ignore[override]
        """As a module's own, if this one is observed. The hook runs after the forward pass, and only looks.

        Args:
            hook: called with this module, its positional arguments (keyword arguments too, with ``with_kwargs``) and what
                it returned, whose tensors are ``DTensor`` in the layouts of the plan.
            options: ``prepend`` and ``with_kwargs`` of torch.

        Raises:
            AutotpError: the module is not observed, or the hook is to be called where the forward pass fails.
        """
        self._require_observed()
        if options.get("always_call"):
            raise AutotpError(f"always_call of a hook of {self._path}: if the forward pass fails, there is nothing to show")
        return super().register_forward_hook(hook, **options)

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> RemovableHandle:  # type: ignore[override]
        """As ``register_forward_hook``, for what the module is given."""
        self._require_observed()
        return super().register_forward_pre_hook(hook, **options)

    def _require_observed(self) -> None:
        if not self._observed:
            raise unobserved(self._path)

    def _refuse_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses.

        Raises:
            AutotpError: always; nothing would call the hook.
        """
        raise AutotpError(
            f"{self._path} is a part of a distributed module, whose graph calls no backward hooks of parts. Register it on "
            "the distributed module, or hooks on gradients of parameters"
        )

    register_full_backward_hook = _refuse_hook
    register_full_backward_pre_hook = _refuse_hook
    register_backward_hook = _refuse_hook

    def _get_name(self) -> str:
        return self._name


@functools.cache
def _of_kind(layer: Any) -> Any:
    return type(layer.__name__, (Submodule, layer), {"__doc__": Submodule.__doc__, "__module__": __name__})
