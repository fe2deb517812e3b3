"""Sizes, strides and dtypes that models seldom have, each of which once gave a wrong number or crashed.

Earlier tests had dims that axes divide or that are far longer than the axes, contiguous operands, and float64.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch
from devices import slow_machine
from thinned import SCHEDULES, thinned
from torch import nn
from torch.nn import functional as F

import autotp


def run(model, args, plan=None, schedule="none"):
    """The output and the parameters' gradients, of the model or of a plan's devices in lockstep."""
    module = model if plan is None else autotp.simulate(model, plan, args, schedule=schedule)
    output = module(*args)
    model.zero_grad()
    if output.requires_grad:
        weights = torch.rand(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
        (output * weights).sum(dtype=torch.float64).backward()
    return {"output": output.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def planned(model, args, strategy, mesh, **options):
    return autotp.plan(model, slow_machine(mesh), args, strategy=strategy, mesh=mesh, **options)


class Transposed(nn.Module):
    """Batch norm of a transposed tensor with a dim of size 1, as in transformers' CLAP."""

    def __init__(self):
        super().__init__()
        self.bn, self.lin = nn.BatchNorm2d(16).eval(), nn.Linear(16, 8)
        self.bn.running_mean.normal_()
        self.bn.running_var.uniform_(0.5, 2.0)

    def forward(self, x):
        return (self.lin(self.bn(x.transpose(1, 3)).transpose(1, 3)) ** 2).mean()


class Scaled(nn.Module):
    """A dim that (2, 4) splits into 5 and 4, and these into 2, 2, 1 and 0, and into ones."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 1))

    def forward(self, x):
        return (x * self.weight).square().sum()


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.pool = nn.Conv1d(3, 7, 1), nn.GroupNorm(1, 7), nn.MaxPool1d(2)

    def forward(self, x):
        return self.pool(self.norm(self.inner(x))).square().mean()


class Nothing(nn.Module):
    """Batch norm of an empty tensor, and a reshape to another empty shape."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.bn(x).expand(0, 4, 8).reshape(6, 0, 0).sum()


class Pooled(nn.Module):
    """Transposed, normalised, averaged: the gradient of the mean is expanded, which torch's own kernel misreads."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(16)

    def forward(self, x):
        return self.bn(x.transpose(1, 3)).mean((2, 3))


@pytest.mark.parametrize("strategy", ["data", "megatron-1d"])
def test_verify_does_not_blame_a_plan_for_what_a_kernel_misreads(strategy):
    torch.manual_seed(0)
    model, args = Pooled().double().eval(), (torch.randn(4, 1, 64, 16, dtype=torch.float64),)
    plan = planned(model, args, strategy, (2,))
    assert autotp.verify(model, plan, args).departure is None


@pytest.mark.parametrize("schedule", thinned(["overlap", "none"], whole=True))
@pytest.mark.parametrize(
    "strategy", thinned(["auto", "megatron-1d", "zero3", "data", "tensor3d"], first=1, slow=2, whole=True)
)
@pytest.mark.parametrize(
    ("factory", "shape", "mesh"),
    [
        (Transposed, (4, 1, 64, 16), (4,)),
        (Transposed, (4, 1, 64, 16), (2, 2)),
        (Scaled, (1, 9, 1), (2, 4)),
        (Grouped, (6, 3, 5), (2, 3)),
        (Nothing, (0, 4, 1), (2,)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_corners_are_exact(factory, shape, mesh, strategy, schedule):
    torch.manual_seed(0)
    if strategy in ("data", "zero3") and len(mesh) > 1:
        mesh = (math.prod(mesh),)
    model, args = factory().double(), (torch.randn(shape, dtype=torch.float64),)
    try:
        plan = planned(model, args, strategy, mesh)
    except autotp.BatchError:
        assert shape[0] % math.prod(mesh)
        return
    plain = copy.deepcopy(model)
    expected, found = run(plain, args), run(model, args, plan, schedule)
    for name, want in [*expected.items(), *plain.named_buffers()]:
        got = found[name] if name in found else model.get_buffer(name)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


class Bags(nn.Module):
    """All results of bags; it depends on the weight's strides whether the kernel returns the bag of each index."""

    def __init__(self, copied):
        super().__init__()
        self.copied = copied

    def forward(self, x, ids, offsets, factors=None):
        if self.copied:
            return torch.embedding_bag(x.expand(6, 6).clone(), ids, offsets, per_sample_weights=factors)
        return torch.embedding_bag(x.t(), ids, offsets, False, 0, False, factors, False, padding_idx=None)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", thinned([torch.float64, torch.float32, torch.float16, torch.bfloat16], 3, whole=True))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("copied", [True, False])
