"""Builds a distributed module: the model's module hierarchy, its state under its names, and the graph that reads them."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import PythonCode

from autotp.errors import AutotpError
from autotp.runtime.rewrite import Rewritten
from autotp.runtime.state import held_part, local_part, require_parts
from autotp.runtime.submodule import Submodule
from passes.capture import Left
from passes.graph import TRACING

__all__ = [
    "CONSTANTS",
    "WORLD",
    "Taken",
    "Untraced",
    "UntracedGraph",
    "attach",
    "bound",
    "carrying",
    "find",
    "hierarchy",
    "index_as",
]

#: Names of a distributed module's own submodules, besides the model's: the world, and the graph's constants.
WORLD, CONSTANTS = "autotp_world", "autotp_constants"

#: torch's containers: modules that only hold other modules, or parameters.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
#: Their methods that change their contents, but bypass ``nn.Module``'s own methods, or also change other attributes.
_CHANGING = ("append", "extend", "insert", "pop", "popitem", "clear", "update", "setdefault", "__delitem__")

_log = logging.getLogger("autotp.compile")


class Taken(NamedTuple):
    """Names that are reserved: attributes of a distributed module itself (``own``), and of its submodules (``parts``)."""

    own: frozenset[str]
    parts: frozenset[str]

    @classmethod
    def by(cls, module: type, part: type, besides: Iterable[str]) -> Taken:
        """Reserves what classes add to ``nn.Module``: all names of ``module`` and ``besides``; private ones of ``part``."""
        own, parts = (frozenset(dir(each)) - frozenset(dir(nn.Module)) for each in (module, part))
        return cls(own.union(besides), frozenset(name for name in parts if name.startswith("_")))

    def has(self, left: Left) -> bool:
        """Whether an attribute that the model's forward sets has a reserved name."""
        return left.name in (self.parts if left.index else self.own)

    def require_free(self, left: Iterable[Left], state: Iterable[str] = ()) -> None:
        """Checks that no attribute that the model's forward sets, and no top-level state, has a reserved name.

        Raises:
            AutotpError: one has.
        """
        if taken := sorted({*self.own.intersection(state), *(each.path for each in left if self.has(each))}):
            raise AutotpError(
                f"the model's {', '.join(taken)} cannot keep that name: a torch.fx.GraphModule, which the distributed "
                "module is, has something else of the name. Rename it, or put the model inside another module"
            )


_READ = (
    "the graph of a distributed module is for reading: what runs is scheduled, as the plan says. Change the model before "
    "autotp.parallelize"
)
_UNEXPORTED = "a distributed module cannot be exported or traced: its graph is one rank's. Export the model itself"


