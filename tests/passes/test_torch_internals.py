"""What autotp expects of each private name of torch, and that no other file uses private names."""

import ast
import logging
import pathlib
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed import _state_dict_utils
from torch.distributed._composable.contract import contract
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import checkpoint

from passes import torch_internals as internals

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("autotp", "passes", "costmodel")
aten = torch.ops.aten


@pytest.fixture
def group():
    """A process group of two with fake collectives, in which this process is rank 1."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2, timeout=timedelta(seconds=7))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def mesh(group):
    return init_device_mesh("cpu", (2,))


# Operators


def test_OpOverload():
    assert isinstance(aten.add.Tensor, internals.OpOverload)
    assert not isinstance(aten.add, internals.OpOverload)


def test_HigherOrderOperator():
    assert isinstance(torch.ops.higher_order.cond, internals.HigherOrderOperator)


def test_schema():
    found = internals.schema(aten.add_.Tensor)
    assert (found.name, found.overload_name, found.is_mutable) == ("aten::add_", "Tensor", True)
    assert [a.name for a in found.arguments if a.alias_info is not None and a.alias_info.is_write] == ["self"]


# Pytrees


def test_tree_flatten():
    leaves, structure = internals.tree_flatten({"a": [1, (2,)], "b": None})
    assert leaves == [1, 2, None]
    assert internals.tree_unflatten(leaves, structure) == {"a": [1, (2,)], "b": None}


def test_tree_unflatten():
    assert internals.tree_unflatten([3, 4], internals.tree_structure((0, [0]))) == (3, [4])


def test_tree_leaves():
    assert internals.tree_leaves([1, {"a": (2, 3)}]) == [1, 2, 3]


def test_tree_map():
    assert internals.tree_map(lambda a, b: a + b, [1, (2,)], [10, (20,)]) == [11, (22,)]


def test_tree_map_only():
    assert internals.tree_map_only(int, lambda x: -x, [1, "a"]) == [-1, "a"]


def test_tree_structure():
    assert internals.tree_structure([1, 2]) == internals.tree_structure(["a", None])
    assert internals.tree_structure([1, 2]) != internals.tree_structure((1, 2))


def test_TreeSpec():
    assert isinstance(internals.tree_structure([1]), internals.TreeSpec)
    assert internals.tree_structure([1, (2, 3)]).num_leaves == 3


def test_PyTree():
    assert internals.PyTree is not None  # used in annotations only


def test_tree_flatten_with_path():
    pairs, _ = internals.tree_flatten_with_path({"a": [1]})
    assert [(internals.keystr(path), leaf) for path, leaf in pairs] == [("['a'][0]", 1)]


def test_keystr():
    ((path, _),), _ = internals.tree_flatten_with_path((5,))
    assert internals.keystr(path) == "[0]"


# Tracing


def test_FakeTensorMode():
    with internals.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        made = torch.empty(1 << 50)  # takes no memory
        read = made[:2] + torch.nn.Parameter(torch.ones(2))
    assert read.shape == (2,) and made.fake_mode is mode
    assert mode.from_tensor(torch.ones(2, 3).t()).stride() == (1, 3)


def test_FakeTensor():
    with internals.FakeTensorMode():
        assert isinstance(torch.empty(1), internals.FakeTensor)
    assert not isinstance(torch.empty(1), internals.FakeTensor)


def test_detect_fake_mode():
    with internals.FakeTensorMode() as mode:
        made = torch.empty(1)
    assert internals.detect_fake_mode([made]) is mode
    assert internals.detect_fake_mode([torch.empty(1)]) is None


def test_DataDependentOutputException():
    with internals.FakeTensorMode(), pytest.raises(internals.DataDependentOutputException):
        torch.empty(1).item()


def test_DynamicOutputShapeException():
    with internals.FakeTensorMode(), pytest.raises(internals.DynamicOutputShapeException):
        torch.empty(3).nonzero()


def test_without_values(caplog):
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    try:
        for quiet in (True, False):
            caplog.clear()
            silent = internals.without_values() if quiet else nullcontext()
            with internals.FakeTensorMode(), silent, pytest.raises(RuntimeError, match="reduction dim"):
                torch.empty(2, 3) @ torch.empty(2, 3)
            torch.distributions.Distribution.set_default_validate_args(True)
            with internals.without_values() if quiet else pytest.raises(ValueError, match="constraint"):
                torch.distributions.Normal(torch.zeros(2), -torch.ones(2))
            assert ("meta for aten.mm" in caplog.text) != quiet
    finally:
        log.removeHandler(caplog.handler)


def test_TorchDispatchMode():
    seen = []

    class Noting(internals.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Noting():
        torch.ones(2) + 1
    assert aten.add.Tensor in seen


def test_disable_current_modes():
    with internals.FakeTensorMode():
        with internals.disable_current_modes():
            assert torch.ones(2).sum().item() == 2
        assert isinstance(torch.ones(2), internals.FakeTensor)


def test_DisableTorchFunction():
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args, **kwargs):
            raise AssertionError

    with internals.DisableTorchFunction():
        assert torch.add(torch.ones(2).as_subclass(Refusing), 1) is not None


def test_enable_python_dispatcher():
    with internals.enable_python_dispatcher(), internals.FakeTensorMode():
        assert aten.silu.default(torch.empty(2)).shape == (2,)


def test_tracing():
    with internals.FakeTensorMode() as mode, internals.tracing(internals.TracingContext(mode)):
        assert internals.detect_fake_mode() is mode


def test_TracingContext():
    with internals.FakeTensorMode() as mode:
        assert internals.TracingContext(mode).fake_mode is mode


def test_transforms_replaced():
    called = []

    def noted(function):
        return lambda *args, **kwargs: called.append(function.__name__) or function(*args, **kwargs)

    x = torch.ones(2)
    with internals.transforms_replaced(noted):
        torch.func.hessian(lambda x: x.sum())(x)
        torch.vmap(torch.sin)(x)
        torch.func.grad(torch.sum)(x)
        torch.func.grad_and_value(torch.sum)(x)
        y = x.requires_grad_().sum()
        torch.autograd.grad(y, x)
    assert {"vmap_impl", "grad_impl", "grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums", "grad"} == {*called}
    called.clear()
    torch.vmap(torch.sin)(x)
    assert not called


def test_dual_numbers():
    class Model(nn.Module):
        def forward(self, x):
            return torch.func.jvp(torch.sin, (x,), (x,))[1]

    graph = torch.export.export(Model(), (torch.ones(2, 3),)).graph
    assert {node.target for node in graph.nodes} & set(internals.dual_numbers)


test_predispatch = test_dual_numbers
test_apis = test_eager_transforms = test_transforms_replaced


def test_is_saving():
    found = []

    class Noting(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.detach.default:
                found.append(internals.is_saving(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with internals.FakeTensorMode(allow_non_fake_inputs=True), Noting():
        y = x.tanh()
        y.detach()
    assert found == [True, False]


def test_BoxedCodeGen():
    module = fx.symbolic_trace(nn.ReLU())
    module.graph.set_codegen(internals.BoxedCodeGen())
    module.recompile()
    given = [torch.tensor([-1.0, 2.0])]
    assert module(given).tolist() == [0.0, 2.0]
    assert given == []


# Tensors


def test_storage_id():
    tensor = torch.ones(4)
    assert internals.storage_id(tensor) == internals.storage_id(tensor[1:]) != internals.storage_id(tensor.clone())


def test_version():
    tensor = torch.ones(2)
    tensor.add_(1)
    tensor[0].mul_(2)
    assert internals.version(tensor) == 2


def test_versions_preserved():
    tensor = torch.ones(2)
    with internals.versions_preserved((tensor,)):
        tensor.add_(1)
    assert (internals.version(tensor), tensor.tolist()) == (0, [2, 2])


def test_view_base():
    tensor = torch.ones(2)
    assert internals.view_base(tensor.view(1, 2)) is tensor
    assert internals.view_base(tensor) is None


def test_is_zerotensor():
    assert internals.is_zerotensor(torch._efficientzerotensor(2))
    assert not internals.is_zerotensor(torch.zeros(2))


def test_held_elsewhere():
    alone, seen = torch.ones(2) * 2, torch.ones(2) * 2
    view = seen[1:]
    assert not internals.held_elsewhere(alone)
    assert internals.held_elsewhere(seen)
    assert view.tolist() == [2]


def test_has_gradient_hooks():
    plain, hooked, after = (torch.ones(2, requires_grad=True) for _ in range(3))
    hooked.register_hook(lambda gradient: None)
    after.register_post_accumulate_grad_hook(lambda tensor: None)
    assert [internals.has_gradient_hooks(each) for each in (plain, hooked, after)] == [False, True, True]


# DTensors


def test_local_tensor(mesh):
    part = torch.ones(2, requires_grad=True)
    made = DTensor.from_local(part.detach(), mesh, [Shard(0)]).requires_grad_()
    assert internals.local_tensor(made) is internals.local_tensor(made)
    assert internals.local_tensor(made).grad_fn is None
    assert made.to_local().grad_fn is not None


def test_dtensor_of(mesh):
    like = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    made = internals.dtensor_of(torch.zeros(2, 2), like)
    assert (made.shape, made.placements, made.requires_grad) == ((4, 2), (Shard(0),), False)


def test_dtensor_handlers(mesh, monkeypatch):
    asked = []
    check = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    monkeypatch.setitem(internals.dtensor_handlers, check, lambda operator, args, kwargs: asked.append(operator))
    gradient, found = distribute_tensor(torch.ones(4), mesh, [Shard(0)]), torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, torch.ones(1))
    assert asked == [check]


def test_StridedShard(mesh):
    made = internals.StridedShard(0, split_factor=2)
    assert (made.dim, made.split_factor) == (0, 2)
    part = distribute_tensor(torch.arange(8), mesh, [made], src_data_rank=None).to_local()
    assert part.tolist() == [2, 3, 6, 7]  # the second half of each block


def test_set_distribute_tensors(mesh, monkeypatch):
    seen, full = [], {"weight": _state_dict_utils._TensorInfo(torch.Size((2, 2)), torch.float32)}
    parts = {"weight": distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)])}
    monkeypatch.setattr(_state_dict_utils, "_distribute_tensors", internals.distribute_tensors)
    internals.set_distribute_tensors(lambda *given: seen.append(given[1]))
    _state_dict_utils._broadcast_tensors(full, parts, ["weight"], torch.device("cpu"))
    assert seen == [["weight"]]


test_distribute_tensors = test_set_distribute_tensors


def test_what_a_tensor_writes():
    for name in ("__create_chunk_list__", "__create_write_items__", "__get_tensor_shard__"):
        assert callable(getattr(DTensor, name))


# Autograd


def test_sequence_number():
    one = torch.ones(2, requires_grad=True) * 2
    between = internals.sequence_number()
    two = one * 2
    assert internals.sequence_number_of(one.grad_fn) < between <= internals.sequence_number_of(two.grad_fn)


test_sequence_number_of = test_sequence_number


def test_backward_pass():
    found, x = [internals.backward_pass()], torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: found.append(internals.backward_pass()))
    x.sum().backward()
    assert found[0] == -1 < found[1]


def test_set_aside():
    def hooks(letter):
        return torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(letter) or t, lambda t: t)

    class Listening(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append("call")
            return func(*args, **(kwargs or {}))

    found, x = [], torch.ones(2, requires_grad=True)
    with hooks("a"), hooks("b"), Listening():
        with internals.set_aside():
            x.square()
            assert not found
        x.square()
        assert found == ["b", "call"] or found == ["call", "b"]
        with pytest.raises(KeyError), internals.set_aside():
            raise KeyError
    with hooks("a"):
        found.clear()
        x.square()
    x.square()
    assert found == ["a"]


def test_queue_callback():
    found, x = [], torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: internals.queue_callback(lambda: found.append("over")))
    x.register_post_accumulate_grad_hook(lambda tensor: found.append("accumulated"))
    x.sum().backward()
    assert found == ["accumulated", "over"]


def test_collectives_begun():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(2))
    dist.broadcast(torch.ones(2), 0, group=dist.new_group([0]))
    assert internals.collectives_begun() == 2
    dist.destroy_process_group()
    assert internals.collectives_begun() == 0


def test_is_profiling():
    assert not internals.is_profiling()
    with torch.profiler.profile():
        assert internals.is_profiling()
    assert not internals.is_profiling()


def test_transforming():
    found = []
    assert not internals.transforming()
    torch.func.vmap(lambda x: found.append(internals.transforming()) or x)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        found.append(internals.transforming())
    assert found == [True, True] and not internals.transforming()


def test_enter_inference_mode(monkeypatch):
    def begun(context):
        internals.enter_inference_mode(context, torch.no_grad() if context.mode else None)

    monkeypatch.setattr(torch.inference_mode, "__enter__", begun)
    with torch.inference_mode():
        made = torch.ones(2)
        assert not torch.is_grad_enabled()
    with torch.inference_mode(mode=False):
        assert torch.is_grad_enabled()
    assert torch.is_grad_enabled() and not made.is_inference()


def test_functions_replaced():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    class Triple(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x * 3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 3 + 0 * ctx.saved_tensors[0]

    seen, early, x = [], (Double.apply, Triple.apply), torch.ones(1, requires_grad=True)

    def instead(cls, apply, early, args, kwargs):
        if cls not in (Double, Triple):  # the class that torch makes to vmap one
            return apply(*args, **kwargs)
        seen.append(cls)
        return apply(*args, **kwargs) + 10

    with internals.functions_replaced(instead):
        inside = [function(x).tolist() for function in (Double.apply, Triple.apply, *early)]
        mapped = torch.func.vmap(Triple.apply)(x)
        assert [Double.forward(None, 1), Triple.forward(1)] == [2, 3]
    assert inside == [[12], [13]] * 2 and mapped.tolist() == [3]
    assert seen == [Double, Triple] * 2
    assert [function(x).tolist() for function in (Double.apply, Triple.apply, *early)] == [[2], [3]] * 2
    assert seen == [Double, Triple] * 2
    assert [torch.autograd.grad(function(x), x)[0].item() for function in early] == [2, 3]


# Modules


def test_PROTECTED():
    class Part(nn.Module):
        pass

    made = Part()
    made.register_buffer("held", torch.ones(1), persistent=False)
    made.weight, made.child = nn.Parameter(torch.ones(1)), nn.ReLU()
    assert [*made._buffers, *made._parameters, *made._modules] == ["held", "weight", "child"]
    assert made._non_persistent_buffers_set == {"held"}
    assert made._get_name() == "Part" and made._apply(lambda tensor: tensor + 1).held.tolist() == [2]
    traced = fx.symbolic_trace(nn.ReLU())
    assert traced._graph is traced.graph
    assert set(internals.PROTECTED) <= {*vars(made), *dir(nn.Module), "_graph"}


def test_COMPOSED():
    made = nn.ReLU()
    made.__dict__[internals.COMPOSED] = {}
    contract()(lambda module: module)(made)
    assert len(made.__dict__[internals.COMPOSED]) == 1


def test_DDP_IGNORED(group):
    class Asked(nn.Module):
        def __getattr__(self, name):
            if name == internals.DDP_IGNORED:
                raise ZeroDivisionError
            return super().__getattr__(name)

    with pytest.raises(ZeroDivisionError):
        nn.parallel.DistributedDataParallel(Asked())


def test_own_attributes():
    made = nn.utils.spectral_norm(nn.Linear(2, 2))
    made.remembered = 3
    assert "weight" in internals.own_attributes(made)
    assert not {"remembered", "weight"} & internals.own_attributes(nn.Linear(2, 2))
    assert {*vars(nn.LSTM(2, 2)), *vars(nn.Linear(2, 2))} - internals.own_attributes(made) == {
        *nn.LSTM.__constants__,
        "in_features",
        "out_features",
        "_all_weights",
        "_flat_weights_names",
    }


def test_forward_hooks():
    module = nn.ReLU()
    first = module.register_forward_pre_hook(lambda *given: None)
    last = module.register_forward_hook(lambda *given, **named: None, with_kwargs=True)
    assert list(internals.forward_hooks(module, before=True)) == [first.id]
    assert list(internals.forward_hooks(module, before=False)) == [last.id]
    assert list(internals.forward_hooks_with_kwargs(module, before=True)) == []
    assert list(internals.forward_hooks_with_kwargs(module, before=False)) == [last.id]
    assert first.id < last.id


test_forward_hooks_with_kwargs = test_forward_hooks


def test_has_backward_hooks():
    plain, after, before = nn.ReLU(), nn.ReLU(), nn.ReLU()
    after.register_full_backward_hook(lambda *given: None)
    before.register_full_backward_pre_hook(lambda *given: None)
    assert [internals.has_backward_hooks(each) for each in (plain, after, before)] == [False, True, True]


def test_is_compiled():
    plain, inside = nn.ReLU(), nn.ReLU()
    inside.compile()
    assert [internals.is_compiled(each) for each in (plain, torch.compile(plain), inside)] == [False, True, True]


def test_OptimizedModule():
    assert isinstance(torch.compile(nn.ReLU()), internals.OptimizedModule)


def test_BatchNorm():
    assert isinstance(nn.BatchNorm2d(2), internals.BatchNorm)
    assert isinstance(nn.SyncBatchNorm(2), internals.BatchNorm)
    assert not isinstance(nn.GroupNorm(1, 2), internals.BatchNorm)


def test_reparametrize_module():
    module = nn.Linear(2, 2, bias=False)
    module.same = module.weight
    own, other = module.weight, torch.zeros(2, 2)
    with internals.reparametrize_module(module, {"weight": other}, tie_weights=True):
        assert module.weight is other and module.same is other
    assert module.weight is own and module.same is own


# Checkpoints


def test_checkpoint_hook():
    made = internals.checkpoint_hook(internals.CheckpointFrame(None, None, None, None))
    assert hasattr(made, "__enter__") and hasattr(made, "__exit__")


def test_CheckpointFrame():
    assert callable(internals.CheckpointFrame.save_inputs)


def test_CachingTorchDispatchMode(monkeypatch):
    seen, made = [], internals.CachingTorchDispatchMode.__init__

    def asking(self, policy, *args, **kwargs):
        seen.append(policy)
        made(self, policy, *args, **kwargs)

    def policy(context, function, *args, **kwargs):
        return checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    monkeypatch.setattr(internals.CachingTorchDispatchMode, "__init__", asking)
    checkpoint.create_selective_checkpoint_contexts(policy)
    assert seen == [policy]


def test_StopRecomputationError():
    seen = []

    def function(x):
        try:
            return x.sin().cos()
        except internals.StopRecomputationError:
            seen.append("stopped")
            raise

    x = torch.ones(2, requires_grad=True)
    checkpoint.checkpoint(function, x, use_reentrant=False).sum().backward()
    assert seen == ["stopped"]


def _contexts():
    return checkpoint.create_selective_checkpoint_contexts([aten.sin.default])


class _Checkpointed(nn.Module):
    def forward(self, x):
        return checkpoint.checkpoint(torch.sin, x, use_reentrant=False, context_fn=_contexts)


def test_TagActivationCheckpoint():
    exported = torch.export.export(_Checkpointed(), (torch.ones(2, requires_grad=True),), strict=True)
    (node,) = (n for n in exported.graph.nodes if isinstance(n.target, internals.TagActivationCheckpoint))
    function = getattr(exported.graph_module, node.args[0].target)
    assert internals.context_of(function) is _contexts


test_context_of = test_TagActivationCheckpoint


# Process groups


def test_default_group(group):
    assert internals.default_group() is group


def test_default_group_is_missing():
    with pytest.raises(ValueError, match="process group"):
        internals.default_group()


def test_default_store(group):
    assert isinstance(internals.default_store(), dist.Store)


def test_describe_group(group):
    internals.describe_group(group, "a mark")
    assert group.group_desc == "a mark"


def test_group_time_limit(group):
    assert isinstance(internals.group_time_limit(group), timedelta)


def test_forget_groups(mesh):
    assert mesh.get_group() is not None
    internals.forget_groups(mesh)
    assert not getattr(mesh, "_pg_registry", {})


# Compilation


def test_cpp_compiler():
    assert isinstance(internals.cpp_compiler(), str)


def test_has_triton():
    assert internals.has_triton() in (False, True)


def test_FileLock(tmp_path):
    with internals.FileLock(str(tmp_path / "lock")):
        assert (tmp_path / "lock").exists()


def test_inductor():
    found = internals.inductor()
    traced = make_fx(lambda x: (x.sin() + 1,), found.decompositions())(torch.ones(2))
    found.record_strides(traced)
    assert isinstance(found.cache_dir(), str)
    assert callable(found.prepare) and callable(found.compile)


# All of them


def test_every_name_has_a_test():
    named = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    names = set()
    for node in ast.parse(pathlib.Path(internals.__file__).read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("torch"):
            private = node.module.partition("._")[1] or any(each.name.startswith("_") for each in node.names)
            names |= {each.asname or each.name for each in node.names if private}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names |= {each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    assert {name for name in names if not name.startswith("_")} - {"FunctionMeta", "Inductor"} <= named
    assert len(names) > 60


def _private(node, own):
    """The private names of torch in a statement or expression."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
        found = [*(node.module or "").split("."), *(each.name for each in node.names)]
    elif isinstance(node, ast.Import):
        found = [part for each in node.names if each.name.startswith("torch.") for part in each.name.split(".")]
    elif isinstance(node, ast.Attribute) and not ast.unparse(node).startswith(("torch.ops.", "_aten.")):
        found = [node.attr]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        found = [node.value] if node.value in _TORCHS else []
    else:
        found = []
    return [name for name in found if name.startswith("_") and not name.startswith("__") and name not in own]


#: Attributes of torch's objects that may be named by strings.
_TORCHS = {*vars(nn.Module()), *dir(nn.Module), *dir(torch.Tensor), *dir(DTensor), *dir(fx.Graph), *dir(fx.Node)}
#: Private names of Python's, sympy's and transformers' classes.
_OTHERS = {
    "_Environ", "_build_accelerator_args", "_dataloaders", "_experts_implementation", "_from_config", "_get_grad_norm",
    "_getframe", "_init_weights", "_load_rng_state", "_module_format", "_print", "_replace", "_save_rng_state",
    "_set_signature_columns_if_needed",
}  # fmt: skip


def test_no_other_file_uses_private_names():
    trees = {p: ast.parse(p.read_text()) for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))}
    own = set(internals.PROTECTED) | _OTHERS
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own |= {node.attr} if ast.unparse(node.value) == "self" else set()
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
        for path, tree in trees.items()
        if path.name != "torch_internals.py"
        for node in ast.walk(tree)
        for name in _private(node, own)
    ]
    assert found == []
