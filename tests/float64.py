"""Double precision throughout: models that cast to float32 internally compute in float64 instead.

Hugging Face norms, rotary embeddings and softmaxes request float32 by name. Under :func:`float64_mode`, such
requests give float64, in eager mode and while ``torch.export`` traces, so that tests can require 1e-9.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

__all__ = ["Float64", "double", "float64_mode"]


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class Float64(TorchFunctionMode):
    """Replaces ``torch.float32`` arguments and ``Tensor.float`` by float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls ``func`` with every float32 dtype among its arguments replaced."""
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch.set_default_dtype:
            return func(*args, **(kwargs or {}))
        return func(*tree_map(_widen, args), **tree_map(_widen, kwargs or {}))


@contextlib.contextmanager
def float64_mode() -> Iterator[None]:
    """Within this context, the default dtype is float64, and float32 requested by name gives float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            yield
    finally:
        torch.set_default_dtype(before)


def double(
    factory: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]],
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A factory's model and example inputs in float64.

    The factory itself runs outside any mode, so the weights are those of the float32 model.
    Call the model under :func:`float64_mode`.
    """
    model, args, kwargs = factory()

    def widen(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 else leaf

    return model.double(), tree_map(widen, args), tree_map(widen, kwargs)
