"""Saves and loads the adapter of a distributed ``PeftModel`` in peft's file format, without the base model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from autotp.errors import AutotpError
from autotp.runtime.agreement import everywhere

__all__ = ["is_adapted", "load_adapter", "save_adapter"]


def is_adapted(model: Any) -> bool:
    """Whether a model is peft's, with one adapter.

    Args:
        model: the original model, not the distributed module.

    Raises:
        AutotpError: the model has several adapters.
    """
    adapters = getattr(model, "peft_config", {}) if hasattr(model, "get_base_model") else {}
    if len(adapters) > 1:
        raise AutotpError(f"the model has the adapters {', '.join(adapters)}: keep the one that is to be trained")
    return bool(adapters)


def save_adapter(parallel: nn.Module, model: Any, directory: str | os.PathLike[str], *, writes: bool) -> None:
    """Writes a distributed model's adapter for ``PeftModel.from_pretrained``; a collective call.

    Args:
        parallel: what ``autotp.parallelize`` returned for ``model``.
        model: the ``PeftModel``; its parameters may have no memory.
        directory: created if it does not exist.
        writes: whether this rank writes the files.

    Raises:
        AutotpError: on every rank, if the directory cannot be written.
    """
    state, adapter = parallel.state_dict(), dict[str, Any]()
    for name in _names(state, model).values():
        whole = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
        if writes:
            adapter[name] = whole.detach().cpu()
    with everywhere(f"cannot save to {os.fspath(directory)}"):
        if writes:
            model.save_pretrained(directory, state_dict=adapter)


def load_adapter(parallel: nn.Module, model: Any, directory: str | os.PathLike[str]) -> None:
    """Loads an adapter that ``save_adapter`` or peft wrote into a distributed model; a collective call.

    Args:
        parallel, model: as for ``save_adapter``.
        directory: of the adapter.

    Raises:
        AutotpError: on every rank, if the files' tensors are not those of the adapter, or the files cannot be read.
    """
    from peft.utils import load_peft_weights

    with everywhere(f"cannot load {os.fspath(directory)}"):
        names = _names(parallel.state_dict(), model)
        files = load_peft_weights(os.fspath(directory), device="cpu")
        if names.keys() != files.keys():
            differing = ", ".join(sorted(names.keys() ^ files.keys())[:4])
            raise AutotpError(f"only one of the files and the model has {differing}: give the adapter of this model")
    whole = {names[key]: value for key, value in files.items()}
    set_model_state_dict(parallel, whole, options=StateDictOptions(full_state_dict=True, strict=False))


def _names(state: Mapping[str, Any], model: Any) -> dict[str, str]:
    """Name in peft's files, which omits the adapter's name -> name in the model's state dict, of the adapter's tensors."""
    from peft import get_peft_model_state_dict

    (adapter,) = model.peft_config
    found: dict[str, str] = get_peft_model_state_dict(
        model, {name: name for name in state}, adapter, save_embedding_layers=False
    )
    return found
