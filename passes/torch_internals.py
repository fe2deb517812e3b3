"""What autotp uses of torch that torch does not document: every such name stands here, and nowhere else.

A new release of torch is met in this file; `tests/passes/test_torch_internals.py` has a test for every name, which says
what is asked of it, and fails where another file uses a private name. Operators of ATen, private or not, are what exported
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

#: Attributes of ``nn.Module`` and ``fx.GraphModule`` that derived classes set or override; they are used everywhere.
PROTECTED = frozenset({"_apply", "_buffers", "_get_name", "_modules", "_non_persistent_buffers_set", "_parameters"})
PROTECTED |= {"_graph", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}

#: What modules have for themselves: recurrent ones lists of their parameters, those of transformers a note of their hooks.
_OWN: set[str | None] = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs", "_output_capturing_hooks_installed"}

checkpoint_hook: Any = checkpoint._checkpoint_hook
CheckpointFrame: Any = checkpoint._CheckpointFrame
CachingTorchDispatchMode: Any = checkpoint._CachingTorchDispatchMode
dtensor_handlers: Any = DTensor._op_dispatcher._custom_op_handlers
versions_preserved: Any = torch.autograd._unsafe_preserve_version_counter

DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"  # what DistributedDataParallel asks a module for first
#: What makes and reads dual numbers in an exported graph.
dual_numbers = predispatch._make_dual, predispatch._unpack_dual
#: What carries out transforms of ``torch.func``, and derivatives that autograd takes.
_TRANSFORMS: list[tuple[Any, str]] = [(torch.autograd, "grad"), (apis, "vmap_impl"), (eager_transforms, "grad_impl")]
_TRANSFORMS += [(eager_transforms, name) for name in ("grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums")]

#: The arguments and results of an operator.
schema: Callable[[Any], torch.FunctionSchema] = operator.attrgetter("_schema")
#: The tensor of which autograd knows that this is a view.
view_base: Callable[[Tensor], Tensor | None] = operator.attrgetter("_base")
#: Whether a tensor is zeros that have no memory.
is_zerotensor: Callable[[Tensor], bool] = Tensor._is_zerotensor
#: This rank's part itself; ``to_local`` would give a view of it to autograd.
local_tensor: Callable[[DTensor], Tensor] = operator.attrgetter("_local_tensor")
#: The number that the next node of autograd's graph will have.
sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
#: The number of a node of autograd's graph.
sequence_number_of: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
#: The number of the backward pass that runs in this thread; -1 if none does.
backward_pass: Callable[[], int] = torch._C._current_graph_task_id  # type: ignore[attr-defined]
#: The job's process group; a ValueError says that there is none.
default_group: Callable[[], dist.ProcessGroup] = dist.distributed_c10d._get_default_group
#: The store of the job's process group.
default_store: Callable[[], Any] = dist.distributed_c10d._get_default_store
#: Takes each rank's parts of the whole tensors of a state dict.
distribute_tensors: Callable[..., None] = _state_dict_utils._distribute_tensors
#: Sets what a group's ``group_desc`` says.
describe_group: Callable[[dist.ProcessGroup, str], None] = dist.ProcessGroup._set_group_desc
#: Calls a function when the backward pass that runs is over.
queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
#: Whether a profiler of torch's is on.
is_profiling: Callable[[], bool] = functools.partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")


def storage_id(tensor: Tensor) -> int:
    """A number of the memory that a tensor lies in, equal for all views of it, while it is there."""
    return tensor.untyped_storage()._cdata


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place, as autograd counts; 0 of inference tensors, of which it keeps no count."""
    return 0 if tensor.is_inference() else tensor._version


def held_elsewhere(tensor: Tensor) -> bool:
    """Whether anyone but the caller's variable holds a tensor, or a view of it."""
    storage = tensor.untyped_storage()  # one use, the tensor's the other
    return tensor._use_count() > 1 or torch._C._storage_Use_Count(storage._cdata) > 2  # type: ignore[attr-defined]


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has hooks on its gradient."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def dtensor_of(part: Tensor, like: DTensor) -> DTensor:
    """A ``DTensor`` laid out as another, without a gradient; ``from_local`` would be seen by autograd."""
    return DTensor.__new__(DTensor, part, like._spec, requires_grad=False)  # its __init__ does nothing, and takes longer


def set_distribute_tensors(function: Callable[..., None]) -> None:
    """Lets ``torch.distributed.checkpoint.state_dict`` call another function in its place."""
    setattr(_state_dict_utils, "_distribute_tensors", function)  # noqa: B010


@contextmanager
def without_values() -> Iterator[None]:
    """Within it, models run on fake tensors: distributions check no values, and torch logs no traceback of an error."""
    log, was = logging.getLogger("torch._subclasses.fake_tensor"), Distribution._validate_args
    before, log.disabled, Distribution._validate_args = log.disabled, True, False
    try:
        yield
    finally:
        log.disabled, Distribution._validate_args = before, was


@contextmanager
def set_aside() -> Iterator[None]:
    """Within it, the caller's modes, and hooks on what autograd saves, see nothing: checkpoints have them."""
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
    """Whether a transform of ``torch.func`` is on, or a level of forward-mode gradients."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def is_saving(operator: Any) -> bool:
    """Whether what runs is autograd's own: it detaches what it saves, and what it unpacks, which has a history again."""
    key = torch._C.DispatchKey.AutogradFunctionality
    return operator is torch.ops.aten.detach.default and not torch._C._dispatch_tls_is_dispatch_key_excluded(key)


