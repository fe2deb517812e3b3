"""Checks on a model before capture, and on what its forward pass does or queries that a graph cannot represent.

`attributes` finds the changes that a forward pass makes to Python state.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from costmodel.errors import AutotpError, require, shown
from passes.capture.attributes import in_python
from passes.capture.builder import CaptureError
from passes.capture.functional import Data
from passes.capture.observed import foreign_hooks
from passes.graph import graphs_of
from passes.tensors import overlap, reach, require_dense
from passes.torch_internals import (
    DisableTorchFunction,
    FakeTensor,
    OptimizedModule,
    disable_current_modes,
    has_backward_hooks,
    storage_id,
    tree_leaves,
    tree_structure,
)

__all__ = [
    "Seen",
    "check_tying",
    "looking",
    "refuse_hooks",
    "refuse_seeds",
    "refuse_sparse",
    "require_plain",
    "warn_of_changes",
]

_log = logging.getLogger("autotp.capture")

_WRAPPERS = (DataParallel, DistributedDataParallel, FullyShardedDataParallel)


def require_call(args: Any, kwargs: Any) -> None:
    """Raises an error unless ``args`` is a sequence and ``kwargs`` a mapping or None."""
    require(args, Sequence, "args", "a tuple of a call's positional arguments, such as (x,)")
    require({} if kwargs is None else kwargs, Mapping, "kwargs", "a dict of a call's keyword arguments")


def require_plain(model: nn.Module, args: Any = (), kwargs: Any = None) -> None:
    """Refuses models that are not modules, are distributed or wrapped, or hold unusable state; and malformed arguments."""
    require(model, nn.Module, "the model", "an instance of torch.nn.Module")
    require_call(args, kwargs)
    given = "give the model that it was made of"
    if isinstance(model, OptimizedModule):
        raise AutotpError(f"the model is wrapped by torch.compile: {given}, and for compiled code compile=True")
    try:
        modules = [*model.named_modules(remove_duplicate=False)]
        state = [*model.named_parameters(), *model.named_buffers()]
        state += [("", tensor) for tensor in (*model.parameters(), *model.buffers())]
    except Exception as error:
        raise AutotpError(
            f"{type(model).__name__}: its modules() or parameters() raised {type(error).__name__}: {error}; is "
            "super().__init__() called, and are all parts modules with names?"
        ) from error
    for path, _ in (*modules, *state):
        if path != path.encode(errors="ignore").decode():
            raise AutotpError(f"{type(model).__name__}: {path!r} is not Unicode text, as plans write it: rename it")
    for path, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise AutotpError(f"{path or 'the model'} is a module of torch.jit, which cannot be captured: {given}")
        if isinstance(module, _WRAPPERS):
            raise AutotpError(f"{path or 'the model'} is wrapped by {type(module).__name__}, which distributes it: {given}")
    for path, tensor in state:
        if not isinstance(tensor, Tensor):
            raise AutotpError(f"{type(model).__name__}: its parameters() have {shown(tensor)}, which is no tensor")
        if is_lazy(tensor):
            raise AutotpError(f"{path} has no shape yet: call the model once, with inputs like those to plan for")
        require_dense(tensor, f"{path} is")
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise AutotpError(f"{path} was made under torch.inference_mode(): make the model outside, or under no_grad()")
        if isinstance(tensor, DTensor):
            raise AutotpError(f"the model is distributed already, as its {path} is a DTensor: use it as it is, or {given}")


def refuse_sparse(model: nn.Module, exported: fx.GraphModule) -> None:
    """Refuses exported graphs that contain sparse or nested tensors."""
    for graph in graphs_of(exported):
        for node in graph.nodes:
            for value in tree_leaves(node.meta.get("val")):
                if isinstance(value, Tensor):
                    require_dense(value, f"{type(model).__name__}: {node.name} is")


def check_memory(model: nn.Module) -> None:
    """Refuses trained parameters that overlap other state in memory, and state that overlaps without a common storage."""
    state = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if any(reach(tensor))}
    held = sorted((*reach(tensor), name) for name, tensor in state.items())
    for place, (_, end, name) in enumerate(held):
        for _, _, other in itertools.takewhile(lambda each, end=end: each[0] < end, held[place + 1 :]):  # type: ignore[misc]
            one, two = state[name], state[other]
            trained = any(isinstance(each, nn.Parameter) and each.requires_grad for each in (one, two))
            if (trained or storage_id(one) != storage_id(two)) and overlap(one, two):
                raise AutotpError(
                    f"{type(model).__name__}: {name} and {other} lie in the same memory, and would be apart once "
                    "distributed; make them one parameter or buffer, or compute one from the other in forward"
                )


def check_tying(model: Any) -> None:
    """Refuses Hugging Face models on meta whose input and output embeddings should be tied but are two parameters."""
    try:
        config: Any = getattr(model, "config", None)
    except Exception:  # noqa: BLE001 - a __getattr__ of the user may raise anything
        return
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not getattr(text, "tie_word_embeddings", False) or not hasattr(model, "get_output_embeddings"):
        return
    try:
        first, last = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:  # transformers raises it for models without token embeddings
        return
    one, two = getattr(first, "weight", None), getattr(last, "weight", None)
    if one is not None and two is not None and one is not two and one.is_meta and one.shape == two.shape:
        raise AutotpError(
            f"{type(model).__name__}: config.tie_word_embeddings is set, but the input and output embeddings "
            "are two parameters (moving a model to meta unties them); build it under "
            "`with torch.device('meta'):`, or call model.tie_weights() first"
        )


#: Packages whose forward hooks only compute with tensors, so the graph has them: weight norms, checkpoints, adapters.
_TRACEABLE = ("torch", "transformers", "peft")


def refuse_hooks(model: nn.Module) -> None:
    """Refuses hooks that the graph would not call, or that would run only once, during capture, on fake tensors."""
    for name, module in model.named_modules():
        forward = bool(foreign_hooks(module, _TRACEABLE))
        if forward or has_backward_hooks(module):
            raise CaptureError(
                f"{type(model).__name__}: module {name!r} has a {'forward' if forward else 'backward'} hook, which a "
                "captured graph does not call; remove it, and register it at the distributed module"
                + (f", for a forward hook with observe=[{name!r}]" if name else "")
            )


_IN_PLACE = re.compile(r"(?!__).*_|.*_\..*|__(set|i(?!nit|nvert)).*__")  # add_, aten.add_.Tensor, __setitem__ and __iadd__


class Seen(TorchFunctionMode):
    """Records what a forward pass does that its graph lacks; refuses ``x.data = y``, which export silently ignores.

    Attributes:
        data: the uses of ``x.data`` in the current call of the model; ``depth`` counts its nested calls.
        parameters: by id, parameters that belong to no module of the model. ``torch.export`` keeps only their data.
        before, after: what `in_python` finds when calls of the model begin and end.
        seeded, asked: where the model's code seeds torch's generators; its queries that the graph does not make, and where.
        unmoved: results of ``contiguous()`` and the like that are the operand itself, but are copies for other strides.
        written: real tensors of no module that in-place operators were given, each with a copy of its previous value:
            ``torch.export`` really changes these.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = dict[str, Any](), dict[str, Any]()
        self.parameters: dict[int, nn.Parameter] = {}
        self.data, self.depth = Data(), 0
        self.seeded, self.unmoved, self.asked = list[str](), list[Tensor](), set[tuple[str, str]]()
        self.written: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_place = _IN_PLACE.fullmatch(getattr(function, "__name__", ""))
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter) and not isinstance(leaf, FakeTensor):
                self.parameters[id(leaf)] = leaf
            elif in_place and type(leaf) is Tensor and any(reach(leaf)):
                with disable_current_modes(), DisableTorchFunction(), torch.no_grad():
                    self.written.append((leaf, leaf.clone()))
        if (asked := _ASKED.get(function)) is not None:
            frame = sys._getframe()
            # Skip the frames of this mode and of torch.export's modes, which lie between here and the model's code.
            while frame.f_back and frame.f_code.co_name == "__torch_function__":
                frame = frame.f_back
            place = _place_of(frame)
            if function is Tensor.storage_offset and place:
                raise CaptureError(
                    f"forward asks for x.storage_offset() ({place}), which differs for copies and parts of x"
                )
            self.warn(f"x.{asked}", place)
        if function in Data.ACCESS:
            return self.data.access(*args)
        result = function(*args, **(kwargs or {}))
        self.data.called(args, kwargs or {}, result, in_place=bool(in_place))
        asks = getattr(function, "__name__", "").startswith("contiguous") or "memory_format" in (kwargs or {})
        if asks and isinstance(result, FakeTensor) and any(result is each for each in args):
            self.unmoved.append(result)
        return result

    def warn(self, asked: str, at: str) -> None:
        """Logs a warning, once per place, that the model's code queries ``asked``; does nothing if ``at`` is empty."""
        if at and (asked, at) not in self.asked:
            self.asked.add((asked, at))
            _log.warning(
                "forward asks %s (%s), which the graph does not: at every call it has the answer of the example, with "
                "gradients. Branch on self.training, or on an argument", asked, at,
            )  # fmt: skip


