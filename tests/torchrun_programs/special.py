"""Single cases under torchrun, by name."""

import atexit
import copy
import gc
import itertools
import math
import os
import tempfile
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import MODELS
from torch import nn
from torch.distributed._state_dict_utils import _broadcast_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autotp
from autotp.runtime.compiled import Overlap
from autotp.runtime.state import distribute
from passes.layouts.codes import fits, restorable
from passes.layouts.layout import place
from passes.overlap.launch import launch
from passes.overlap.schedule import Limits
from passes.world.process import ProcessWorld, _Messages
from passes.world.world import LocalWorld


def meta():
    """A model on meta is materialised module by module, equally on all ranks, and trained."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    torch.manual_seed(7)
    ids = torch.randint(0, 97, (4, 8))
    parallel = autotp.parallelize(model, None, kwargs={"input_ids": ids, "labels": ids}, strategy="megatron-1d", mesh=(2,))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = parallel(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3, losses
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, losses)
    assert all(other == losses for other in everywhere), everywhere


def mismatch():
    """Runs a plan for four devices on two processes."""
    model, args, kwargs = MODELS["llama"]()
    plan = autotp.plan(model, autotp.Topology.flat(4), args, kwargs, strategy="data")
    autotp.parallelize(model, None, args, kwargs, plan=plan)


def refused():
    """A batch that the mesh does not divide: rank 0 plans, and every rank raises its error."""
    autotp.parallelize(nn.Linear(4, 4), None, (torch.randn(1, 4),), strategy="data")


def dropout():
    """Shards draw different masks, replicas the same; every step draws new ones. Rank 0's generator determines them."""
    rank = dist.get_rank()

    class Drop(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return nn.functional.dropout(x * self.weight, 0.5, True)

    x = torch.ones(8, 64)
    for strategy, same_masks in (("data", False), ("megatron-1d", True)):
        model = Drop()
        parallel = autotp.parallelize(model, None, (x,), strategy=strategy)
        torch.manual_seed(rank)
        first, second = parallel(x), parallel(x)
        torch.manual_seed(rank)
        assert torch.equal(parallel(x), first)
        everywhere = [None] * 2
        dist.all_gather_object(everywhere, first.detach())
        assert torch.equal(everywhere[0], everywhere[1])
        assert not torch.equal(first, second)
        assert 0.35 < (first == 0).double().mean() < 0.65
        sharded = any(op.strategy for op in parallel.plan.operators if "dropout" in op.target)
        if sharded and not same_masks:
            assert not torch.equal(first[:4] == 0, first[4:] == 0)
        first.sum().backward()
        gradient = parallel.get_parameter("weight").grad.full_tensor()
        torch.testing.assert_close(gradient, first.detach().sum(0))

        parallel = autotp.parallelize(model, None, (x,), strategy=strategy, dropout="as-single")
        torch.manual_seed(rank)
        found, stands = [parallel(x), parallel(x)], torch.get_rng_state()
        torch.manual_seed(0)
        assert all(torch.equal(each, model(x)) for each in found), "what one device drops"
        assert torch.equal(torch.get_rng_state(), stands)
        torch.manual_seed(rank)
        state = autotp.RandomState().state_dict()
        torch.manual_seed(0)
        assert torch.equal(state["cpu"], torch.get_rng_state())


def local_inputs():
    """Each rank gives its own half of the batch, and gets it back; gradients are those of the whole batch."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).double()
    x = torch.randn(6, 8, dtype=torch.float64)
    parallel = autotp.parallelize(plain, None, (x,), strategy="data", inputs="local")
    mine = x[3 * dist.get_rank() :][:3]
    output, expected = parallel(mine), plain(x)
    torch.testing.assert_close(output, expected[3 * dist.get_rank() :][:3])
    output.square().mean().backward()
    expected.square().mean().backward()
    for n, p in plain.named_parameters():
        torch.testing.assert_close(parallel.get_parameter(n).grad.full_tensor(), p.grad)


class Short(nn.Module):
    """Dims of 9 and 7 elements: (2, 4) splits them into 5 and 4, or 4 and 3, of which the fourth part may be empty."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 1))
        self.inner, self.norm, self.pool = nn.Conv1d(1, 7, 1), nn.GroupNorm(1, 7), nn.MaxPool1d(2)

    def forward(self, x):
        return self.pool(self.norm(self.inner((x * self.weight).transpose(1, 2)))).square().sum()


def short_dims():
    """No kernel refuses an empty part, which would leave other ranks waiting; gradients are those of one device."""
    torch.manual_seed(0)
    plain, x = Short().double(), torch.randn(2, 9, 1, dtype=torch.float64)
    plain(x).backward()
    for strategy in ("3d", "summa-2d"):
        parallel = autotp.parallelize(plain, None, (x,), strategy=strategy, mesh=(2, 4))
        parallel(x).backward()
        for name, p in plain.named_parameters():
            torch.testing.assert_close(parallel.get_parameter(name).grad.full_tensor(), p.grad, rtol=1e-9, atol=1e-12)


def destroyed():
    """The module keeps no process groups alive until exit: their threads must not outlive the interpreter."""
    groups = [weakref.ref(dist.group.WORLD)]

    def check():
        if any(group() is not None for group in groups):
            os._exit(3)

    atexit.register(check)
    x = torch.ones(4, 4)
    for mesh, strategy in (((2,), "zero3"), ((2, 1), "auto")):
        parallel = autotp.parallelize(nn.Linear(4, 4), None, (x,), strategy=strategy, mesh=mesh)
        groups.append(weakref.ref(parallel.get_parameter("weight").device_mesh.get_group(0)))
        parallel(x).sum().backward()
        parallel.get_parameter("weight").grad.full_tensor()
    dist.destroy_process_group()
    with pytest.raises(autotp.AutotpError, match="the process group is gone"):
        parallel(x)


def once():
    """Process groups hold threads and connections, so they are made once in a job, for any number of modules."""
    x, descriptors = torch.ones(4, 4), []
    for mesh, strategy in 2 * (((2,), "zero3"), ((2, 1), "auto")):
        autotp.parallelize(nn.Linear(4, 4), None, (x,), strategy=strategy, mesh=mesh)(x).sum().backward()
        gc.collect()
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert max(descriptors[2:]) <= descriptors[1], descriptors


def twice():
    """Gradients of gradients, with respect to inputs and parameters, also pass through the collectives."""
    from overlapping import tokens
    from second_order import agree, critic, penalised, slopes

    def product(called, args):
        first = torch.autograd.grad(called(*args), list(called.parameters()), create_graph=True)
        norm = sum((slope * slope).sum() for slope in first)
        return slopes(called, norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def whole(found):
        return [slope.full_tensor() for slope in found]

    for schedule in ("overlap", "none"):
        for strategy in ("data", "zero3", "megatron-1d"):
            model, x = critic()
            parallel = autotp.parallelize(model, None, (x,), strategy=strategy, mesh=(2,), schedule=schedule)
            agree(whole(slopes(parallel, penalised(parallel, x))), slopes(model, penalised(model, x)))
            model, args = tokens()
            parallel = autotp.parallelize(model, None, args, strategy=strategy, mesh=(2,), schedule=schedule)
            assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in model.named_parameters()]
            agree(whole(product(parallel, args)), product(model, args))
    model, x = critic()
    parallel = autotp.parallelize(model, None, (x,), strategy="data", mesh=(2,))
    x.requires_grad_()
    y = parallel(x).sum()
    with torch.no_grad():
        x.mul_(2)
    try:
        torch.autograd.grad(y, x, create_graph=True)
    except autotp.AutotpError as error:
        assert "needs x as in the forward pass" in str(error), error
    else:
        raise AssertionError("it took what was changed for what it was")


def hooks():
    """Hooks see the model's own arguments, and a moving average of the weights is a module of its own."""
    for strategy in ("data", "zero3", "megatron-1d"):
        for schedule in ("overlap", "none"):
            torch.manual_seed(0)
            model, x = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)), torch.randn(8, 8)
            parallel = autotp.parallelize(model, None, (x,), strategy=strategy, mesh=(2,), schedule=schedule)
            seen = []
            parallel.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0].shape))
            parallel.register_forward_hook(lambda module, args, result: result * 2)
            parallel.register_full_backward_hook(lambda module, given, taken, seen=seen: seen.append("backward"))
            result = parallel(x)
            torch.testing.assert_close(result, 2 * model(x))
            result.sum().backward()
            assert seen == [x.shape, "backward"], seen
            average = AveragedModel(parallel, multi_avg_fn=get_ema_multi_avg_fn(0.5))
            before = {name: value.full_tensor().clone() for name, value in parallel.named_parameters()}
            with torch.no_grad():
                for value in parallel.parameters():
                    value.mul_(3)
            average.update_parameters(parallel)  # the first update copies them
            with torch.no_grad():
                for value in parallel.parameters():
                    value.div_(3)
            average.update_parameters(parallel)
            for name, value in average.module.named_parameters():
                torch.testing.assert_close(value.full_tensor(), 2 * before[name])
                assert value.grad is None and parallel.get_parameter(name).grad is not None
            with torch.inference_mode():
                torch.testing.assert_close(parallel(x.clone()), result.detach())
            average.module.load_state_dict(parallel.state_dict())
            torch.testing.assert_close(average(x).detach(), parallel(x).detach())
            average(x).sum().backward()


