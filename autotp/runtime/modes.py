"""What capturing fixes: a model's mode and its figures, which ``train()``, ``eval()`` and attributes cannot change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import fx, nn

from autotp.errors import AutotpError
from passes.capture import Captured
from passes.capture.functional import batch_norm_train
from passes.graph import arguments_of, note_of
from passes.rules.table import draws

__all__ = ["OneMode", "different_otherwise", "plain_attributes", "training_only"]

_PLAIN = (bool, int, float, str, tuple, type(None))
_DROPOUTS = nn.modules.dropout._DropoutNd
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


def training_only(captured: Captured) -> dict[str, str]:
    """The operators that do what they do because their module is in training, with its path."""
    return {n.name: note_of(n).module for n in captured.graph_module.graph.nodes if _trains(n)}


def different_otherwise(path: str, module: nn.Module, training: Mapping[str, str]) -> tuple[str, ...]:
    """What a model, or a module of it, would compute otherwise in its other mode: operators of the graph, or modules.

    Args:
        path: the module's; empty for the model.
        module: it, in the mode in which it was captured.
        training: see ``training_only``.
    """
    if module.training:
        return tuple(name for name, place in training.items() if f"{place}.".startswith(f"{path}.") or not path)
    return tuple(f"{path}.{name}".strip(".") for name, each in module.named_modules() if _differs(each))


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's own public attributes that are numbers, text and the like."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    return {name: value for name, value in own.items() if isinstance(value, _PLAIN)}


def _differs(module: nn.Module) -> bool:
    """Whether one of torch's own modules does something else in training than in evaluation."""
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, (nn.RReLU, _BATCH_NORMS))


def _trains(node: fx.Node) -> bool:
    """Whether a node does what it does because the model is in training; noise that is drawn in both modes does not."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is batch_norm_train:
        return True
    if not draws(node):
        return False
    given = arguments_of(node, node.args, node.kwargs)
    return "dropout_p" in given or bool((given.get("train") or given.get("training")) and given.get("p", 1))


class OneMode(nn.Module):
    """A module whose graph has the mode in which its model was captured, and the values of the attributes it had then."""

    _path = ""
    _different: tuple[str, ...] = ()  # what `different_otherwise` found
    _plain: Mapping[str, Any] = {}  # what `plain_attributes` found

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._plain and not (type(value) is type(self._plain[name]) and value == self._plain[name]):
            raise AutotpError(
                f"{self._path or type(self).__name__}.{name} was {self._plain[name]!r} when the model was captured, and "
                f"the graph cannot follow a change to {value!r}. Set it on the model, and distribute the model again"
            )
        super().__setattr__(name, value)

    def train(self, mode: bool = True) -> Self:
        """As a module's own, where the graph is the same in both modes.

        What was captured in another mode than the rest, such as a frozen batch norm, stays in it.

        Raises:
            AutotpError: it is not; names what would differ.
        """
        if mode != self.training and self._different:
            shown, more = ", ".join(self._different[:4]), len(self._different) - 4
            shown += f" and {more} more" if more > 0 else ""
            this, other, call = ("training", "evaluation", "eval") if self.training else ("evaluation", "training", "train")
            raise AutotpError(
                f"the model was captured for {this}, and {shown} would be different in {other}: the graph cannot be "
                f"switched. Distribute model.{call}() besides, and give it this one's state_dict()"
            )
        self._switch(mode)
        return self

    def _switch(self, mode: bool) -> None:
        self.training = mode
        for child in self.children():
            if not isinstance(child, OneMode):
                child.train(mode)
            elif child.training == mode or not child._different:
                child._switch(mode)
