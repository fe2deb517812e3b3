"""Checks of a model to capture; what it and ``torch.export`` assert of values is left out, and what only that reads."""

from __future__ import annotations

import itertools
from typing import Any

from torch import SymBool, SymFloat, SymInt, fx, nn
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from costmodel.errors import AutotpError
from passes.capture.builder import CaptureError, operator_name

__all__ = ["check_tying", "drop_checks", "refuse_hooks", "require_plain"]

_WRAPPERS = (DataParallel, DistributedDataParallel, FullyShardedDataParallel)

_CHECKS = ("aten::_assert", "aten::sym_constrain", "aten::_functional_assert", "aten::_functional_sym")
_NUMBERS = (bool, int, float, SymBool, SymInt, SymFloat)


def drop_checks(module: fx.GraphModule) -> None:
    """Leaves them out in place, in all regions, and numbers taken from tensors (``.item()``) that are for them alone."""
    for graph in [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]:
        for node in reversed(graph.nodes):
            number = node.op == "call_function" and isinstance(node.meta.get("val"), _NUMBERS)
            if not node.users and (number or operator_name(node.target).startswith(_CHECKS)):
                graph.erase_node(node)


def require_plain(model: nn.Module) -> None:
    """Refuses what somebody has distributed, or wrapped so that its modules have other names."""
    given = "give the model that it was made of"
    if isinstance(model, OptimizedModule):
        raise AutotpError(f"the model is wrapped by torch.compile: {given}, and for compiled code compile=True")
    for path, module in model.named_modules():
        if isinstance(module, _WRAPPERS):
            raise AutotpError(f"{path or 'the model'} is wrapped by {type(module).__name__}, which distributes it: {given}")
    for path, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if isinstance(tensor, DTensor):
            raise AutotpError(f"the model is distributed already, as its {path} is a DTensor: use it as it is, or {given}")


def check_tying(model: Any) -> None:
    """Refuses a Hugging Face model whose input and output embeddings should be one but are two on meta."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not getattr(text, "tie_word_embeddings", False) or not hasattr(model, "get_output_embeddings"):
        return
    try:
        first, last = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:  # as transformers has it for models without words
        return
    one, two = getattr(first, "weight", None), getattr(last, "weight", None)
    if one is not None and two is not None and one is not two and one.is_meta and one.shape == two.shape:
        raise AutotpError(
            f"{type(model).__name__}: config.tie_word_embeddings is set, but the input and output embeddings "
            "are two parameters (moving a model to meta unties them); build it under "
            "`with torch.device('meta'):`, or call model.tie_weights() first"
        )


#: Whose forward hooks compute with tensors, which the graph then has: norms of weights, checkpoints, adapters.
_TRACEABLE = ("torch", "transformers", "peft")


def refuse_hooks(model: nn.Module) -> None:
    """Refuses hooks that the graph would not call, or that would run once, on fake tensors."""
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        places = [str(getattr(hook, "__module__", None) or type(hook).__module__) for hook in hooks]
        forward = any(place.partition(".")[0] not in _TRACEABLE for place in places)
        if forward or module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"{type(model).__name__}: module {name!r} has a {'forward' if forward else 'backward'} hook, which a "
                "captured graph does not call; remove it, and register it at the distributed module"
                + (f", for a forward hook with observe=[{name!r}]" if name else "")
            )