def test_results_of_bags_do_not_depend_on_where_a_reshard_puts_the_weight(copied, weighted, dtype, schedule):
    torch.manual_seed(0)
    model, x = Bags(copied), torch.randn((6, 1) if copied else (4, 6), dtype=dtype)
    args = x, torch.tensor([1, 2, 3, 5, 1, 0]), torch.tensor([0, 3, 3]), *[torch.randn(12, dtype=dtype)[::2]] * weighted
    plan = autotp.plan(model, autotp.Topology.flat(2), args, mesh=(2,))
    served = {"expand": ("d1",), "permute": ("d0",)}
    operators = [replace(op, assignment=served.get(op.name, (None,))) for op in plan.operators]
    plan = replace(plan, operators=tuple(operators))
    for got, want in zip(autotp.simulate(model, plan, args, schedule=schedule)(*args), model(*args), strict=True):
        torch.testing.assert_close(got, want)


class Expanded(nn.Module):
    """A loss of expanded scores, of which one device has two copies in memory, and a device's part one."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(5, 8).double())

    def forward(self, target):
        return F.nll_loss(self.scores[1:5][:, 5:8].expand(2, 5, 4, 3).transpose(0, 2), target)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_scores_need_not_be_contiguous_on_every_device(schedule):
    torch.manual_seed(0)
    model, args = Expanded(), (torch.randint(5, (4, 2, 3)),)
    plan = autotp.plan(model, autotp.Topology.flat(2), args, mesh=(2,))
    served = {"slice_1": ("d1",), "permute": ("d2",), "nll_loss_nd": ("m",)}
    operators = [replace(op, assignment=served.get(op.name, (None,))) for op in plan.operators]
    expected, found = run(model, args), run(model, args, replace(plan, operators=tuple(operators)), schedule)
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want, rtol=1e-9, atol=1e-11)


class Loss(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss, self.scale = loss, nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.loss(x * self.scale, torch.zeros_like(x))


def normalised(norm):
    inner = nn.Linear(16, norm.normalized_shape[0])
    nn.init.normal_(inner.weight)
    return nn.Sequential(inner, norm, nn.Linear(norm.normalized_shape[0], 4))


class Cancelling(nn.Module):
    """A sum whose two halves exceed float16's range, with opposite signs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.cat([torch.full((16,), 6000.0), torch.full((16,), -5990.0)]))

    def forward(self, x):
        return (x.square() * 0 + self.weight).sum(1)


class Distances(nn.Module):
    """Distances to 40 rows, which torch computes by a product; to a device's 20 rows, by a kernel without halves."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 8))

    def forward(self, x):
        return torch.cdist(x, self.weight)


HALVES = {
    "distances": (Distances, (3, 8), "auto", (2,), ["cdist=c@x"]),
    "sum": (Cancelling, (64, 32), "auto", (2,), ["sum_1=d1@x"]),
    "mse": (lambda: Loss(F.mse_loss), (4096, 256), "data", (2,)),
    "l1": (lambda: Loss(F.l1_loss), (4096, 256), "data", (2,)),
    "batch norm": (
        lambda: nn.Sequential(nn.Conv2d(4, 16, 1, bias=False), nn.BatchNorm2d(16)),
        (32, 4, 16, 16),
        "data",
        (2,),
    ),
    "layer norm": (lambda: normalised(nn.LayerNorm(8192)), (16, 16), "auto", (2,), ["layer_norm=h0@x"]),
    "rms norm": (lambda: normalised(nn.RMSNorm(8192)), (16, 16), "auto", (2,), ["rms_norm=h0@x"]),
    "softmax": (lambda: nn.Sequential(nn.Linear(16, 4096), nn.Softmax(-1)), (16, 16), "tensor3d", (2, 2)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(HALVES))
def test_halves_are_as_precise_as_in_the_plain_model(name, dtype):
    """By the norms of errors against float64; in float16, squares of these overflow, and so do sums of them."""
    factory, shape, strategy, mesh, *constraints = HALVES[name]
    torch.manual_seed(0)
    model, x = factory().to(dtype), (3 * torch.randn(shape)).to(dtype)
    plan = planned(model, (x,), strategy, mesh, constraints=next(iter(constraints), ()))
    assert any(any(served) for served in plan.assignments.values()), "something is sharded"
    exact = run(copy.deepcopy(model).double(), (x.double(),))
    plain, found = run(copy.deepcopy(model), (x,)), run(model, (x,), plan)
    for part, want in exact.items():
        mine, its = ((each[part].double() - want).norm() / want.norm() for each in (found, plain))
        # Partial sums of products and gradients are sent in their dtype, as in Megatron-LM and FSDP2: one more rounding.
        allowed = 1.1 * its + 0.5 * torch.finfo(dtype).eps
        assert mine <= allowed, f"{part}: {mine:.3g} beside {its:.3g}"


class Narrowed(nn.Module):
    """Returns another dtype than the operand's."""

    def __init__(self, function, dtype):
        super().__init__()
        self.function, self.dtype = function, dtype

    def forward(self, x):
        return self.function(x, 0, dtype=self.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [torch.mean, torch.sum, torch.softmax, torch.log_softmax], ids=lambda f: f.__name__)