class Stateful(nn.Module):
    """Returns copies of what it is given; the gradient of one parameter is one number, and another is read transposed."""

    def __init__(self):
        super().__init__()
        self.linear, self.turned = nn.Linear(8, 8), nn.Parameter(torch.randn(6, 8, 4))
        self.level = nn.Parameter(torch.randn(8))
        self.register_buffer("kept", torch.zeros(8))

    def forward(self, x):
        y = self.linear(x) + self.level.sum()
        z = torch.bmm(self.turned.permute(2, 0, 1), x.t().expand(4, 8, 8))
        return y.square().mean() + z.square().mean(), x.clone(), self.kept.clone(), torch.tensor([1.0, 2.0])


def state():
    """Parameters change only between steps, gradients have parameters' strides, and copies are the caller's own."""
    for strategy in ("data", "zero3", "megatron-1d"):
        for schedule in ("overlap", "none"):
            torch.manual_seed(0)
            model, x = Stateful().double(), torch.randn(8, 8, dtype=torch.float64)
            plain, given = copy.deepcopy(model), x.clone()
            parallel = autotp.parallelize(model, None, (x,), strategy=strategy, mesh=(2,), schedule=schedule)
            steps = [torch.optim.AdamW(each.parameters(), lr=0.1, eps=1e-3, fused=True) for each in (plain, parallel)]
            for _ in range(3):
                for each, step in zip((plain, parallel), steps, strict=True):
                    step.zero_grad()
                    for _ in range(2):
                        loss, *copies = each(x)
                        loss.backward()
                        for one in copies:
                            one.add_(100)
                    nn.utils.clip_grad_norm_(each.parameters(), 1.0)
                    step.step()
            assert torch.equal(x, given) and not parallel.kept.any() and float(parallel(x)[3].sum()) == 3
            for name, parameter in parallel.named_parameters():
                wanted = plain.get_parameter(name)
                torch.testing.assert_close(parameter.full_tensor(), wanted, rtol=1e-9, atol=1e-12)
            loss = parallel(x)[0]
            with torch.no_grad():
                parallel.linear.weight.mul_(2)
            try:
                loss.backward()
            except ValueError as error:
                assert "linear.weight" in str(error), error
            else:
                raise AssertionError("a gradient of weights that are gone")
            parallel = autotp.parallelize(nn.Sequential(model.linear, nn.Linear(8, 8)).double(), None, (x,), mesh=(2,),
                                          strategy=strategy, schedule=schedule)  # fmt: skip
            loss = parallel(x).sum()
            with torch.no_grad():
                for parameter in parallel.parameters():
                    parameter.to_local().mul_(2)
            with pytest.raises((ValueError, RuntimeError), match="part of a parameter was changed|modified by an inplace"):
                loss.backward()
    model = nn.ModuleDict({"graph": nn.Linear(8, 8)})
    model.forward = lambda x: model["graph"](x)
    try:
        autotp.parallelize(model, None, (torch.randn(8, 8),), strategy="data", mesh=(2,))
    except ValueError as error:
        assert "graph cannot keep that name" in str(error), error
    else:
        raise AssertionError("a graph module has a graph of its own")


