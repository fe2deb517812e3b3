"""What holds a distributed module's state under the model's own names: modules that compute nothing themselves."""

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

#: What a model of transformers does by methods, and autotp otherwise.
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
    """What autotp has in the place of methods of a model's class."""
    foreign = any(base.__module__.startswith(("transformers.", "peft.")) for base in kind.__mro__)
    return _INSTEAD if foreign else {}


@functools.cache
def _own_names(kind: type) -> frozenset[str]:
    """What modules that stand for others have for themselves."""
    return frozenset(name for base in kind.__mro__ if base.__module__.startswith("autotp.") for name in vars(base))


class Sealed(nn.Module):
    """A module that stands for one that was captured: what its graph cannot follow is refused.

    It has what that module has beside its parts: its data, to be read; and the methods and properties of its class, which
    act on this one. A method that would compute with parts of the model is refused by them.
    """

    _path = ""
    _kind: Any = nn.Module  # the class of the model's module
    _attributes: Set[str] = frozenset()  # its own that are no parts, and its class's
    _data: Mapping[str, Any] = {}  # those that `is_data`
    _objects: Set[str] = frozenset()  # those that are not
    _found: Mapping[str, Any] = {}  # its own data where the class has some too, which would be found first
    _fixed: Set[str] = frozenset()  # its class's methods, which the graph does the work of
    _changed = Unkept()
    _sealed = False  # whether it has all its parameters and modules

    def _stand_for(self, module: nn.Module) -> None:
        """Takes what a module of the model has beside its parts."""
        base, kind = vars(nn.Module()), cast(Any, type(module))
        own = defaults(kind) | {name: value for name, value in vars(module).items() if name not in base}
        ours: Set[str] = _own_names(cast(Any, type(self)))
        self._kind, self._attributes = kind, own.keys() - vars(self).keys() - ours
        self._data = {name: value for name, value in own.items() if is_data(value)}
        self._objects = own.keys() - self._data.keys()
        self._fixed = self._fixed | (methods(kind) - ours - _instead(kind).keys())
        self._put()

    def _put(self) -> None:
        """Puts its own data where the class's would be found first, unless forward has left something else there."""
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
        # What forward itself leaves there is not the model's.
        if name in self._attributes and vars(self).get(name, _GONE) is self._found.get(name, _GONE):
            own = self._data.get(name, _GONE)
            if own is not _GONE and same(value, own):
                return
            path, was = self._path or type(self).__name__, "something else" if own is _GONE else shown(own)
            raise AutotpError(
                f"{path}.{name} was {was} when the model was captured, and is set to {shown(value)}: {UNCHANGED}"
            )
        if not hasattr(type(self), name) and hasattr(setting := inspect.getattr_static(self._kind, name, None), "__set__"):
            setting.__set__(self, value)  # which this is no instance of
            return
        value = set_into(self._buffers.get(name), value, self._named(name)) if self._sealed else value
        self._require_followed(name, value, isinstance(value, (nn.Module, nn.Parameter)) or name in self._fixed)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._require_followed(name, _GONE, name in self._attributes)
        super().__delattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """As a module's own; refused once all parts are there, as are the two that follow.

        Raises:
            AutotpError: the graph was captured without it.
        """
        self._require_followed(name, module, module is not None)
        super().add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As a module's own."""
        self._require_followed(name, param, param is not None)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """As a module's own."""
        self._require_followed(name, tensor, tensor is not None)
        super().register_buffer(name, tensor, persistent)

    def share_memory(self) -> NoReturn:
        """Refuses.

        Raises:
            AutotpError: always; a ``DTensor`` belongs to one process.
        """
        name = self._path or type(self).__name__
        raise AutotpError(f"{name}.share_memory(): parts of a distributed module belong to one process each")

    def _seal(self) -> None:
        """Refuses from now on what the graph cannot follow."""
        self._sealed = True
        self.__dict__[COMPOSED] = FixedDict({}, _WRAPPED)
        self.__dict__["_modules"] = FixedDict(
            self._modules, _unfollowed(f"{self._path}._modules".lstrip("."), "module", "is new, gone or in another's place")
        )

    def _require_followed(self, name: str, value: Any, part: bool) -> None:
        """Refuses what would change of which modules, parameters and buffers there are.

        Args:
            name, value: what is set; `_GONE`: it is deleted.
            part: whether the graph had to know of it, also where it has nothing of that name.
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
    """A module of the model's hierarchy, with its parameters and buffers; the graph does what it did.

    It is an instance of the class of the model's module too, so what goes by types finds it; its methods act on this one,
    and containers can be indexed, iterated and measured as the model's.

    Attributes:
        training: as the model's module was; which program a call runs depends on it.
    """

    __repr__, __copy__, __reduce__ = nn.Module.__repr__, Programmed.__copy__, Programmed.__reduce__
    _fixed = frozenset(("forward",))
    _name = _shown = ""
    _observed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Submodule:
        """One with parameters and buffers of its own."""
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__ |= copy.deepcopy(self.__dict__, memo)
        made._put()
        return made

    def train(self, mode: bool = True) -> Submodule:
        """As a module's own.

        Raises:
            AutotpError: a class of the model, here or below, has another ``train``.
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
        """Refuses: nothing would call the hook."""
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
