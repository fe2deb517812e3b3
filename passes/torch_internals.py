"""All undocumented names of torch that autotp uses; no other file uses any.

Support for a new release of torch is confined to this file. `tests/passes/test_torch_internals.py` tests the required
behaviour of every name, and fails if another file uses a private name. ATen operators, private or not, are what exported
graphs consist of, and are not listed.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._C import DisableTorchFunction
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import OptimizedModule
from torch._functorch import apis, eager_transforms, predispatch
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd import forward_ad
from torch.autograd.function import FunctionMeta, _SingleLevelFunction
from torch.distributed import _state_dict_utils
from torch.distributed._composable.contract import STATE_KEY as COMPOSED
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.distributions import Distribution
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.utils.stateless import _reparametrize_module as reparametrize_module
from torch.utils import checkpoint
from torch.utils._filelock import FileLock
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import (
    PyTree,
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)
from torch.utils._triton import has_triton
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputationError

#: Attributes of ``nn.Module`` and ``fx.GraphModule`` that derived classes set or override; any file may use them.
PROTECTED = frozenset({"_apply", "_buffers", "_get_name", "_modules", "_non_persistent_buffers_set", "_parameters"})
PROTECTED |= {"_graph", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}

#: Attributes that libraries set on modules: recurrent ones list their parameters, those of transformers note their hooks.
_OWN: set[str | None] = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs", "_output_capturing_hooks_installed"}

checkpoint_hook: Any = checkpoint._checkpoint_hook
CheckpointFrame: Any = checkpoint._CheckpointFrame
CachingTorchDispatchMode: Any = checkpoint._CachingTorchDispatchMode
dtensor_handlers: Any = DTensor._op_dispatcher._custom_op_handlers
versions_preserved: Any = torch.autograd._unsafe_preserve_version_counter

DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"  # attribute that DistributedDataParallel reads from a module first
#: The functions that make and unpack dual numbers in an exported graph.
dual_numbers = predispatch._make_dual, predispatch._unpack_dual
#: (module, name) of the functions that implement transforms of ``torch.func``, and of ``torch.autograd.grad``.
_TRANSFORMS: list[tuple[Any, str]] = [(torch.autograd, "grad"), (apis, "vmap_impl"), (eager_transforms, "grad_impl")]
_TRANSFORMS += [(eager_transforms, name) for name in ("grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums")]

#: The schema of an operator.
schema: Callable[[Any], torch.FunctionSchema] = operator.attrgetter("_schema")
#: The base of a view, as autograd records it; None for other tensors.
view_base: Callable[[Tensor], Tensor | None] = operator.attrgetter("_base")
#: Whether a tensor is an efficient zero tensor, which has no memory.
is_zerotensor: Callable[[Tensor], bool] = Tensor._is_zerotensor
#: This rank's part of a DTensor itself; ``to_local`` returns a view of it with an autograd history.
local_tensor: Callable[[DTensor], Tensor] = operator.attrgetter("_local_tensor")
#: The sequence number of the next node of the autograd graph.
sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
#: The sequence number of a node of the autograd graph.
sequence_number_of: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
#: The id of the backward pass that runs in this thread; -1 if none does.
backward_pass: Callable[[], int] = torch._C._current_graph_task_id  # type: ignore[attr-defined]
#: The default process group; raises a ValueError if there is none.
default_group: Callable[[], dist.ProcessGroup] = dist.distributed_c10d._get_default_group
#: The store of the default process group.
default_store: Callable[[], Any] = dist.distributed_c10d._get_default_store
#: Replaces the whole tensors of a state dict by each rank's parts.
distribute_tensors: Callable[..., None] = _state_dict_utils._distribute_tensors
#: Sets the ``group_desc`` of a process group.
describe_group: Callable[[dist.ProcessGroup, str], None] = dist.ProcessGroup._set_group_desc
#: Queues a function to be called at the end of the running backward pass.
queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
#: Whether a torch profiler is active.
is_profiling: Callable[[], bool] = functools.partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")


def storage_id(tensor: Tensor) -> int:
    """An id of a tensor's storage, equal for all its views; valid while the storage exists."""
    return tensor.untyped_storage()._cdata


def version(tensor: Tensor) -> int:
    """Autograd's count of in-place changes of a tensor; 0 for inference tensors, which have no version counter."""
    return 0 if tensor.is_inference() else tensor._version


