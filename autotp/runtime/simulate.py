"""Every rank of a plan in lockstep, in one process: the numbers of a distributed run without devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autotp.plans.plan import Plan, overlapping
from autotp.runtime.compiled import Compiled, Overlap
from autotp.runtime.durations import overlap_of
from autotp.runtime.lockstep import assemble, collect, distribute, execute
from autotp.runtime.modes import OneMode, different_otherwise, training_only
from autotp.runtime.output_guard import guard, made_of
from autotp.runtime.rewrite import Rewritten, rewrite
from autotp.runtime.schedules import Schedules, in_lockstep
from passes.sharding.shard import place_constants
from passes.world.ops import Parts
from passes.world.world import LocalWorld, World

__all__ = ["Simulated", "simulate"]


def simulate(
    model: nn.Module,
    plan: Plan,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    world: World | None = None,
    schedule: str = "none",
) -> Simulated:
    """Runs ``plan`` for all of its devices in this process, forward and backward.

    Args:
        model: the model that was planned; its parameters become the simulated module's, whole and under their own names.
        plan: the plan to run.
        args, kwargs: example inputs, as given to ``autotp.plan``.
        schedule: ``none`` runs the sharded graph as autograd does, ``overlap`` the scheduled forward and backward graphs.
        world: in place of ``LocalWorld``, e.g. one that counts the bytes that collectives move.

    Returns:
        A module with the model's call signature; ``.grad`` and optimizers compare with the model's directly.

    Raises:
        PlanMismatchError: when the plan was made for another model or other inputs.
        AutotpError: in the backward pass, when devices that should hold equal gradients do not.
    """
    how = overlap_of(plan) if overlapping(schedule) else None
    return Simulated(model, rewrite(model, plan, args, kwargs), world or LocalWorld(plan.mesh_shape), how)


class Simulated(OneMode):
    """A model whose forward and backward pass run as the devices of a plan would run them.

    Attributes:
        rewritten: the sharded graph and what it was made from.
        world: hosts every device.
    """

    rewritten: Rewritten
    world: World
    _schedules: Schedules | None
    _made_of: Mapping[int, frozenset[int]]
    _compiled: Mapping[Hashable, Compiled | None]

    def __init__(self, model: nn.Module, rewritten: Rewritten, world: World, how: Overlap | None = None) -> None:
        super().__init__()
        # The model's own tables, not copies: names, state dict and later changes of the model are the same here.
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = model.__dict__[table]
        self.training = model.training
        schedules = None
        if how is not None:
            schedules = Schedules(rewritten.graph_module, world, how, functools.partial(in_lockstep, even=rewritten.even))
        self.__dict__ |= {"rewritten": rewritten, "world": world, "_schedules": schedules}
        self.__dict__["_different"] = different_otherwise("", model, training_only(rewritten.captured))
        self.__dict__["_made_of"] = made_of(rewritten.captured.graph_module.graph, rewritten.captured.outputs)
        self.__dict__["_compiled"] = {} if schedules is None else schedules.known
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        place_constants(rewritten.graph_module.graph, device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own signature and output structure; inputs are the global batch."""
        return _as_it_is()(self, *args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        captured, sharding = self.rewritten.captured, self.rewritten.sharding
        state = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        whole: dict[str, Tensor] = {name: state[fqn] for name, fqn in captured.parameters.items()}
        whole |= {name: state[fqn] for name, fqn in captured.buffers.items()}
        whole |= dict(captured.constants)
        whole |= dict(zip(captured.inputs, captured.signature.flatten(args, kwargs), strict=True))
        resting, everywhere = sharding.resting, self.rewritten.whole
        parts = {name: distribute(name, whole[name], resting.get(name, everywhere), self.world) for name in whole}
        outputs = self._schedules.run(parts) if self._schedules is not None else None
        if outputs is None:
            outputs = execute(self.rewritten.graph_module.graph, self.world, parts)
        for name, new in zip(captured.mutations, outputs[captured.outputs :], strict=True):
            layout = resting.get(name, everywhere)
            with torch.no_grad():
                whole[name].copy_(assemble([p.detach() for p in new], whole[name].shape, layout, self.world))
        results = [collect(leaf) if isinstance(leaf, Parts) else leaf for leaf in outputs[: captured.outputs]]
        guard(results, self._made_of)
        return captured.signature.unflatten(results)


@functools.cache
def _as_it_is() -> Callable[..., Any]:
    """What runs is compiled already; ``torch.compile`` would look into how it is made."""
    return torch.compiler.disable(Simulated._run)
