"""Runs all ranks of a plan in lockstep in one process: the numerical results of a distributed run, without its devices."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from autotp.errors import AutotpError
from autotp.plans.options import require_plan
from autotp.plans.plan import Plan, overlapping
from autotp.runtime.agreement import Agreement
from autotp.runtime.anatomy import Untraced, find, index_as
from autotp.runtime.compiled import Compiled, Overlap
from autotp.runtime.durations import how_to_run
from autotp.runtime.programs import MOST, Program, Programmed, Programs, blueprint, named_state, show, unobserved
from autotp.runtime.rewrite import Rewritten, rewrite
from costmodel.errors import shown
from passes.capture import Precision, buffered, foreign_hooks, matching, placed
from passes.graph import differentiable
from passes.layouts.layout import Layout, is_shard, take
from passes.tensors import require_memory
from passes.torch_internals import own_attributes, tree_leaves, versions_preserved
from passes.world.ops import Parts
from passes.world.seeds import ways_to_draw
from passes.world.world import LocalWorld, World

__all__ = ["Simulated", "assemble", "collect", "distribute", "simulate"]


def simulate(
    model: nn.Module,
    plan: Plan,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    world: World | None = None,
    schedule: str = "none",
    precision: Precision = None,
    dropout: str = "sharded",
) -> Simulated:
    """Makes a module that runs ``plan`` for all of its devices in this process, forward and backward.

    Args:
        model: the model that was planned; its parameters become the simulated module's, whole and under their own names.
        plan: the plan to run.
        args, kwargs: example inputs, as given to ``autotp.plan``.
        schedule: ``none`` runs the sharded graph as autograd does, ``overlap`` the scheduled forward and backward graphs.
            Operators run one by one, even if the plan is to run compiled.
        precision: the plan's own precision, or left out.
        dropout: see `autotp.parallelize`.
        world: the world to use in place of ``LocalWorld``, e.g. one that counts the bytes that collectives move.

    Returns:
        A module with the model's call signature and whole parameters, so that gradients and optimizer steps can be compared
        with the model's directly.

    Raises:
        PlanMismatchError: when the plan was made for another model, other inputs or another precision.
        AutotpError: the plan is for too many devices; or, in the backward pass, replicas of a gradient differ.
    """
    require_plan(plan)
    plan.asked(precision)
    overlapping(schedule)
    how = functools.partial(how_to_run, schedule=schedule)
    if world is not None and not isinstance(world, World):
        raise AutotpError(f"world is {shown(world)}: give a World, or leave it out")
    world = world or LocalWorld(plan.mesh_shape)
    rewritten = rewrite(model, plan, args, kwargs)
    world.seeds = ways_to_draw(dropout, _device_of(model))
    return Simulated(model, plan, rewritten, world, how)


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


class Simulated(Untraced, Programmed):
    """A model whose forward and backward passes run as the devices of a plan would run them.

    Attributes:
        rewritten: the sharded graph of the first plan, and what it was made from.
        world: hosts every device.
    """

    rewritten: Rewritten
    world: World
    _since: int  # torch's id of the first hook registered after it was made
    _data: Sequence[tuple[nn.Module, Mapping[str, Any]]]  # the model's modules, with their `_plain` attributes

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        rewritten: Rewritten,
        world: World,
        how: Callable[[Plan], Overlap | None],
        most: int = MOST,
    ) -> None:
        super().__init__()
        # The model's own tables, not copies: names, state dict and later changes of the model are the same here.
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = model.__dict__[table]
        self.training = model.training
        index_as(self, type(model))
        attributes = rewritten.captured.attributes
        self.__dict__ |= {path: find(model, path) for path in attributes if "." not in path}
        with buffered(model, attributes):
            plain = blueprint(model)
        programs = Programs(
            plain,
            plan,
            rewritten,
            world,
            Agreement(),
            how,
            training=[each.training for each in model.modules()],
            most=most,
            device=_device_of(model),
            layouts=rewritten.placed,
            even=True,
        )
        self.__dict__ |= {"rewritten": rewritten, "world": world, "_programs": programs}
        self.__dict__["_moded"] = [self, *list(model.modules())[1:]]
        followed = (*rewritten.captured.left, *rewritten.captured.changed, *placed(model, attributes))
        free = {(each.index, each.name) for each in followed}
        self.__dict__["_data"] = [
            (each, {name: value for name, value in _plain(each).items() if (index, name) not in free})
            for index, each in enumerate(model.modules())
        ]
        # The modules are the model's own, and so are the hooks that were registered on them before.
        self.__dict__["_since"] = RemovableHandle.next_id

    def __deepcopy__(self, memo: dict[int, Any]) -> Simulated:
        """Copies the module, with its parameters and buffers; the sharded graph and the world are shared."""
        made: Any = object.__new__(type(self))
        memo |= {id(self._programs): self._programs.anew(), id(self): made}
        memo |= {id(each): each for each in (self.rewritten, self.world)}
        made.__dict__ |= {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        return made

    @property
    def _compiled(self) -> Mapping[Hashable, Compiled | None]:
        """The scheduled graphs that all programs have made so far."""
        known = [program.schedules.known for program in self.programs if program.schedules is not None]
        return {key: compiled for each in known for key, compiled in each.items()}

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._require_observed()
        self._require_unchanged()
        key, inputs = self._programs.key(self._moded, args, kwargs)
        program = self._programs.of(key, args, kwargs, inputs)
        captured, state = program.captured, named_state(self)
        state |= {path: find(self, path) for path in self.rewritten.captured.attributes}
        require_memory(state)
        names = {**captured.parameters, **captured.buffers}
        if absent := [fqn for fqn in names.values() if fqn not in state]:
            raise AutotpError(f"the model has no {absent[0]} any more: plan the model as it is, and simulate that")
        whole = {name: state[fqn] for name, fqn in names.items()}
        whole |= program.constants | dict(zip(captured.inputs, inputs, strict=True))
        resting = program.rewritten.resting
        written = program.written(inputs, state.__getitem__, tree_leaves((args, kwargs)))
        before = {name: whole[name].clone() for name in captured.mutations}  # may be saved for the backward pass
        parts = {name: distribute(name, tensor, resting(name), self.world) for name, tensor in (whole | before).items()}
        for other in self._programs.waiting:
            other.accumulation.check({name: state[fqn] for name, fqn in other.captured.parameters.items()})
        parameters = {name: whole[name] for name in captured.parameters}
        outputs, _ = program.run(lambda _: parts, parameters, syncing=self._programs.syncing)
        own = tuple(target for name, target in zip(captured.mutations, written, strict=True) if name in captured.parameters)
        # Version counters of parameters must count the changes by optimizer steps only.
        with torch.no_grad(), versions_preserved(own):
            for name, target, new in zip(captured.mutations, written, outputs[captured.returned :], strict=True):
                target.copy_(assemble([p.detach() for p in new], target.shape, resting(name), self.world))
        results = [collect(leaf) if isinstance(leaf, Parts) else leaf for leaf in outputs[: captured.returned]]
        results = program.relations.between(results, captured.said, scheduled=True)
        self._programs.watch(results, lambda other: self._parameter_parts(other, state))
        show(captured.observed, self._moded, results, self._since)
        return captured.answer(self._moded, results)

    def _require_unchanged(self) -> None:
        """Checks that the modules' attributes are the same as when the graph was captured."""
        for (path, mine), (module, held) in zip(self.named_modules(), self._data, strict=False):
            now = vars(module) | {name: value for name, value in _plain(mine).items() if name in held}
            for name, was in held.items():
                new = now.get(name, was)
                if new is not was and (isinstance(was, Tensor) or isinstance(new, Tensor) or repr(new) != repr(was)):
                    raise AutotpError(
                        f"{path}.{name} was {shown(was)} when the model was captured, and is {shown(new)} now: the graph "
                        "has what it was; plan the model as it is, and simulate that".lstrip(".")
                    )

    def _require_observed(self) -> None:
        """Checks that there are no forward hooks that would not be called."""
        # Hooks of transformers' own are allowed: they collect what a call of the model is asked to return.
        observed = set(matching(self, self._programs.plan.observe).values())
        for name, module in self.named_modules():
            if (
                name
                and module not in observed
                and any(number >= self._since for number in foreign_hooks(module, ("transformers",)))
            ):
                raise unobserved(name)

    def _parameter_parts(self, program: Program, state: Mapping[str, Tensor]) -> dict[str, Parts]:
        """Placeholder -> every device's part, for a program's parameters only."""
        named, resting = program.captured.parameters, program.rewritten.resting
        return {name: distribute(name, state[fqn], resting(name), self.world) for name, fqn in named.items()}