def held_elsewhere(tensor: Tensor) -> bool:
    """Whether anything besides the caller's variable holds a reference to a tensor, or to a view of it."""
    storage = tensor.untyped_storage()  # one reference; the tensor holds the other
    return tensor._use_count() > 1 or torch._C._storage_Use_Count(storage._cdata) > 2  # type: ignore[attr-defined]


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has gradient hooks."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def dtensor_of(part: Tensor, like: DTensor) -> DTensor:
    """A ``DTensor`` of a local part with the spec of another, without a gradient; autograd would record ``from_local``."""
    return DTensor.__new__(DTensor, part, like._spec, requires_grad=False)  # its __init__ does nothing and costs time


def set_distribute_tensors(function: Callable[..., None]) -> None:
    """Replaces the `distribute_tensors` that ``torch.distributed.checkpoint.state_dict`` calls."""
    setattr(_state_dict_utils, "_distribute_tensors", function)  # noqa: B010


@contextmanager
def without_values() -> Iterator[None]:
    """Context manager for running on fake tensors: distributions check no values, and torch logs no traceback of errors."""
    log, was = logging.getLogger("torch._subclasses.fake_tensor"), Distribution._validate_args
    before, log.disabled, Distribution._validate_args = log.disabled, True, False
    try:
        yield
    finally:
        log.disabled, Distribution._validate_args = before, was


@contextmanager
def set_aside() -> Iterator[None]:
    """Context manager that disables the caller's dispatch modes and saved-tensor hooks, such as those of checkpoints."""
    hooks, saving = [], torch._C._autograd
    while top := saving._top_saved_tensors_default_hooks(True):
        hooks.append(top)
        saving._pop_saved_tensors_default_hooks()
    try:
        with disable_current_modes():
            yield
    finally:
        for pair in reversed(hooks):
            saving._push_saved_tensors_default_hooks(*pair)


def transforming() -> bool:
    """Whether a ``torch.func`` transform or a level of forward-mode AD is active."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def is_saving(operator: Any) -> bool:
    """Whether autograd itself calls the operator: it detaches tensors that it saves, and unpacks with a history again."""
    key = torch._C.DispatchKey.AutogradFunctionality
    return operator is torch.ops.aten.detach.default and not torch._C._dispatch_tls_is_dispatch_key_excluded(key)


def enter_inference_mode(context: Any, instead: AbstractContextManager | None) -> None:
    """Enters ``instead`` in the place of a ``torch.inference_mode`` context; if None, the context of inference mode off."""
    context._inference_mode_context = instead or torch._C._InferenceMode(False)
    context._inference_mode_context.__enter__()


#: Whether the original ``apply`` of a function runs; a reference to it may be from an earlier capture.
_applying = ContextVar("_applying", default=False)
#: Whether ``apply`` is implemented in C++, as it is since torch 2.14.
_COMPILED = not isinstance(vars(torch.autograd.Function)["apply"], classmethod)


@contextmanager
def functions_replaced(instead: Callable[..., Any]) -> Iterator[None]:
    """Context manager under which ``apply`` of a ``torch.autograd.Function`` calls ``instead``, except in transforms.

    Args:
        instead: a function of the class, its original ``apply``, whether ``apply`` was taken from the class before and
            torch 2.14 or later has disabled gradients, the arguments and the keyword arguments.
    """
    base: Any = _SingleLevelFunction
    if not _COMPILED:  # Function.apply calls that of its base class
        base.apply = classmethod(lambda cls, *args, **kwargs: instead(cls, super(base, cls).apply, False, args, kwargs))
        try:
            yield
        finally:
            del base.apply
        return
    function, meta, lookup = torch.autograd.Function, FunctionMeta, FunctionMeta.__getattribute__
    descriptor, state = vars(function)["apply"], threading.local()

    def own(cls: type) -> Callable[..., Any]:
        def apply(*args: Any, **kwargs: Any) -> Any:
            before = _applying.set(True)
            try:
                return descriptor.__get__(None, cls)(*args, **kwargs)
            finally:
                _applying.reset(before)

        return apply

    def applied(cls: type, *args: Any, **kwargs: Any) -> Any:
        if torch._C._are_functorch_transforms_active():  # they call it again, on the tensors that they have mapped
            return descriptor.__get__(None, cls)(*args, **kwargs)
        if _applying.get():
            return own(cls)(*args, **kwargs)
        return instead(cls, own(cls), False, args, kwargs)

    def look(cls: type, name: str) -> Any:
        """An attribute of a class. The compiled ``apply`` looks up the names below in this order; Python code does not."""
        found = lookup(cls, name)
        if _applying.get() or torch._C._are_functorch_transforms_active():
            return found
        waiting, state.waiting = getattr(state, "waiting", None), None
        if name == "_backward_cls" and (cls is CheckpointFunction or cls.__module__.partition(".")[0] != "torch"):
            state.waiting = (cls, "forward")
        elif waiting == (cls, "setup_context") == (cls, name):  # the original has run
            return lambda *args: None
        elif waiting == (cls, "forward") and name in ("clear_saved_tensors_on_access", "boxed_grads_call"):
            state.waiting = waiting
        elif waiting == (cls, "forward") == (cls, name):
            own_context = lookup(cls, "setup_context") is base.setup_context

            def forward(*args: Any, **kwargs: Any) -> Any:
                result = instead(cls, own(cls), True, args[int(own_context) :], kwargs)
                state.waiting = None if own_context else (cls, "setup_context")
                return result

            return forward
        return found

    function.apply = classmethod(applied)  # type: ignore[assignment, method-assign]
    meta.__getattribute__ = look  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        function.apply = descriptor  # type: ignore[method-assign]
        del meta.__getattribute__


@contextmanager
def transforms_replaced(instead: Callable[[Callable], Callable]) -> Iterator[None]:
    """Context manager that replaces the implementation of each ``torch.func`` transform by ``instead`` of it."""
    with ExitStack() as stack:
        for module, name in _TRANSFORMS:
            stack.enter_context(patch.object(module, name, instead(getattr(module, name))))
        yield


def forward_hooks(module: nn.Module, *, before: bool) -> Mapping[int, Callable]:
    """A module's forward hooks, or forward pre-hooks if ``before``, by the ids that torch assigns in order."""
    return module._forward_pre_hooks if before else module._forward_hooks