class Untraced:
    """A module whose calls run its ``_run``, with hooks, and that cannot be exported, traced or scripted."""

    _told = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a forward pass, with the model's signature and output structure; inputs are the global batch by default.

        Raises:
            AutotpError: the call is exported or traced.
        """
        if isinstance(args, fx.Proxy):  # torch.fx passes one proxy for all arguments of the root module
            raise AutotpError(_UNEXPORTED)
        if torch.compiler.is_compiling():
            _tell(self)
        return _called(self, *args, **kwargs)

    def __prepare_scriptable__(self) -> NoReturn:
        """Not supported; ``torch.jit.script`` calls this.

        Raises:
            AutotpError: always.
        """
        raise AutotpError(_UNEXPORTED)


class UntracedGraph(Untraced, fx.GraphModule):
    """An ``Untraced`` graph module, whose graph is read-only."""

    def recompile(self) -> PythonCode:
        """Generates the graph's Python code, for reading only.

        Raises:
            AutotpError: the graph has been changed; calls would ignore the change.
        """
        code = super().recompile()
        own: Any = type(self)
        own.forward = Untraced.forward
        graph, text = self.__dict__.get("_written", (0, ""))
        if graph == id(self._graph) and text != code.src:
            raise AutotpError(_READ)
        self.__dict__["_written"] = id(self._graph), code.src
        return code

    @property
    def graph(self) -> fx.Graph:
        """The graph, for reading only; hidden from ``torch.export``, which would run it directly.

        Raises:
            AutotpError: during an export, or if another graph is set.
        """
        if _exporting():
            raise AutotpError(_UNEXPORTED)
        return self._graph

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        if "_graph" in self.__dict__:
            raise AutotpError(_READ)
        fx.GraphModule.graph.fset(self, graph)  # type: ignore[attr-defined]

    def compile(self, *_: Any, **__: Any) -> None:
        """Has no effect except for a warning, like a call within ``torch.compile``."""
        _tell(self)

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """The modules that stand for the model's, without those that only the graph uses."""
        return ((name, each) for name, each in super().named_modules(*args, **options) if not self._besides(each))

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Like ``named_modules``, for immediate children."""
        return ((name, each) for name, each in super().named_children() if not self._besides(each))

    def _besides(self, module: nn.Module) -> bool:
        return any(module is self._modules.get(name) for name in (WORLD, CONSTANTS))

    def _apply(self, *args: Any, **options: Any) -> Any:
        for module in map(self._modules.get, (WORLD, CONSTANTS)):
            if module is not None:
                module._apply(*args, **options)
        return super()._apply(*args, **options)


# A call runs graphs that are made already; torch.compile would trace the code that makes them.
@functools.partial(torch.compiler.disable, reason=_UNEXPORTED)
def _called(module: Any, *args: Any, **kwargs: Any) -> Any:
    symbolic = any(isinstance(each, fx.Proxy) for each in (*args, *kwargs.values()))
    if symbolic or _exporting() or torch.jit.is_tracing():
        raise AutotpError(_UNEXPORTED)
    with module._programs.agreement.whereabouts.alone():
        return module._run(*args, **kwargs)


def _exporting() -> bool:
    """Whether this thread is exporting. torch's flag is process-wide, so captures of other threads are waited for."""
    if not torch.compiler.is_exporting():
        return False
    with TRACING:
        return torch.compiler.is_exporting()


@functools.partial(torch.compiler.disable, reason=_UNEXPORTED)
def _tell(module: Any) -> None:
    if not (module._told or torch.compiler.is_exporting()):
        module._told = True
        _log.warning("torch.compile changes nothing of a distributed module: give autotp.parallelize compile=True")


def hierarchy(root: nn.Module, model: nn.Module, taken: Set[str]) -> list[Any]:
    """Makes a stand-in for each of the model's modules, under its names in ``root``.

    Args:
        root: an empty module, which stands for the model itself.
        model: the model.
        taken: names that ``root`` needs for something else; modules without state do not get these.

    Returns:
        ``root`` and the stand-ins, in the order of ``model.modules()``.
    """
    made: dict[int, nn.Module] = {id(model): root}
    for path, module in model.named_modules(remove_duplicate=False):
        if not path:
            continue
        parent, _, name = path.rpartition(".")
        stands = made.setdefault(id(module), _stand_in(path, module))
        # A module without state can do without its name, if the graph module uses that itself.
        if parent or name not in taken or any(True for _ in (*module.parameters(), *module.buffers())):
            root.get_submodule(parent)._modules[name] = stands
    return list(made.values())


def _stand_in(path: str, module: nn.Module) -> Submodule:
    """An empty stand-in for the model's module at ``path``, with its mode and attributes at the time of capture."""
    found: Any = type(module)
    own = found.__module__.startswith("torch.nn.modules.") and found not in _CONTAINERS
    # The methods of torch's composite and recurrent layers do more with parts than hold them: use a plain Submodule.
    does_more = issubclass(found, nn.RNNBase) or (own and any(True for _ in module.children()))
    does_more |= found.__getattr__ is not nn.Module.__getattr__
    kind: Any = Submodule if does_more else _of_kind(found)
    made: Submodule = kind.__new__(kind)
    nn.Module.__init__(made)
    made.register_load_state_dict_pre_hook(require_parts)
    made._path, made._name, made.training = path, module._get_name(), module.training
    for table in ("_parameters", "_buffers", "_modules"):
        getattr(made, table).update({name: None for name, value in getattr(module, table).items() if value is None})
    made._shown = module.extra_repr()
    made._stand_for(module)
    return made


