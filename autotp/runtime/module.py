"""The module that training code holds: a ``torch.fx.GraphModule`` with the model's own call signature."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx.graph import PythonCode

from autotp.errors import AutotpError
from autotp.plans.plan import Plan
from autotp.runtime.accumulation import Accumulating, Accumulation
from autotp.runtime.compiled import Overlap
from autotp.runtime.modes import OneMode, different_otherwise, plain_attributes, training_only
from autotp.runtime.output_guard import guard, made_of
from autotp.runtime.recording import Event, recorded
from autotp.runtime.rewrite import Rewritten
from autotp.runtime.schedules import JobAgreement, Schedules
from autotp.runtime.state import distribute, local_part, local_parts, state_of
from autotp.runtime.submodule import Submodule
from passes.layouts.layout import Layout, describe
from passes.sharding.shard import place_constants, used_groups
from passes.world.process import ProcessWorld
from passes.world.regather import Regather

__all__ = ["DistributedModule"]

_WORLD = "autotp_world"
#: What a `DistributedModule` has besides the model's state and its class's attributes.
_OWN = (
    *(
        "_accumulation",
        "_captured",
        "_different",
        "_graph",
        "_made_apart",
        "_made_of",
        "_overlapping",
        "_owners",
        "_resting",
    ),
    *("_sharded", "_signature", "meta", "plan"),
)


class DistributedModule(Accumulating, OneMode, fx.GraphModule):
    """This device's part of a model.

    Parameters are ``DTensor`` under the model's own names, so optimizers, ``clip_grad_norm_`` and whole state dicts work as
    they are; ``torch.distributed.checkpoint`` cannot hold the parameters whose dims are split block by block. Calling it
    takes the model's arguments (the global batch, on every device) and returns the model's output structure; gradients
    arrive reduced. ``plan`` is the plan that it runs. Its graph is the sharded graph; with overlap, what a call runs is
    that graph's scheduled forward and backward graphs.
    """

    plan: Plan

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        rewritten: Rewritten,
        mesh: DeviceMesh,
        initialise: Callable[[nn.Module], None] | None = None,
        seed: int = 0,
        how: Overlap | None = None,
    ) -> None:
        captured, sharding = rewritten.captured, rewritten.sharding
        root = nn.Module()
        world = ProcessWorld(mesh, used_groups(rewritten.graph_module))
        world.seeds.start(seed)
        root.add_module(_WORLD, world)
        layouts = {fqn: sharding.resting[name] for name, fqn in captured.parameters.items()}
        for fqn in captured.unused:
            layouts[fqn] = rewritten.whole
        learned = dict(model.named_parameters(remove_duplicate=False))
        persistent = set(model.state_dict(keep_vars=True))
        modules, training = dict(model.named_modules(remove_duplicate=False)), training_only(captured)
        attach = functools.partial(_attach, root, lambda path: Submodule.like(path, modules.get(path), training))
        for fqn, tensor in state_of(model, initialise, seed):
            if captured.aliases.get(fqn, fqn) != fqn:
                continue
            if fqn in layouts:
                attach(fqn, _carrying(learned[fqn], distribute(tensor, layouts[fqn], mesh)))
            else:
                attach(fqn, tensor.detach().to(mesh.device_type, copy=True), fqn in persistent)
        for alias, fqn in captured.aliases.items():
            attach(alias, _find(root, fqn))
        for name, constant in captured.constants.items():
            attach(f"autotp_constants.{name}", constant.to(mesh.device_type), False)
        graph = _bound(rewritten)
        for each in (graph, rewritten.graph_module.graph):
            place_constants(each, torch.device(mesh.device_type))
        _require_free_names(root)
        super().__init__(root, graph, class_name="DistributedModule")
        for name, child in root.named_children():
            self.add_module(name, child)
        for name, parameter in root.named_parameters(recurse=False, remove_duplicate=False):
            self.register_parameter(name, parameter)
        for name, buffer in root.named_buffers(recurse=False, remove_duplicate=False):
            self.register_buffer(name, buffer, name not in root._non_persistent_buffers_set)
        self.plan = plan
        self.training = model.training
        self._different = different_otherwise("", model, training)
        self._captured = captured
        self._signature = rewritten.signature
        # Finding each by its path at every step would take longer than all that is done with them.
        self._owners = {name: self._owner(fqn) for name, fqn in {**captured.parameters, **captured.buffers}.items()}
        self._made_of = made_of(captured.graph_module.graph, captured.outputs)
        # As it is, the sharded graph hands on what comes to an output that needs no gathering.
        through = made_of(rewritten.graph_module.graph, captured.outputs)
        self._made_apart = {i: others - through.get(i, frozenset()) for i, others in self._made_of.items()}
        self._resting = {name: layouts[fqn] for name, fqn in captured.parameters.items()}
        self._plain = plain_attributes(model)
        self._accumulation = Accumulation(rewritten.graph_module, captured.parameters, world)
        self._overlapping = None if how is None else Schedules(rewritten.graph_module, world, how, JobAgreement())

    def recompile(self) -> PythonCode:
        """The sharded graph as Python; what the module does when it is called, hooks and all, is ``_run``."""
        code = super().recompile()
        own: Any = type(self)
        # What runs is compiled already; torch.compile would look into how it is made.
        own._sharded, own.forward = own.forward, torch.compiler.disable(DistributedModule._run)
        return code

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """One forward pass of the model, with the model's own arguments and output structure."""
        captured = self._captured
        inputs = self._signature.flatten(args, kwargs)
        parameters = self._own_parameters()
        accumulation, world, results = self._accumulation, self.get_submodule(_WORLD), None
        values = self._values(parameters, inputs) if self._overlapping is not None or accumulation.defers else {}
        if self._overlapping is not None:
            results = accumulation.scheduled(self._overlapping, values, parameters)
        scheduled = results is not None
        if results is None:
            with Regather(world) if torch.is_grad_enabled() else nullcontext():  # type: ignore[arg-type]
                results = accumulation.inner(values, parameters) if accumulation.defers else self._sharded(*inputs)  # type: ignore[operator]
        with torch.no_grad():
            for name, value in zip(captured.mutations, results[captured.outputs :], strict=True):
                self.get_buffer(captured.buffers[name]).copy_(value)
        outputs = list(results[: captured.outputs])
        guard(outputs, self._made_of if scheduled else self._made_apart)
        if accumulation.used and accumulation.syncing:
            accumulation.watch(outputs, functools.partial(self._parts, parameters))
        return captured.signature.unflatten(outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModule:
        """A module of the same plan with parameters and buffers of its own; it shares the groups and the schedules."""
        made: Any = DistributedModule.__new__(DistributedModule)
        memo[id(self._accumulation)] = self._accumulation.anew()
        shared = (self.get_submodule(_WORLD), self._captured, self._signature, self._overlapping, self.plan)
        memo |= {id(each): each for each in shared} | {id(self): made}
        for parameter in self.parameters():  # without its gradient, as torch copies a parameter
            memo[id(parameter)] = _carrying(parameter, parameter.detach().clone())
        made.__dict__ |= {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        made.recompile()
        return made

    def __copy__(self) -> DistributedModule:
        """A module of the same parameters and buffers, as copying any module gives."""
        made: Any = object.__new__(type(self))
        made.__dict__ |= self.__dict__
        return made

    def __reduce__(self) -> Any:
        """Refuses.

        Raises:
            AutotpError: always; process groups end with the job.
        """
        raise AutotpError(
            "a distributed module belongs to a running job and cannot be pickled: save its state_dict() with "
            "torch.distributed.checkpoint, and its plan with plan.save(), and distribute the model again"
        )

    def _own_parameters(self) -> dict[str, Any]:
        """The parameters of the sharded graph's placeholders, which rest as the plan says."""
        found: dict[str, Any] = {}
        for name, layout in self._resting.items():
            owner, own = self._owners[name]
            parameter = found[name] = owner._parameters.get(own)
            if not isinstance(parameter, DTensor) or parameter._spec.placements != layout:
                raise AutotpError(_foreign(self._captured.parameters[name], parameter, layout, self.plan))
        return found

    def _owner(self, path: str) -> tuple[nn.Module, str]:
        """The module that holds a parameter or buffer, and its name there."""
        parent, _, name = path.rpartition(".")
        return self.get_submodule(parent), name

    @contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """Notes when every node of the scheduled graphs runs on this rank; see `autotp.analysis.trace`.

        Raises:
            AutotpError: nothing was scheduled yet, or nothing can be.
        """
        found = self._overlapping.known if self._overlapping is not None else {}
        if not any(found.values()):
            raise AutotpError("there is no schedule to record: run a step first, with schedule='overlap'")
        before = dict(found)
        events: list[Event] = []
        with ExitStack() as stack:
            for key, each in before.items():
                if each is not None:
                    found[key] = stack.enter_context(recorded(each, events))
            try:
                yield events
            finally:
                found.update(before)

    def _parts(self, parameters: Mapping[str, Any], disjoint: bool = False) -> dict[str, Tensor]:
        """This device's parts of the parameters; their gradients become the parameters'."""
        values: dict[str, Tensor] = {name: parameter._local_tensor for name, parameter in parameters.items()}
        trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        if trained and torch.is_grad_enabled():
            names = tuple(self._captured.parameters[name] for name in trained)
            parts = local_parts(names, [parameters[name] for name in trained], disjoint=disjoint)
            values |= dict(zip(trained, parts, strict=True))
        return values

    def _values(self, parameters: Mapping[str, Any], inputs: Sequence[Any]) -> dict[str, Tensor]:
        """This device's part of what each placeholder of the sharded graph stands for."""
        captured, values = self._captured, self._parts(parameters, disjoint=True)
        # What the step updates may be saved for the backward pass as it was.
        for name in captured.buffers:
            owner, own = self._owners[name]
            buffer: Any = owner._buffers[own]
            values[name] = buffer.clone() if name in captured.mutations else buffer
        values |= {name: self.get_buffer(f"autotp_constants.{name}") for name in captured.constants}
        # Graphs are made for strides too, and all ranks must agree about when a new one is needed.
        given = (value.contiguous() if isinstance(value, Tensor) else value for value in inputs)
        return values | dict(zip(captured.inputs, given, strict=True))


def _foreign(name: str, parameter: Any, layout: Layout, plan: Plan) -> str:
    """Why a parameter is not one of the plan's."""
    if parameter is None:
        return (
            f"parameter {name} is gone: something took it away from its module, as parametrisations and pruning do. Do it "
            "to the model, before it is distributed"
        )
    found = describe(parameter._spec.placements, plan.mesh_axes) if isinstance(parameter, DTensor) else "a plain tensor"
    return (
        f"parameter {name} rests as {describe(layout, plan.mesh_axes)} by the plan, and is now {found}: it was put in the "
        "place of the module's own, as load_state_dict(assign=True) does. Load without assign=True, or by "
        "torch.distributed.checkpoint.state_dict.set_model_state_dict"
    )


def _carrying(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter in another's place, with what scripts attach to one, such as a mark for the optimizer."""
    made = nn.Parameter(data, parameter.requires_grad)
    for name, value in vars(parameter).items():
        if not hasattr(made, name):
            setattr(made, name, value)
    return made


def _bound(rewritten: Rewritten) -> fx.Graph:
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
        elif node.op == "placeholder":
            values[node] = graph.get_attr(f"autotp_constants.{node.target}")
        elif node.op == "get_attr":
            values[node] = graph.get_attr(_WORLD)
        else:
            values[node] = graph.node_copy(node, lambda n: values[n])
    return graph


def _attach(root: nn.Module, make: Callable[[str], nn.Module], path: str, value: Tensor, persistent: bool = True) -> None:
    *parents, name = path.split(".")
    module = root
    for depth, parent in enumerate(parents, start=1):
        if parent not in module._modules:
            module.add_module(parent, make(".".join(parents[:depth])))
        module = module.get_submodule(parent)
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    else:
        module.register_buffer(name, value, persistent)


def _require_free_names(root: nn.Module) -> None:
    """Refuses state whose name a graph module needs itself."""
    names = {*root._modules, *root._parameters, *root._buffers}
    needed = (set(dir(DistributedModule)) - set(dir(nn.Module))) | set(_OWN)
    if taken := sorted(names & needed):
        raise AutotpError(
            f"the model's {', '.join(taken)} cannot keep that name: a torch.fx.GraphModule, which the distributed module "
            "is, has something else of the name. Rename it, or put the model inside another module"
        )


def _find(root: nn.Module, path: str) -> Tensor:
    parent, _, name = path.rpartition(".")
    return getattr(root.get_submodule(parent), name)