def orders():
    """Ranks with different measurements and predictions launch in the same order, as rank 0 determines it."""
    from overlapping import random_durations, tokens

    model, args = tokens()
    parallel = autotp.parallelize(model, None, args, strategy="megatron-1d", mesh=(2,), chunks={"batch": 2})
    rank = dist.get_rank()
    parallel._programs.first.schedules.how = Overlap(random_durations(rank), lambda *_: 64.0 * (1 + 1000 * rank))
    parallel(*args).backward()
    (made,) = parallel._programs.first.schedules.known.values()
    halves = made.forward, made.backward
    own = made.graphs.orders(made.graphs.slots(random_durations(rank), Limits()))
    theirs = [None, None]
    run = [[node.name for node in half.module.graph.nodes if node.target is launch] for half in halves]
    dist.all_gather_object(theirs, (run, own))
    assert theirs[0][0] == theirs[1][0] and all(len(launches) > 4 for launches in run)
    assert theirs[0][1] != theirs[1][1], "each alone would have taken another order"


def collectives():
    """For few and many bytes and all dtypes, collectives between processes give what one process computes."""
    _collectives_are_exact()


def collectives_between_nodes():
    """The same between nodes, where large tensors are exchanged as single messages; a wait for them can be resumed."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
        mine = _collectives_are_exact()
    rank = dist.get_rank()
    if mine.hosted[0][0]:
        time.sleep(2.5)  # longer than the wait that the other rank resumes
    begun = [getattr(mine, kind)([torch.full((2, 2**18), float(rank))], 0) for kind in ("all_gather", "all_to_all")]
    assert all(isinstance(one._work, _Messages) for one in begun)
    other = (rank + 2) % 4
    pair = torch.tensor([min(rank, other), max(rank, other)], dtype=torch.float32)
    gathered, exchanged = (one.wait()[0] for one in begun)
    assert torch.equal(gathered, pair.view(2, 1, 1).expand_as(gathered))
    assert torch.equal(exchanged, pair.view(2, 1).expand_as(exchanged))


def _collectives_are_exact():
    groups = [(0,), (1,), (0, 1)]
    mine, whole = ProcessWorld(init_device_mesh("cpu", (2, 2)), groups), LocalWorld((2, 2))
    place = whole.hosted.index(mine.hosted[0])
    shapes = [(), (1,), (4, 3), (4, 0), (4, 2500), (4, 80000)]
    for shape, dtype in itertools.product(
        shapes, [torch.float64, torch.bfloat16, torch.int32, torch.complex128, torch.bool]
    ):
        draw = torch.Generator().manual_seed(0)
        parts = [(2 * torch.randint(0, 2, shape, generator=draw)).to(dtype) for _ in range(4)]
        calls = [("all_gather", (axis,)) for axis in (0, 1)]
        if len(shape) > 1:
            parts = [part.reshape(2, 2, -1).transpose(1, 2) for part in parts]  # not contiguous
            calls += [("all_to_all", (axis,)) for axis in (0, 1)]
        if dtype != torch.bool:
            calls += [("reduce_scatter", (axis,)) for axis in (0, 1) if len(shape) > 1]
            calls += [("all_reduce", (axes, "sum")) for axes in groups]
        if not dtype.is_complex and dtype != torch.bool:
            calls += [("all_reduce", (axes, "max")) for axes in groups]
        for kind, rest in calls:
            expected = getattr(whole, kind)(parts, *rest).wait()[place]
            (found,) = getattr(mine, kind)([parts[place]], *rest).wait()
            where = f"{kind} {rest} of {dtype} {shape}"
            assert found.dtype == expected.dtype == dtype and found.is_contiguous(), where
            assert torch.equal(found, expected), where
    return mine


def lone_parts():
    """If one rank has one element of a dim and another more, autograd saves different tensors, and gathers none again."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8, 3, 7, dtype=torch.float64))

        def forward(self, x):
            return torch._weight_norm(self.weight, x[2:3, :, :1].expand(1, 3, 1), 1)

    torch.manual_seed(0)
    model, args = Scaled(), (torch.rand(5, 1, 2, dtype=torch.float64, requires_grad=True),)
    topology = autotp.Topology.flat(2, bandwidth="1000000 GB/s", latency="0.000001 us")
    plan = autotp.plan(model, topology, args, schedule="none", reshard_after_forward=True)
    assert plan.operators[-1].assignment == ("d1",) and plan.parameters["weight"] == "S(0)@x"
    found = []
    for each in (model, autotp.parallelize(copy.deepcopy(model), topology, args, plan=plan)):
        args[0].grad = None
        each(*args).pow(3).sum().backward()
        weight = each.weight.grad
        found.append([args[0].grad, weight.full_tensor() if each is not model else weight])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


