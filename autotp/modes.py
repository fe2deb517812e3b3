"""Training and evaluation: a captured graph is of one of them, and ``train()`` and ``eval()`` cannot change it."""

from __future__ import annotations

from torch import nn

from autotp.errors import AutotpError
from passes.capture import Captured
from passes.functional import batch_norm_train
from passes.shard import draws

__all__ = ["different_otherwise", "refuse"]

_DROPOUTS = nn.modules.dropout._DropoutNd
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


def different_otherwise(model: nn.Module, captured: Captured) -> tuple[str, ...]:
    """What a model would compute otherwise in its other mode: operators of its graph, or modules of the model.

    Args:
        model: in the mode in which it was captured.
        captured: its graph.
    """
    if model.training:
        nodes = (node for node in captured.graph_module.graph.nodes if node.op == "call_function")
        return tuple(node.name for node in nodes if draws(node) or node.target is batch_norm_train)
    dropouts = (name for name, module in model.named_modules() if isinstance(module, _DROPOUTS) and module.p > 0)
    return (*dropouts, *(name for name, module in model.named_modules() if isinstance(module, _BATCH_NORMS)))


def refuse(now: bool, wanted: bool, different: tuple[str, ...]) -> None:
    """Refuses to be switched from training to evaluation, or back, where that would have to change the graph.

    Raises:
        AutotpError: names what is different.
    """
    if wanted == now or not different:
        return
    shown = ", ".join(different[:4]) + (f" and {len(different) - 4} more" if len(different) > 4 else "")
    this, other, call = ("training", "evaluation", "eval") if now else ("evaluation", "training", "train")
    raise AutotpError(
        f"the model was captured for {this}, and {shown} would be different in {other}: the graph cannot be switched. "
        f"Distribute model.{call}() besides, and give it this one's state_dict()"
    )