#: Attributes and methods by which ``forward`` may query gradients and strides: function -> its name in messages.
_ASKED: dict[Any, str] = {getattr(Tensor, name).__get__: name for name in ("requires_grad", "grad_fn")}
_ASKED |= {getattr(Tensor, name): f"{name}()" for name in ("is_contiguous", "stride", "storage_offset")}


def _place_of(frame: FrameType) -> str:
    """``file.py:LINE`` of a frame (or of the caller of torch.autograd.functional); empty in torch and in this package."""
    while frame.f_back and frame.f_code.co_filename.endswith("/torch/autograd/functional.py"):
        frame = frame.f_back
    file = frame.f_code.co_filename
    own = "/torch/" in file or file.startswith(("<", os.path.dirname(__file__)))
    return "" if own else f"{os.path.basename(file)}:{frame.f_lineno}"


@contextmanager
def _asking(seen: Seen) -> Iterator[None]:
    """Context manager that reports where ``forward`` queries the gradient mode: in the graph, the answer is constant.

    Args:
        seen: receives these queries, and the places where ``forward`` seeds torch's generators.
    """
    asked = {name: getattr(torch, name) for name in ("is_grad_enabled", "is_inference_mode_enabled")}
    mine = threading.get_ident()  # queries of other threads do not concern the capture

    def answer(name: str) -> bool:
        if threading.get_ident() == mine:
            seen.warn(f"torch.{name}()", _place_of(sys._getframe(2)))
        return bool(asked[name]())

    def seeding(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == mine and (at := _place_of(sys._getframe(1))):
            seen.seeded.append(at)
        return function(*args, **kwargs)

    with ExitStack() as patched:
        for where in (torch, torch.random):
            for name in ("manual_seed", "set_rng_state", "fork_rng"):
                if hasattr(where, name):
                    patched.enter_context(mock.patch.object(where, name, partial(seeding, getattr(where, name))))
        for name in asked:
            patched.enter_context(mock.patch.object(torch, name, lambda name=name: answer(name)))
        yield


def _warn_of_padding(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], _: Any) -> None:
    """Forward hook that warns where torch's ``nn.TransformerEncoder`` computes something else without gradients."""
    fast = isinstance(module, nn.TransformerEncoder) and not module.training and module.use_nested_tensor
    if fast and (kwargs.get("src_key_padding_mask") is not None or (len(args) > 2 and args[2] is not None)):
        _log.warning(
            "%s: without gradients, torch's own returns zeros at padded positions (nested tensors); the graph has what the "
            "layers compute there, as with gradients. With enable_nested_tensor=False, both are the same",
            type(module).__name__,
        )