def enter_inference_mode(context: Any, instead: AbstractContextManager | None) -> None:
    """Enters something else in the place of a ``torch.inference_mode`` that is on, or what one that is off enters."""
    context._inference_mode_context = instead or torch._C._InferenceMode(False)
    context._inference_mode_context.__enter__()


#: Whether a function's own ``apply`` runs, which may have been handed out in an earlier capture.
_applying = ContextVar("_applying", default=False)
#: Whether ``apply`` is compiled, as it is since torch 2.14.
_COMPILED = not isinstance(vars(torch.autograd.Function)["apply"], classmethod)


@contextmanager
def functions_replaced(instead: Callable[..., Any]) -> Iterator[None]:
    """Within it, what ``apply`` of a ``torch.autograd.Function`` calls; not of those that are mapped or differentiated.

    Args:
        instead: of the class, its own ``apply``, whether ``apply`` was taken from the class before and torch 2.14 or later
            has turned gradients off, and the arguments.
    """
    base: Any = _SingleLevelFunction
    if not _COMPILED:  # it calls that of its base
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
        if torch._C._are_functorch_transforms_active():  # which call it again, on what they have mapped
            return descriptor.__get__(None, cls)(*args, **kwargs)
        if _applying.get():
            return own(cls)(*args, **kwargs)
        return instead(cls, own(cls), False, args, kwargs)

    def look(cls: type, name: str) -> Any:
        """An attribute of a class. What is compiled looks for the names below in order; Python code does not."""
        found = lookup(cls, name)
        if _applying.get() or torch._C._are_functorch_transforms_active():
            return found
        waiting, state.waiting = getattr(state, "waiting", None), None
        if name == "_backward_cls" and (cls is CheckpointFunction or cls.__module__.partition(".")[0] != "torch"):
            state.waiting = (cls, "forward")
        elif waiting == (cls, "setup_context") == (cls, name):  # its own has run
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
    """Within it, transforms of ``torch.func`` call what is made of their implementations."""
    with ExitStack() as stack:
        for module, name in _TRANSFORMS:
            stack.enter_context(patch.object(module, name, instead(getattr(module, name))))
        yield


def forward_hooks(module: nn.Module, *, before: bool) -> Mapping[int, Callable]:
    """A module's forward hooks, or forward pre-hooks, by the numbers that torch gives them in order."""
    return module._forward_pre_hooks if before else module._forward_hooks


def forward_hooks_with_kwargs(module: nn.Module, *, before: bool) -> Iterable[int]:
    """The numbers of those that are given keyword arguments too."""
    return module._forward_pre_hooks_with_kwargs if before else module._forward_hooks_with_kwargs


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has backward hooks or backward pre-hooks."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def own_attributes(module: nn.Module) -> set[str | None]:
    """The names of what torch puts into a module, such as a weight that a pre-hook of torch's computes at each call."""
    return _OWN | {getattr(h, "name", getattr(h, "_tensor_name", None)) for h in module._forward_pre_hooks.values()}


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made a module, or compiles its calls."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def context_of(function: fx.GraphModule) -> Callable:
    """The ``context_fn`` of a checkpoint that was exported as an operator."""
    return function.meta.get("_checkpoint_context_fn", checkpoint.noop_context_fn)  # type: ignore[no-any-return]


def collectives_begun() -> int:
    """How many collectives this process has begun, in all of its groups."""
    groups = [g for g in [*dist.distributed_c10d._world.pg_map] if g.name() in ("gloo", "nccl")]  # others may not count
    return sum(group._get_sequence_number_for_group() for group in groups)  # type: ignore[attr-defined]


def group_time_limit(group: dist.ProcessGroup) -> timedelta:
    """How long a process group waits for a collective."""
    options: Any = group._get_backend(group._device_types[0]).options
    return getattr(options, "_timeout", dist.constants.default_pg_timeout)


def forget_groups(mesh: DeviceMesh) -> None:
    """Lets a mesh, and the one that it is a part of, hold no process group any more."""
    for each in (mesh, getattr(mesh, "_root_mesh", None)):
        getattr(each, "_pg_registry", {}).clear()


def cpp_compiler() -> str:
    """The C++ compiler that Inductor uses; a RuntimeError says that there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


class Inductor(NamedTuple):
    """What compiles one functional graph of ATen's operators, in the order in which it is called.

    Attributes:
        decompositions: what operators are traced to: operator -> function.
        cache_dir: the directory of what was compiled.
        prepare: runs the passes that a forward and a backward graph see together, in place.
        record_strides: notes how results lie in memory.
        compile: a graph and fake operands -> a function of a list of operands, which it empties.
    """

    decompositions: Callable[[], Mapping[Any, Callable]]
    cache_dir: Callable[[], str]
    prepare: Callable[..., Any]
    record_strides: Callable[[fx.GraphModule], None]
    compile: Callable[..., Any]


def inductor() -> Inductor:
    """Inductor, imported when it is asked for: that takes a fifth of the seconds in which a process imports autotp."""
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner, record_original_output_strides
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.runtime.runtime_utils import cache_dir
    from torch._inductor.utils import BoxedBool

    run = functools.partial(compile_fx_inner, cudagraphs=BoxedBool(False), is_inference=True)
    return Inductor(select_decomp_table, cache_dir, _recursive_joint_graph_passes, record_original_output_strides, run)