@functools.cache
def _of_kind(layer: Any) -> Any:
    changing = {
        name: _refusing(getattr(layer, name)) for name in _CHANGING if layer in _CONTAINERS and hasattr(layer, name)
    }
    own = {"__doc__": Submodule.__doc__, "__module__": __name__}
    try:
        return type(layer.__name__, (Submodule, layer), own | changing)
    except Exception:  # noqa: BLE001 - a class may ask anything of its subclasses
        return Submodule


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a container's mutating method: it raises an error once the container is complete (sealed)."""

    @functools.wraps(method)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "_sealed", True):  # modules without the flag count as sealed
            name = getattr(self, "_path", "") or type(self).__name__
            raise AutotpError(
                f"{name}.{method.__name__}: the graph cannot follow a container that holds something else. Change the "
                "model before it is distributed"
            )
        return method(self, *args, **kwargs)

    return changed


def index_as(module: nn.Module, kind: type) -> None:
    """Makes a module support indexing, iteration and ``len`` as the model does, if the model is one of torch's containers.

    Args:
        module: the module, whose class is replaced by a subclass.
        kind: the model's class.
    """
    methods: dict[str, Any] = {}

    def asked(container: Any, name: str) -> Callable[..., Any]:
        def answer(own: nn.Module, *args: Any) -> Any:
            children = OrderedDict((n, child) for n, child in own._modules.items() if n not in (WORLD, CONSTANTS))
            return getattr(container(children.values() if container is nn.ModuleList else children), name)(*args)

        return answer

    for container in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
        if issubclass(kind, container):
            asking = (n for n in ("__len__", "__iter__", "__getitem__", "__contains__") if hasattr(container, n))
            methods |= {name: asked(container, name) for name in asking}
            methods |= {name: _refusing(getattr(container, name)) for name in ("__setitem__", "__delitem__")}
    if methods:
        own = type(module)
        module.__class__ = type(own.__name__, (own,), methods | {"__module__": own.__module__})


def attach(root: nn.Module, path: str, value: Tensor, persistent: bool = True) -> None:
    """Registers a parameter or buffer in a module hierarchy, by its name in the model."""
    parent, _, name = path.rpartition(".")
    module = root.get_submodule(parent)
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    else:
        module.register_buffer(name, value, persistent)


def find(root: nn.Module, path: str) -> Tensor:
    """Returns a parameter or buffer, by its name in the model."""
    parent, _, name = path.rpartition(".")
    return getattr(root.get_submodule(parent), name)


def carrying(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter with new data, and the attributes that scripts set on the old one, such as a mark for the optimizer."""
    made = nn.Parameter(data, parameter.requires_grad)
    for name, value in vars(parameter).items():
        if not hasattr(made, name):
            setattr(made, name, value)
    return made


def bound(rewritten: Rewritten) -> fx.Graph:
    """The sharded graph that reads its state from the module: only the user's inputs remain placeholders."""
    captured = rewritten.captured
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in rewritten.graph_module.graph.nodes:
        if node.op == "placeholder" and node.target in captured.inputs:
            values[node] = graph.placeholder(str(node.target))
    for node in rewritten.graph_module.graph.nodes:
        if node in values:
            continue
        if node.op == "placeholder" and node.target in captured.parameters:
            stored = graph.get_attr(captured.parameters[str(node.target)])
            values[node] = graph.call_function(local_part, (stored, captured.parameters[str(node.target)]))
        elif node.op == "placeholder" and node.target in captured.buffers:
            values[node] = graph.get_attr(captured.buffers[str(node.target)])
            if captured.buffers[str(node.target)] in rewritten.placed:  # a cache
                values[node] = graph.call_function(held_part, (values[node],))
        elif node.op == "placeholder":
            values[node] = graph.get_attr(f"{CONSTANTS}.{node.target}")
        elif node.op == "get_attr":
            values[node] = graph.get_attr(WORLD)
        else:
            values[node] = graph.node_copy(node, lambda n: values[n])
    return graph