@contextmanager
def looking(model: nn.Module) -> Iterator[Seen]:
    """Context manager under which calls of the model record, in a `Seen`, what its graph will lack; undoes real writes."""

    def look(found: dict[str, Any], module: nn.Module, args: Any, *_: Any) -> None:
        if vars(module) is vars(model):  # export may call a proxy of the model
            now = in_python(model) | {"lists or dicts among its arguments": (str(tree_structure(args)),)}
            found.update(now if found is seen.after else now | found)  # forward may call itself
            seen.depth += 1 if found is seen.before else -1
            seen.data = seen.data if seen.depth else Data()

    seen = Seen()
    try:
        with (
            seen,
            _asking(seen),
            register_module_forward_pre_hook(partial(look, seen.before)),
            register_module_forward_hook(partial(look, seen.after)),
            register_module_forward_hook(_warn_of_padding, with_kwargs=True),
        ):
            yield seen
    finally:
        with torch.no_grad():
            for tensor, was in reversed(seen.written):
                tensor.copy_(was)


def warn_of_changes(model: nn.Module, names: Sequence[str]) -> None:
    """Warns of changes to Python state in a forward pass that the graph does not make."""
    if names:
        _log.warning(
            "%s: forward changes %s, which the graph does not: every call begins with what was there when it was "
            "captured, and leaves nothing there. Return it, or make it a buffer, an argument, or a draw of torch's",
            type(model).__name__,
            ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else ""),
        )


def warn_of_gradients(model: nn.Module, names: Sequence[str]) -> None:
    """Warns of buffers whose new values would carry gradients from call to call."""
    if names:
        _log.warning(
            "%s: forward gives buffer %s a value with a gradient, which ends with the call; detach it, or return it and "
            "pass it to the next call",
            type(model).__name__,
            ", ".join(sorted(names)),
        )


def refuse_seeds(model: nn.Module, graph: fx.Graph, seeded: Sequence[str]) -> None:
    """Refuses a model that seeds torch's generators and draws random numbers: a graph cannot seed them."""
    if seeded and any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in graph.nodes):
        raise CaptureError(
            f"{type(model).__name__}: forward sets torch's random numbers ({seeded[0]}) and draws some, and a graph cannot "
            "set them: draw them once, in __init__, and keep them in a buffer, or pass them"
        )


def refuse_copies(model: nn.Module, names: Collection[str]) -> None:
    """Refuses in-place changes of parameters of which, under a precision, ``forward`` has a copy in another dtype."""
    if names:
        raise CaptureError(
            f"{type(model).__name__}: forward changes {', '.join(sorted(names))} in place, and the precision gives it a "
            "copy in another dtype, whose change would be lost; plan with precision=None, or make it a buffer"
        )
