"""The module that ``parallelize`` returns: a ``torch.fx.GraphModule`` with the model's own call signature."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.data import Dataset, DistributedSampler

from autotp.errors import AutotpError
from autotp.plans.plan import Plan
from autotp.runtime.agreement import JobAgreement
from autotp.runtime.anatomy import (
    CONSTANTS,
    WORLD,
    Taken,
    UntracedGraph,
    attach,
    bound,
    carrying,
    find,
    hierarchy,
    index_as,
)
from autotp.runtime.compiled import Overlap
from autotp.runtime.programs import (
    MOST,
    Joined,
    Program,
    Programmed,
    Programs,
    blueprint,
    named_state,
    own_inputs,
    own_rows,
    show,
)
from autotp.runtime.recording import Event, recorded
from autotp.runtime.rewrite import Rewritten
from autotp.runtime.state import distribute, held_part, local_part, local_parts, of_rank_0, require_parts
from autotp.runtime.submodule import Sealed, Submodule
from costmodel.errors import require
from passes.capture import matching
from passes.layouts.layout import Layout, describe, is_shard, place, take
from passes.torch_internals import local_tensor, tree_leaves, tree_map
from passes.world.process import ProcessWorld
from passes.world.seeds import ways_to_draw

__all__ = ["DistributedModule"]

#: Attributes of a `DistributedModule` besides the model's state and the attributes of its class.
_OWN = ("_graph", "_moded", "_owners", "_programs", "meta", "plan")


class DistributedModule(Programmed, Sealed, UntracedGraph):
    """This device's part of a model.

    Parameters are ``DTensor``s under the model's own names, so optimizers, ``clip_grad_norm_``, full state dicts and
    ``torch.distributed.checkpoint`` work unchanged. A call takes the model's arguments (by default the global batch on
    every device, as tensors or ``DTensor``s) and returns the model's output structure; gradients are reduced. A call in
    another mode, without gradients, or with other inputs than the example runs a program of its own (see ``programs``)
    with the same parameters. ``plan`` and the sharded graph are those of the first program; with overlap, calls run the
    scheduled forward and backward graphs made from the sharded graph.
    """

    plan: Plan

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        rewritten: Rewritten,
        mesh: DeviceMesh,
        how: Callable[[Plan], Overlap | None],
        initialise: Callable[[nn.Module], None] | None = None,
        seed: int = 0,
        *,
        dropout: str = "sharded",
        most: int = MOST,
        broadcast: bool = True,
        debug: bool = False,
        inputs: str = "global",
        agreement: JobAgreement | None = None,
    ) -> None:
        captured = rewritten.captured
        root = nn.Module()
        agreement = agreement or JobAgreement()
        world = ProcessWorld(mesh, whereabouts=agreement.whereabouts)
        world.seeds = ways_to_draw(dropout, torch.device(mesh.device_type))
        layouts = rewritten.placed | dict.fromkeys(captured.unused, rewritten.whole)
        learned = dict(model.named_parameters(remove_duplicate=False))
        persistent = set(model.state_dict(keep_vars=True))
        modules = hierarchy(root, model, _TAKEN.own)
        device = torch.device(mesh.device_type)
        for fqn, tensor in of_rank_0(model, initialise, seed, device, captured.aliases, broadcast=broadcast):
            if fqn in learned:
                attach(root, fqn, carrying(learned[fqn], distribute(tensor, layouts[fqn], mesh)))
            else:
                whole = not any(map(is_shard, layouts.get(fqn, ())))
                held = tensor.detach().to(mesh.device_type, copy=True) if whole else distribute(tensor, layouts[fqn], mesh)
                attach(root, fqn, held, fqn in persistent)
        for alias, fqn in captured.aliases.items():
            attach(root, alias, find(root, fqn))
        programs = Programs(
            blueprint(model),
            plan,
            rewritten,
            world,
            agreement,
            how,
            training=[each.training for each in model.modules()],
            most=most,
            device=device,
            layouts=layouts,
            debug=debug,
            inputs=inputs,
        )
        if programs.first.constants:
            root.add_module(CONSTANTS, nn.Module())
        for name, constant in programs.first.constants.items():
            root.get_submodule(CONSTANTS).register_buffer(name, constant, False)
        root.add_module(WORLD, world)
        _TAKEN.require_free(captured.left, {*root._modules, *root._parameters, *root._buffers})
        super().__init__(root, bound(rewritten), class_name="DistributedModule")
        self._modules = root._modules | {n: each for n, each in self._modules.items() if n not in root._modules}
        self._parameters |= root._parameters
        for name, buffer in root.named_buffers(recurse=False, remove_duplicate=False):
            self.register_buffer(name, buffer, name not in root._non_persistent_buffers_set)
        self.plan = plan
        self.training = model.training
        self._programs = programs
        self._moded = [self, *modules[1:]]
        # Cached, as finding each by its path at every step would take longer than all that is done with them.
        self._owners = {name: self._owner(name) for name in named_state(self)}
        self._stand_for(model)
        index_as(self, self._kind)
        self._changed = programs.changed
        self._seal()
        observed = {id(module) for module in matching(model, plan.observe).values()}
        for module, each in zip(list(model.modules())[1:], modules[1:], strict=True):
            each._observed, each._changed = id(module) in observed, programs.changed
            each._seal()

    @property
    def batch_rank(self) -> int:
        """The index of this rank's part of the batch, among the plan's ``batch_ways`` parts, for ``inputs='local'``."""
        world: Any = self.get_submodule(WORLD)
        (at,), found = world.hosted, 0
        for axis in map(self.plan.mesh_axes.index, self.plan.batch_axes):
            found = found * self.plan.mesh_shape[axis] + at[axis]
        return found

    def sampler(self, dataset: Dataset[Any], **options: Any) -> DistributedSampler[Any]:
        """A sampler for ``DataLoader`` that gives this rank its part of every batch, for ``inputs='local'``.

        Args:
            dataset: a dataset with a length.
            options: ``shuffle``, ``seed`` and ``drop_last`` of ``torch.utils.data.DistributedSampler``.
        """
        require(dataset, Sized, "the dataset", "one with a length")
        return DistributedSampler(dataset, self.plan.batch_ways, self.batch_rank, **options)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one forward pass, with the model's own arguments and output structure."""
        programs, given = self._programs, tree_leaves((args, kwargs))
        key, inputs = programs.key(self._moded, args, kwargs)
        plain = [not isinstance(each, DTensor) for each in inputs]
        if not all(plain):
            args, kwargs = tree_map(self._given, (args, kwargs))
            key, inputs = programs.key(self._moded, args, kwargs)
        own: Sequence[bool] = ()
        if programs.ways > 1 and torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
            own = [part and each for part, each in zip(programs.parts(key), plain, strict=True)]
        if (whole := programs.joined(key, args, kwargs, inputs)) is not None:
            key, args, kwargs, inputs = whole.key, whole.args, whole.kwargs, whole.inputs
        held = ((name, owner._parameters.get(own)) for name, (owner, own) in self._owners.items())
        frozen = [name for name, each in held if each is not None and not each.requires_grad] if key.gradients else ()
        program = programs.of(key, args, kwargs, inputs, tuple(frozen))
        captured, parameters = program.captured, self._own_parameters(program)
        _TAKEN.require_free(captured.left)
        for other in programs.waiting:
            other.accumulation.check(self._own_parameters(other))
        written = program.written(inputs, self._stateful, given)
        if own:
            inputs = own_inputs(inputs, own, programs.ways)
        with programs.agreement.whereabouts.passing():
            results, scheduled = program.run(
                lambda scheduled: self._values(program, parameters, inputs, scheduled=scheduled),
                parameters,
                syncing=programs.syncing,
            )
            with torch.no_grad():
                for target, value in zip(written, results[captured.returned :], strict=True):
                    target.copy_(value)
            outputs = [self._returned(program, i, each, whole) for i, each in enumerate(results[: captured.returned])]
            outputs = program.relations.between(outputs, captured.said, scheduled=scheduled)
            programs.watch(outputs, lambda other: self._parts(other, self._own_parameters(other)))
            if programs.monitor is not None:
                values = functools.partial(self._values, program, parameters, inputs, scheduled=scheduled)
                programs.monitor.check(program, values, results, functools.partial(self._gradients, program))
            show(captured.observed, self._moded, outputs)
            for each in captured.changed:  # remove what another program has left there
                if not _TAKEN.has(each):
                    vars(self._moded[each.index]).pop(each.name, None)
            return captured.answer(self._moded, outputs)

    def _given(self, leaf: Any) -> Any:
        """Converts an argument that is a ``DTensor`` to the plain tensor that this rank would pass in its place."""
        if not isinstance(leaf, DTensor):
            return leaf
        world: Any = self.get_submodule(WORLD)
        split = self._programs.split if leaf.dim() else ()
        layout = tuple(place(0) if axis in split else Replicate() for axis in range(len(world.mesh_shape)))
        if leaf.device_mesh == world.device_mesh:
            return leaf.redistribute(placements=layout).to_local()
        return take(leaf.full_tensor(), layout, world.mesh_shape, world.hosted[0])

    def _returned(self, program: Program, number: int, value: Any, joined: Joined | None) -> Any:
        """Converts an output of the graph to what the caller gets: this rank's rows, a ``DTensor`` or the value itself."""
        if number in program.rewritten.sharding.rows:
            return own_rows(value, self._programs.ways, joined, self._programs.world, self._programs.split)
        layout = program.rewritten.returned(number)
        if layout is None:
            return value
        leaves: Any = program.captured.graph_module.graph.output_node().args[0]
        whole, world = leaves[number].meta["val"], self.get_submodule(WORLD)
        mesh: Any = world.device_mesh
        return DTensor.from_local(value, mesh, layout, run_check=False, shape=whole.shape, stride=whole.stride())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Like ``nn.Module.load_state_dict``, for the ``state_dict()`` of this or another distributed module.

        Raises:
            AutotpError: it has plain tensors for parameters that are ``DTensor``s, or ``DTensor``s on another mesh.
        """
        if isinstance(state_dict, Mapping):
            require_parts(self, state_dict, "", {"assign_to_params_buffers": assign})
        return super().load_state_dict(state_dict, strict, assign)

    def __str__(self) -> str:
        """The module hierarchy, shown like the model's; ``code`` and ``print_readable()`` show the sharded graph."""
        return nn.Module.__repr__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModule:
        """Copies the module, with its parameters and buffers; plans, process groups and schedules are shared."""
        made: Any = DistributedModule.__new__(DistributedModule)
        memo[id(self._programs)] = self._programs.anew()
        shared = (self.get_submodule(WORLD), self.plan, self._changed)
        memo |= {id(each): each for each in shared} | {id(self): made}
        for parameter in self.parameters():  # without its gradient, as torch copies a parameter
            memo[id(parameter)] = carrying(parameter, parameter.detach().clone())
        made.__dict__ |= {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        made.recompile()
        index_as(made, made._kind)
        return made

    def _own_parameters(self, program: Program) -> dict[str, Any]:
        """Placeholder of a program's graph -> its parameter; checks that each is a ``DTensor`` in the plan's layout."""
        found: dict[str, Any] = {}
        for name, fqn in program.captured.parameters.items():
            owner, own = self._owners[fqn]
            parameter, layout = owner._parameters.get(own), self._programs.layouts[fqn]
            found[name] = parameter
            if not isinstance(parameter, DTensor) or parameter.placements != layout:
                raise AutotpError(_foreign(fqn, parameter, layout, self.plan))
        return found

    def _owner(self, path: str) -> tuple[nn.Module, str]:
        """The module that holds a parameter or buffer, and its name there."""
        parent, _, name = path.rpartition(".")
        return self.get_submodule(parent), name

    def _stateful(self, path: str) -> Tensor:
        """Returns a parameter or buffer, by its path."""
        owner, own = self._owners[path]
        found: Any = owner._parameters.get(own) if own in owner._parameters else owner._buffers[own]
        return found

    @contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """Records when each node of the scheduled graphs runs on this rank; see `autotp.analysis.trace`.

        Raises:
            AutotpError: no graph has been scheduled yet, or none can be.
        """
        made = [(each.schedules.known, key) for each in self.programs if each.schedules for key in each.schedules.known]
        before = [(known, key, known[key]) for known, key in made if known[key] is not None]
        if not before:
            raise AutotpError("there is no schedule to record: run a step first, with schedule='overlap'")
        events: list[Event] = []
        with ExitStack() as stack:
            for known, key, each in before:
                known[key] = stack.enter_context(recorded(each, events))  # type: ignore[arg-type]
            try:
                yield events
            finally:
                for known, key, each in before:
                    known[key] = each

    def _parts(self, program: Program, parameters: Mapping[str, Any], *, disjoint: bool = False) -> dict[str, Tensor]:
        """Placeholder -> this device's part of the parameter; gradients of parts flow to the parameters."""
        values: dict[str, Tensor] = {name: local_tensor(parameter) for name, parameter in parameters.items()}
        if not torch.is_grad_enabled():
            return values
        names = {name: program.captured.parameters[name] for name, each in parameters.items() if each.requires_grad}
        if not disjoint:  # one by one, so that each detects whether its gradient is shared
            return values | {name: local_part(parameters[name], fqn) for name, fqn in names.items()}
        return values | dict(zip(names, local_parts([*names.values()], [parameters[name] for name in names]), strict=True))

    def _gradients(self, program: Program) -> dict[str, tuple[Tensor, Layout]]:
        """Parameter name -> this device's part of its gradient, and the gradient's layout."""
        named = {program.captured.parameters[name]: each for name, each in self._own_parameters(program).items()}
        found = {name: each.grad for name, each in named.items() if each.grad is not None}
        return {name: (local_tensor(grad), grad.placements) for name, grad in found.items()}

    def _values(
        self, program: Program, parameters: Mapping[str, Any], inputs: Sequence[Any], *, scheduled: bool
    ) -> dict[str, Tensor]:
        """Placeholder of the sharded graph -> this device's part of its value."""
        captured, values = program.captured, self._parts(program, parameters, disjoint=scheduled)
        for name, fqn in captured.buffers.items():
            values[name] = held_part(self._stateful(fqn))
        # Schedules are made for strides too, and all ranks must need a new one in the same call.
        given = [value.contiguous() for value in inputs] if scheduled else inputs
        values |= program.constants | dict(zip(captured.inputs, given, strict=True))
        # The old values of what the step updates may be saved for the backward pass.
        return values | {name: values[name].clone() for name in captured.mutations}


def _foreign(name: str, parameter: Any, layout: Layout, plan: Plan) -> str:
    """The error message for a parameter that does not rest as the plan says."""
    if parameter is None:
        return f"parameter {name} is gone, as pruning takes one away: do that to the model, before it is distributed"
    found = describe(parameter.placements, plan.mesh_axes) if isinstance(parameter, DTensor) else "a plain tensor"
    return (
        f"parameter {name} rests as {describe(layout, plan.mesh_axes)} by the plan, and is now {found}: it was put in the "
        "place of the module's own, as load_state_dict(assign=True) does. Load without assign=True, or by "
        "torch.distributed.checkpoint.state_dict.set_model_state_dict"
    )


_TAKEN = Taken.by(DistributedModule, Submodule, _OWN)
