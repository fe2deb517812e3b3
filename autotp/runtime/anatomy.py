"""What a distributed module is made of: the model's hierarchy, its state under its names, the sharded graph over them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Set
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import PythonCode

from autotp.errors import AutotpError
from autotp.runtime.rewrite import Rewritten
from autotp.runtime.state import held_part, local_part
from autotp.runtime.submodule import Submodule
from passes.capture import Left
from passes.graph import TRACING

__all__ = [
    "CONSTANTS",
    "WORLD",
    "Taken",
    "Unscripted",
    "Untraced",
    "attach",
    "bound",
    "called",
    "carrying",
    "find",
    "hierarchy",
    "index_as",
]

#: Names of the module's own parts, beside the model's.
WORLD, CONSTANTS = "autotp_world", "autotp_constants"

_log = logging.getLogger("autotp.compile")


class Taken(NamedTuple):
    """Names that a distributed module has for itself, and those of its parts."""

    own: frozenset[str]
    parts: frozenset[str]

    @classmethod
    def by(cls, module: type, part: type, besides: Iterable[str]) -> Taken:
        """Of what classes add to those of torch's modules; of a part's, its private names."""
        own, parts = (frozenset(dir(each)) - frozenset(dir(nn.Module)) for each in (module, part))
        return cls(own.union(besides), frozenset(name for name in parts if name.startswith("_")))

    def has(self, left: Left) -> bool:
        """Whether an attribute that a forward pass sets would replace something."""
        return left.name in (self.parts if left.index else self.own)

    def require_free(self, left: Iterable[Left], state: Iterable[str] = ()) -> None:
        """Refuses state, and attributes that a forward pass leaves, that would replace something.

        Raises:
            AutotpError: some would.
        """
        if taken := sorted({*self.own.intersection(state), *(each.path for each in left if self.has(each))}):
            raise AutotpError(
                f"the model's {', '.join(taken)} cannot keep that name: a torch.fx.GraphModule, which the distributed "
                "module is, has something else of the name. Rename it, or put the model inside another module"
            )


_UNEXPORTED = "a distributed module cannot be exported or traced: its graph is one rank's. Export the model itself"


class Unscripted:
    """A module that ``torch.jit`` cannot script."""

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuses: ``torch.jit`` asks for it.

        Raises:
            AutotpError: always.
        """
        raise AutotpError(_UNEXPORTED)


class Untraced(Unscripted, fx.GraphModule):
    """A graph module whose calls run its ``_run``, hooks and all, and which nothing exports, traces or compiles."""

    _told = False

    def recompile(self) -> PythonCode:
        """The graph as Python, for reading."""
        code = super().recompile()
        own: Any = type(self)
        own.forward = _forward
        return code

    @property
    def graph(self) -> fx.Graph:
        """The graph; ``torch.export`` would run it as it is.

        Raises:
            AutotpError: while something is exported.
        """
        if _exporting():
            raise AutotpError(_UNEXPORTED)
        return self._graph

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        fx.GraphModule.graph.fset(self, graph)  # type: ignore[attr-defined]

    def compile(self, *_: Any, **__: Any) -> None:
        """Does nothing, and warns, as a call within ``torch.compile`` does."""
        _tell(self)

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """The modules that stand for the model's; those that the graph has besides are not among them."""
        return ((name, each) for name, each in super().named_modules(*args, **options) if not self._besides(each))

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """As ``named_modules``, of the module's own."""
        return ((name, each) for name, each in super().named_children() if not self._besides(each))

    def _besides(self, module: nn.Module) -> bool:
        return any(module is self._modules.get(name) for name in (WORLD, CONSTANTS))

    def _apply(self, *args: Any, **options: Any) -> Any:
        for module in map(self._modules.get, (WORLD, CONSTANTS)):
            if module is not None:
                module._apply(*args, **options)
        return super()._apply(*args, **options)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(args, fx.Proxy):  # torch.fx gives the root of what it traces one for all
        raise AutotpError(_UNEXPORTED)
    if torch.compiler.is_compiling():
        _tell(self)
    return called(self, *args, **kwargs)


# What runs is compiled already; torch.compile would look into how it is made.
@partial(torch.compiler.disable, reason=_UNEXPORTED)
def called(module: Any, *args: Any, **kwargs: Any) -> Any:
    """What a module's ``_run`` gives.

    Raises:
        AutotpError: the call is exported or traced.
    """
    symbolic = any(isinstance(each, fx.Proxy) for each in (*args, *kwargs.values()))
    if symbolic or _exporting() or torch.jit.is_tracing():
        raise AutotpError(_UNEXPORTED)
    return module._run(*args, **kwargs)


def _exporting() -> bool:
    """Whether this thread exports something; what another one captures is waited for."""
    if not torch.compiler.is_exporting():
        return False
    with TRACING:
        return torch.compiler.is_exporting()


@partial(torch.compiler.disable, reason=_UNEXPORTED)
def _tell(module: Any) -> None:
    if not (module._told or torch.compiler.is_exporting()):
        module._told = True
        _log.warning("torch.compile changes nothing of a distributed module: give autotp.parallelize compile=True")


def hierarchy(root: nn.Module, model: nn.Module, taken: Set[str]) -> list[Any]:
    """What stands for the model's modules, in the order of ``model.modules()``, under their names in ``root``.

    Args:
        root: empty.
        model: it.
        taken: names that ``root`` needs for something else.
    """
    made: dict[int, nn.Module] = {id(model): root}
    for path, module in model.named_modules(remove_duplicate=False):
        if not path:
            continue
        parent, _, name = path.rpartition(".")
        stands = made.setdefault(id(module), Submodule.like(path, module))
        # A module without state needs no name of its own, where a graph module has another use for that.
        if parent or name not in taken or any(True for _ in (*module.parameters(), *module.buffers())):
            root.get_submodule(parent)._modules[name] = stands
    return list(made.values())


def index_as(module: nn.Module, kind: type) -> None:
    """Lets a module be indexed, iterated and measured as the model, if that is one of torch's containers itself.

    Args:
        module: the only instance of its class.
        kind: the model's class.
    """

    def asked(container: Any, name: str) -> Callable[..., Any]:
        def answer(own: nn.Module, *args: Any) -> Any:
            children = OrderedDict((n, child) for n, child in own._modules.items() if n not in (WORLD, CONSTANTS))
            return getattr(container(children.values() if container is nn.ModuleList else children), name)(*args)

        return answer

    for container in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
        for name in ("__len__", "__iter__", "__getitem__", "__contains__"):
            if issubclass(kind, container) and hasattr(container, name):
                setattr(type(module), name, asked(container, name))


def attach(root: nn.Module, path: str, value: Tensor, persistent: bool = True) -> None:
    """Gives a module of the hierarchy a parameter or buffer, by its name in the model."""
    parent, _, name = path.rpartition(".")
    module = root.get_submodule(parent)
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    else:
        module.register_buffer(name, value, persistent)


def find(root: nn.Module, path: str) -> Tensor:
    """A parameter or buffer, by its name in the model."""
    parent, _, name = path.rpartition(".")
    return getattr(root.get_submodule(parent), name)


def carrying(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter in another's place, with what scripts attach to one, such as a mark for the optimizer."""
    made = nn.Parameter(data, parameter.requires_grad)
    for name, value in vars(parameter).items():
        if not hasattr(made, name):
            setattr(made, name, value)
    return made


def bound(rewritten: Rewritten) -> fx.Graph:
    """The sharded graph with its state read from the module: only the user's inputs stay placeholders."""
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