def test_results_in_halves_of_wider_operands_are_rounded_once(function, dtype):
    """Earlier tests of halves had only operands in halves, and those of ``dtype`` requested wider results."""
    torch.manual_seed(0)
    model, x = Narrowed(function, dtype), torch.randn(512, 16) + (3000 if function is torch.mean else 3)
    found, plain, want = run(model, (x,), planned(model, (x,), "data", (2,))), run(model, (x,)), function(x.double(), 0)
    mine, its = ((each["output"].double() - want).norm() / want.norm() for each in (found, plain))
    assert found["output"].dtype == dtype and mine <= 1.1 * its + 0.5 * torch.finfo(dtype).eps, (mine, its)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", ["data", "megatron-1d"])
def test_running_statistics_of_halves_are_as_precise_as_in_the_plain_model(strategy, dtype):
    """A variance beyond float16's range. Other tests start with momentum 1 or values around 1, where none is lost."""
    torch.manual_seed(0)
    model, steps = nn.BatchNorm1d(8).to(dtype), [(3 + 300 * torch.randn(512, 8)).to(dtype) for _ in range(3)]
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    ours = autotp.simulate(model, planned(model, (steps[0],), strategy, (2,)), (steps[0],))
    for x in steps:
        ours(x), plain(x), exact(x.double())
    for name in ("running_mean", "running_var"):
        want = getattr(exact, name)
        mine, its = ((getattr(each, name).double() - want).norm() / want.norm() for each in (model, plain))
        assert mine <= 1.1 * its + 0.5 * torch.finfo(dtype).eps, f"{name}: {mine:.3g} beside {its:.3g}"


class Sliced(nn.Module):
    """Expanded, summed, sliced: only on some devices may an all-reduce overwrite an operand, by its strides."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 12, 1, 1))

    def forward(self):
        summed = self.weight.transpose(0, 3).select(3, 7)[:, 0:8].expand(12, 8, 12).sum(0)
        return summed[2:8:2][:, 8:11].expand(2, 4, 3, 3).transpose(2, 3)


def test_devices_differ_in_what_may_be_written_over():
    """In lockstep, all devices must do the same; in earlier tests, their parts had the same strides."""
    torch.manual_seed(0)
    model = Sliced().double()
    plan = planned(model, (), "auto", (2, 3), schedule="overlap", chunks={})
    chosen = {
        "permute": ("d1", None), "select": (None, "d1"), "slice_1": (None, None), "expand": (None, "d2"),
        "sum_1": ("d2", None), "slice_2": ("d1", "+0"), "slice_3": (None, "d0"), "expand_1": ("d3", "d2"),
        "permute_1": ("d3", "+0"),
    }  # fmt: skip
    plan = replace(plan, operators=tuple(replace(op, assignment=chosen[op.name]) for op in plan.operators))
    expected, found = run(model, ()), run(model, (), plan, "overlap")
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want, rtol=1e-9, atol=1e-11)