def _plain(module: nn.Module) -> dict[str, Any]:
    """A module's attributes that are numbers, strings or plain tensors; not torch's own, such as ``training``."""
    kinds, torchs = (bool, int, float, str, Tensor), own_attributes(module)
    return {name: value for name, value in vars(module).items() if type(value) in kinds and name not in torchs}


def distribute(name: str, tensor: Tensor, layout: Layout, world: World) -> Parts:
    """Splits a whole tensor into every device's part; gradients of the parts are assembled into the whole gradient."""
    if differentiable(tensor):
        return Parts(_Distribute.apply(tensor, layout, world, name))
    return Parts(take(tensor, layout, world.mesh_shape, at) for at in world.hosted)


def collect(parts: Parts) -> Tensor:
    """Returns the value of a tensor that is replicated on all devices; every device gets the whole gradient."""
    return _Collect.apply(*parts)


def assemble(parts: Sequence[Tensor], shape: torch.Size, layout: Layout, world: World) -> Tensor:
    """Assembles a whole tensor of ``shape`` from every device's part."""
    result = parts[0].new_zeros(shape)
    for part, at in zip(parts, world.hosted, strict=True):
        target = torch.arange(result.numel(), device=result.device).view(shape)
        target = take(target, layout, world.mesh_shape, at)
        result.view(-1)[target.reshape(-1)] = part.reshape(-1)
    return result