def stored(state, wholes):
    """A saved state is restored by loading into other layouts, by loading in one process, and by broadcast from rank 0."""
    folder, elsewhere = [tempfile.mkdtemp()], {}
    dist.broadcast_object_list(folder)
    dcp.save(state, checkpoint_id=folder[0])
    for name, other in itertools.pairwise([*state, *state]):
        if wholes[name].shape == wholes[other].shape:
            elsewhere[name] = torch.zeros_like(state[other])
    dcp.load(elsewhere, checkpoint_id=folder[0])
    alone = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
    dcp.load(alone, checkpoint_id=folder[0], no_dist=True)
    broadcast = {name: torch.zeros_like(value) for name, value in state.items()}
    _broadcast_state_dict({} if dist.get_rank() else wholes, broadcast, torch.device("cpu"))
    for name, whole in wholes.items():
        assert torch.equal(alone[name], whole), name
        assert name not in elsewhere or torch.equal(elsewhere[name].full_tensor(), whole), name
        assert torch.equal(broadcast[name].to_local(), state[name].to_local()), name


def resting():
    """torch reassembles a parameter in any layout in which it may rest, and checkpoints hold it.

    Includes blocks where two axes shard, and parts of different sizes.
    """
    mesh, state, wholes = init_device_mesh("cpu", (2, 2)), {}, {}
    for shape, rows, columns in (((48, 12), (1, 2, 3, 4, 6), (1, 2, 3)), ((9, 20), (1,), (1, 5))):
        whole = torch.arange(float(math.prod(shape))).view(shape)
        placements = [Replicate(), *(place(0, blocks) for blocks in rows), *(place(1, blocks) for blocks in columns)]
        found = [layout for layout in itertools.product(placements, repeat=2) if fits(shape, layout, (2, 2))]
        kept = [layout for layout in found if restorable(layout, (2, 2))]
        assert 10 < len(kept) < len(found)
        for layout in kept:
            mine = state[f"{shape} {layout}"] = distribute(whole, layout, mesh)
            wholes[f"{shape} {layout}"] = whole
            assert torch.equal(mine.full_tensor(), whole), layout
            assert torch.equal(mine.to_local(), distribute_tensor(whole, mesh, layout).to_local()), layout
    stored(state, wholes)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x):
            return self.attend(x, x, x, need_weights=False)[0].pow(2).mean()

    torch.manual_seed(0)
    model, args = Attention().double(), (torch.randn(4, 8, 16, dtype=torch.float64),)
    nn.init.normal_(model.attend.in_proj_bias)
    parallel = autotp.parallelize(model, autotp.Topology.flat(4), args, strategy="summa-2d", mesh=(2, 2))
    parallel(*args).backward()
    model(*args).backward()
    state = get_model_state_dict(parallel, options=StateDictOptions(full_state_dict=True))
    for name, parameter in model.named_parameters():
        mine = dict(parallel.named_parameters())[name]
        assert torch.equal(mine.full_tensor(), parameter), name
        assert torch.allclose(mine.grad.full_tensor(), parameter.grad, rtol=1e-9, atol=1e-12), name
        assert dist.get_rank() or torch.equal(state[name], parameter), name
