"""Calls the hooks of observed modules after the graph has run, once for each moment at which the model would call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from autotp.errors import AutotpError
from autotp.runtime.state import held_part
from passes.capture import Moment
from passes.torch_internals import forward_hooks, forward_hooks_with_kwargs, has_gradient_hooks, tree_leaves, version

__all__ = ["show", "unobserved"]


def show(moments: Sequence[Moment], modules: Sequence[nn.Module], outputs: Sequence[Any], since: int = 0) -> None:
    """Calls the hooks of observed modules, in the order of the model's calls.

    Args:
        moments: of a captured graph.
        modules: the distributed module's counterparts of ``model.modules()``, in the same order.
        outputs: of a call, flat.
        since: hooks whose torch id is lower are not called.

    Raises:
        AutotpError: a hook returned a value, modified its arguments in place, or requested their gradients.
    """
    for moment in moments:
        module = modules[moment.index]
        named = forward_hooks_with_kwargs(module, before=moment.before)
        mine = [(n, hook) for n, hook in forward_hooks(module, before=moment.before).items() if n >= since]
        if not mine:
            continue
        args, kwargs, *made = moment.values(outputs)
        shown = moment.tensors(outputs)
        versions, held = _versions(shown), tree_leaves((args, kwargs, made))
        for number, hook in mine:
            given = (args, kwargs) if number in named else (args,)
            answer = hook(module, *given, *made)  # type: ignore[operator]
            now = tree_leaves((args, kwargs, made))
            other = len(now) != len(held) or any(one is not each for one, each in zip(now, held, strict=False))
            if answer is not None or other or _versions(shown) != versions:
                did = "put another value into what it was given" if other else "changed a tensor in place"
                did = f"returned a {type(answer).__name__}" if answer is not None else did
                raise AutotpError(
                    f"a forward hook of {moment.module} {did}, which would change the model's result: hooks of a "
                    "distributed module's parts only look. Return None, and change clones; to change what the model "
                    "computes, change the model before it is distributed"
                )
            if any(has_gradient_hooks(each) or each.retains_grad for each in shown):
                raise AutotpError(
                    f"a forward hook of {moment.module} asked for the gradient of what it was shown, which would lack what "
                    "comes from the rest of the model: observed tensors are independent outputs in autograd. Hooks on "
                    "gradients of parameters, and losses of observed tensors, have whole gradients"
                )


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """The version counters of tensors; a ``DTensor`` and its local tensor have one each, which are added up."""
    return [version(each) + version(held_part(each)) for each in tensors]


def unobserved(name: str) -> AutotpError:
    """The error for a forward hook of a module that is not observed."""
    return AutotpError(
        f"{name} is not observed, so its forward hooks would not be called: give autotp.parallelize observe=[{name!r}], or "
        "register the hook on the distributed module"
    )
