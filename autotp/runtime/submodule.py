"""The submodules of a distributed module: they hold its state under the model's names, and compute nothing themselves."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, Set
from typing import Any, NoReturn, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autotp.errors import AutotpError
from autotp.runtime.programs import (
    UNCHANGED,
    FixedDict,
    Programmed,
    Unkept,
    as_it_was,
    defaults,
    is_data,
    methods,
    same,
    unobserved,
)
from autotp.runtime.state import set_into
from costmodel.errors import shown
from passes.torch_internals import COMPOSED, DDP_IGNORED

__all__ = ["Sealed", "Submodule"]

#: Methods of models of transformers -> what replaces them in autotp.
_INSTEAD = {
    "generate": "autotp.integrations.generate",
    "save_pretrained": "autotp.save_pretrained",
    "from_pretrained": "autotp.load_pretrained",
}
_GONE = object()
_WRAPPED = (
    "a distributed module reduces its gradients and shards its parameters itself, as its plan says: it goes into no "
    "DistributedDataParallel, fully_shard or the like. For other shardings, give autotp.parallelize another strategy"
)


@functools.cache
def _instead(kind: type) -> Mapping[str, str]:
    """Methods of a model's class -> what replaces them in autotp; only of classes of transformers and peft."""
    foreign = any(base.__module__.startswith(("transformers.", "peft.")) for base in kind.__mro__)
    return _INSTEAD if foreign else {}


@functools.cache
def _own_names(kind: type) -> frozenset[str]:
    """Names of attributes that a stand-in's class inherits from autotp's own classes."""
    return frozenset(name for base in kind.__mro__ if base.__module__.startswith("autotp.") for name in vars(base))