class _Distribute(torch.autograd.Function):
    """A whole tensor -> every device's part; gradients of parts -> the whole gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layout: Layout, world: World, name: str) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.shape, ctx.layout, ctx.world, ctx.name = tensor.shape, layout, world, name
        ctx.set_materialize_grads(False)
        parts = tuple(take(tensor, layout, world.mesh_shape, at).clone() for at in world.hosted)
        ctx.shapes = [part.shape for part in parts]
        return parts

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        some = next((gradient for gradient in given if gradient is not None), None)
        if some is None:
            return None, None, None, None
        gradients = [some.new_zeros(shape) if g is None else g for g, shape in zip(given, ctx.shapes, strict=True)]
        _check_replicas(ctx.name, [gradient.detach() for gradient in gradients], ctx.layout, ctx.world)
        return _Assemble.apply(ctx.name, ctx.shape, ctx.layout, ctx.world, *gradients), None, None, None


class _Assemble(torch.autograd.Function):
    """The differentiable backward pass of ``_Distribute``. Gradients of gradients are whole on every replica."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, name: str, shape: torch.Size, layout: Layout, world: World, *parts: Tensor
    ) -> Tensor:
        ctx.layout, ctx.world, ctx.name = layout, world, name
        return assemble(parts, shape, layout, world)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return None, None, None, None, *_Distribute.apply(gradient, ctx.layout, ctx.world, ctx.name)


def _check_replicas(name: str, gradients: Sequence[Tensor], layout: Layout, world: World) -> None:
    first: dict[tuple[int, ...], Tensor] = {}
    sharded = [axis for axis, p in enumerate(layout) if is_shard(p)]
    for gradient, at in zip(gradients, world.hosted, strict=True):
        reference = first.setdefault(tuple(at[a] for a in sharded), gradient)
        sizes = reference.abs()[reference.isfinite()]
        near = 1e-6 + 1e-4 * float(sizes.max() if sizes.numel() else 0)
        if not torch.allclose(reference, gradient, rtol=1e-4, atol=near, equal_nan=True):
            raise AutotpError(
                f"gradient of {name}: the device at {at} disagrees with its replica by "
                f"{float((reference - gradient).abs().max()):.3g}; this is a defect of autotp, please report the plan"
            )


class _Collect(torch.autograd.Function):
    """A replicated output: the first device's value; every device gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:  # type: ignore[override]
        ctx.count = len(parts)
        result = parts[0].clone()  # a view made in an autograd function cannot be changed in place outside
        if not differentiable(result):
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _Spread.apply(gradient, ctx.count)


class _Spread(torch.autograd.Function):
    """The backward pass of ``_Collect``: replicates a gradient to every device."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, count: int) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(gradient.view_as(gradient) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Collect.apply(*gradients), None