def forward_hooks_with_kwargs(module: nn.Module, *, before: bool) -> Iterable[int]:
    """The ids of the `forward_hooks` that receive keyword arguments too."""
    return module._forward_pre_hooks_with_kwargs if before else module._forward_hooks_with_kwargs


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has backward hooks or backward pre-hooks."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def own_attributes(module: nn.Module) -> set[str | None]:
    """Names of attributes that torch sets on a module, such as a weight that a pre-hook of torch computes at each call."""
    return _OWN | {getattr(h, "name", getattr(h, "_tensor_name", None)) for h in module._forward_pre_hooks.values()}


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made a module, or compiles its calls."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def context_of(function: fx.GraphModule) -> Callable:
    """The ``context_fn`` of a checkpoint that was exported as an operator."""
    return function.meta.get("_checkpoint_context_fn", checkpoint.noop_context_fn)  # type: ignore[no-any-return]


def collectives_begun() -> int:
    """The number of collectives that this process has started, in all of its groups."""
    groups = [g for g in [*dist.distributed_c10d._world.pg_map] if g.name() in ("gloo", "nccl")]  # others may not count
    return sum(group._get_sequence_number_for_group() for group in groups)  # type: ignore[attr-defined]


def group_time_limit(group: dist.ProcessGroup) -> timedelta:
    """The timeout of a process group's collectives."""
    options: Any = group._get_backend(group._device_types[0]).options
    return getattr(options, "_timeout", dist.constants.default_pg_timeout)


def forget_groups(mesh: DeviceMesh) -> None:
    """Drops the references to process groups from a mesh and from its root mesh."""
    for each in (mesh, getattr(mesh, "_root_mesh", None)):
        getattr(each, "_pg_registry", {}).clear()


def cpp_compiler() -> str:
    """The C++ compiler that Inductor uses; raises a RuntimeError if there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


class Inductor(NamedTuple):
    """The functions of Inductor that compile a functional graph of ATen operators, in the order of their calls.

    Attributes:
        decompositions: operator -> function that decomposes it in tracing.
        cache_dir: the directory of compiled code.
        prepare: runs the passes on joint forward and backward graphs, in place.
        record_strides: records the strides of a graph's results.
        compile: graph, fake operands -> a function of a list of operands, which empties the list.
    """

    decompositions: Callable[[], Mapping[Any, Callable]]
    cache_dir: Callable[[], str]
    prepare: Callable[..., Any]
    record_strides: Callable[[fx.GraphModule], None]
    compile: Callable[..., Any]


def inductor() -> Inductor:
    """Imports Inductor on demand: that takes a fifth of the time in which a process imports autotp."""
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner, record_original_output_strides
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.runtime.runtime_utils import cache_dir
    from torch._inductor.utils import BoxedBool

    run = functools.partial(compile_fx_inner, cudagraphs=BoxedBool(False), is_inference=True)
    return Inductor(select_decomp_table, cache_dir, _recursive_joint_graph_passes, record_original_output_strides, run)