class Sealed(nn.Module):
    """A stand-in for a module that was captured. Changes that the graph cannot follow raise an error.

    It has that module's attributes other than its parts (parameters, buffers and modules): its data, read-only, and the
    methods and properties of its class, bound to the stand-in. A method that would compute with parts fails in these.
    """

    _path = ""
    _kind: Any = nn.Module  # the class of the model's module
    _attributes: Set[str] = frozenset()  # names of its attributes that are no parts, and its class's
    _data: Mapping[str, Any] = {}  # those that are data (see `is_data`)
    _objects: Set[str] = frozenset()  # those that are not data
    _found: Mapping[str, Any] = {}  # its data that the class defines too, and that is therefore set on the instance
    _fixed: Set[str] = frozenset()  # methods of its class, whose work the graph does
    _changed = Unkept()
    _sealed = False  # whether all its parameters and modules are there

    def _stand_for(self, module: nn.Module) -> None:
        """Takes over the attributes of a module of the model that are not its parts."""
        base, kind = vars(nn.Module()), cast(Any, type(module))
        own = defaults(kind) | {name: value for name, value in vars(module).items() if name not in base}
        ours: Set[str] = _own_names(cast(Any, type(self)))
        self._kind, self._attributes = kind, own.keys() - vars(self).keys() - ours
        self._data = {name: value for name, value in own.items() if is_data(value)}
        self._objects = own.keys() - self._data.keys()
        self._fixed = self._fixed | (methods(kind) - ours - _instead(kind).keys())
        self._put()

    def _put(self) -> None:
        """Sets data on the instance where the class's would be found first, unless forward has left another value."""
        if isinstance(self, self._kind):
            names = self._data.keys() & self._attributes & defaults(self._kind).keys()
            found = {name: as_it_was(self._data[name], self._named(name)) for name in names}
            free = [name for name in found if vars(self).get(name, _GONE) is self._found.get(name, _GONE)]
            self._found = found
            self.__dict__ |= {name: found[name] for name in free}

    def _named(self, name: str) -> str:
        return f"{self._path}.{name}".lstrip(".")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == DDP_IGNORED:
                raise AutotpError(_WRAPPED) from None
            self._changed.require(self._path, name, AttributeError)
            if name in self._data:
                return as_it_was(self._data[name], self._named(name))
            own = inspect.getattr_static(self._kind, name, _GONE)
            if own is _GONE and name in self._objects:
                raise AttributeError(
                    f"{self._path}.{name} of the model holds tensors, modules or other objects, and a distributed module "
                    "keeps those alone that are its parameters, buffers and modules: read them there".lstrip(".")
                ) from None
            if own is _GONE or name.startswith("__"):
                raise
        code, others = getattr(own, "__code__", None), _instead(self._kind)
        if name in others or (code is not None and "__class__" in code.co_freevars):  # it calls super()
            instead = others.get(name, f"the model's own {name}, before it is distributed")
            raise AttributeError(f"a distributed module has no {self._kind.__name__}.{name}: use {instead}")
        return own.__get__(self, self._kind) if hasattr(own, "__get__") else own

    def __setattr__(self, name: str, value: Any) -> None:
        self._changed.require(self._path, name, AutotpError)
        # Values that forward has left there since may be replaced.
        if name in self._attributes and vars(self).get(name, _GONE) is self._found.get(name, _GONE):
            own = self._data.get(name, _GONE)
            if own is not _GONE and same(value, own):
                return
            path, was = self._path or type(self).__name__, "something else" if own is _GONE else shown(own)
            raise AutotpError(
                f"{path}.{name} was {was} when the model was captured, and is set to {shown(value)}: {UNCHANGED}"
            )
        if not hasattr(type(self), name) and hasattr(setting := inspect.getattr_static(self._kind, name, None), "__set__"):
            setting.__set__(self, value)  # a property of a class that this is not an instance of
            return
        value = set_into(self._buffers.get(name), value, self._named(name)) if self._sealed else value
        self._require_followed(name, value, isinstance(value, (nn.Module, nn.Parameter)) or name in self._fixed)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._require_followed(name, _GONE, name in self._attributes)
        super().__delattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Like ``nn.Module.add_module``; once the module is sealed, only if the graph can follow. So are the next two.

        Raises:
            AutotpError: the graph was captured without it.
        """
        self._require_followed(name, module, module is not None)
        super().add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Like ``nn.Module.register_parameter``; see ``add_module``."""
        self._require_followed(name, param, param is not None)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Like ``nn.Module.register_buffer``; see ``add_module``."""
        self._require_followed(name, tensor, tensor is not None)
        super().register_buffer(name, tensor, persistent)

    def share_memory(self) -> NoReturn:
        """Not supported.

        Raises:
            AutotpError: always; a ``DTensor`` belongs to one process.
        """
        name = self._path or type(self).__name__
        raise AutotpError(f"{name}.share_memory(): parts of a distributed module belong to one process each")

    def _seal(self) -> None:
        """From now on, changes that the graph cannot follow raise an error."""
        self._sealed = True
        self.__dict__[COMPOSED] = FixedDict({}, _WRAPPED)
        self.__dict__["_modules"] = FixedDict(
            self._modules, _unfollowed(f"{self._path}._modules".lstrip("."), "module", "is new, gone or in another's place")
        )

    def _require_followed(self, name: str, value: Any, part: bool) -> None:
        """Raises an error if setting an attribute would change which modules, parameters and buffers there are.

        Args:
            name, value: the attribute and its new value; `_GONE`: it is deleted.
            part: whether the graph would have to know of it even if there is nothing of that name.
        """
        if not self._sealed:
            return
        modules, parameters, buffers = (self.__dict__[table] for table in ("_modules", "_parameters", "_buffers"))
        held = {**modules, **parameters, **buffers}
        plain = isinstance(buffers.get(name), Tensor) and not isinstance(buffers[name], DTensor) and type(value) is Tensor
        if plain or (held.get(name) is value if name in held else not part):
            return  # calls read buffers from their modules
        if name in modules or isinstance(value, nn.Module):
            kind = "module"
        elif name in parameters or isinstance(value, nn.Parameter):
            kind = "parameter"
        elif name in buffers or isinstance(value, Tensor):
            kind = "cache" if isinstance(buffers.get(name), DTensor) else "buffer"
        else:
            kind = "function" if callable(value) else "value"
        change = "is taken away" if value is _GONE else "takes the place of another, or is new"
        raise AutotpError(_unfollowed(self._named(name), kind, change))


def _unfollowed(name: str, kind: str, change: str) -> str:
    return (
        f"{name}: the graph cannot follow a {kind} that {change}. Change the model before it is distributed (adapters "
        "too); to change values, copy into the parameter under torch.no_grad(), or load a state dict without assign=True"
    )


class Submodule(Sealed):
    """A stand-in for a module of the model, with its parameters and buffers; the graph does the module's work.

    Where possible, it is an instance of the module's class too, so code that searches by type finds it. Methods are bound
    to the stand-in, and containers support indexing, iteration and ``len``.

    Attributes:
        training: initially as in the model's module; determines which program a call runs.
    """

    __repr__, __copy__, __reduce__ = nn.Module.__repr__, Programmed.__copy__, Programmed.__reduce__
    _fixed = frozenset(("forward",))
    _name = _shown = ""
    _observed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Submodule:
        """Copies the module, with its parameters and buffers."""
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__ |= copy.deepcopy(self.__dict__, memo)
        made._put()
        return made

    def train(self, mode: bool = True) -> Submodule:
        """Like ``nn.Module.train``.

        Raises:
            AutotpError: the class of this module, or of one inside it, overrides ``train``.
        """
        own = next(
            (m._path for m in self.modules() if isinstance(m, Sealed) and m._kind.train is not nn.Module.train), None
        )
        if own is not None:
            raise AutotpError(
                f"{own}.train is the model's own: call train or eval of the distributed module, which call it"
            )
        return super().train(mode)

    def extra_repr(self) -> str:
        """The ``extra_repr()`` of the model's module."""
        return self._shown

    def forward(self, *_: Any, **__: Any) -> Any:
        """Not supported.

        Raises:
            AutotpError: always; the module computes nothing.
        """
        raise AutotpError(f"{self._path} is a part of a distributed module, and holds state alone")

    def register_forward_hook(self, hook: Any, **options: Any) -> RemovableHandle:  # type: ignore[override]
        """Like ``nn.Module.register_forward_hook``, for an observed module.

        Args:
            hook: called after the whole forward pass with this module, its positional arguments (with ``with_kwargs``, its
                keyword arguments too) and its result, as ``DTensor``s in the layouts of the plan; must not change them.
            options: ``prepend`` and ``with_kwargs`` of torch.

        Raises:
            AutotpError: the module is not observed, or ``always_call`` is set.
        """
        self._require_observed()
        if options.get("always_call"):
            raise AutotpError(f"always_call of a hook of {self._path}: if the forward pass fails, there is nothing to show")
        return super().register_forward_hook(hook, **options)

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> RemovableHandle:  # type: ignore[override]
        """Like ``register_forward_hook``; the hook gets the module's arguments only."""
        self._require_observed()
        return super().register_forward_pre_hook(hook, **options)

    def _require_observed(self) -> None:
        if not self._observed:
            raise unobserved(self._path)

    def _refuse_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Raises an error: nothing would call the hook."""
        raise AutotpError(self._uncalled())

    def _uncalled(self) -> str:
        return (
            f"{self._path} is a part of a distributed module, whose graph calls no backward hooks of parts. Register it on "
            "the distributed module, or hooks on gradients of parameters"
        )

    def _seal(self) -> None:
        super()._seal()
        own = {} if self._observed else dict.fromkeys(("_forward_hooks", "_forward_pre_hooks"), str(unobserved(self._path)))
        for table, why in {
            **own,
            **dict.fromkeys(("_backward_hooks", "_backward_pre_hooks"), self._uncalled()),
        }.items():
            self.__dict__[table] = FixedDict({}, why)

    register_full_backward_hook = _refuse_hook
    register_full_backward_pre_hook = _refuse_hook
    register_backward_hook = _refuse_hook

    def _get_name(self) -> str:
        return self._name
