"""Functionalisation: programs that write in place, through views and under no_grad keep their meaning."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from capturing import check, compare, image, program, run, targets
from devices import slow_machine
from float64 import float64_mode
from thinned import thinned
from torch import nn

import autotp
from passes.capture import CaptureError, capture


def _add(self: Any, y: torch.Tensor) -> Any:
    y.add_(1).mul_(2)
    return y.relu_() * y


def _row(self: Any, y: torch.Tensor) -> Any:
    y = y * 1.5
    y[:, 0] = 3.0
    y[1:, 2:4] += y[:-1, 4:6]
    return y.sigmoid()


def _through_views(self: Any, y: torch.Tensor) -> Any:
    y = y.clone()
    other = y.t()
    view = y.view(2, 2, 8)
    view.add_(y.sum())
    view[0].transpose(0, 1)[1:3].mul_(0.5)
    other.diagonal().neg_()
    y.unsqueeze(0).flatten().narrow(0, 3, 4).copy_(other[:4, 0] * 2)
    return y + other.t() * view.reshape(4, 8)


def _windows(self: Any, y: torch.Tensor) -> Any:
    """Kernels that scatter into overlapping windows write to all of them; a copy of the windows has no overlap."""
    copied, cast = y.unfold(1, 3, 2).clone(), y.unfold(1, 3, 2) + 0
    copied[..., 2:] = 0.5
    cast[..., 0].mul_(2)
    cast.diagonal(0, 0, 2).neg_()
    return copied.sin(), cast


def _rotated(self: Any, y: torch.Tensor) -> Any:
    y = y * 2
    y.view(4, 2, 4).permute(1, 2, 0)[0].mul_(torch.arange(1.0, 5.0, dtype=y.dtype))
    return y.sin()


def _dims_in_place(self: Any, y: torch.Tensor) -> Any:
    y = y * 2
    rows, same = y[1:3], y
    y.neg_().transpose_(0, 1).mul_(1.5)
    y.unsqueeze_(0)
    same[0, 2:].add_(rows.sum())
    turned = rows.clone().t_().unsqueeze(1)
    turned.squeeze_(1).swapaxes_(0, 1).add_(1)
    return y.squeeze_().sin(), rows, turned


def _masked(self: Any, y: torch.Tensor) -> Any:
    y = y * 2
    y.masked_fill_(y > 1, 0.5)
    y[y < 0.3] = 0.1
    y.index_put_((torch.tensor([0, 2]), torch.tensor([1, 1])), y[0, :2].clone(), accumulate=True)
    y.scatter_(1, torch.zeros(4, 1, dtype=torch.long), y[:, 1:2].clone())
    return y.clamp_(max=2.0)


def _buffer(self: Any, y: torch.Tensor) -> Any:
    before = self.state.clone()
    with torch.no_grad():
        self.state.mul_(0.9).add_(y.mean(0))
        self.state[2:4] = y[0, :2]
    return y + self.state, before


def _buffer_and_view(self: Any, y: torch.Tensor) -> Any:
    view = self.state.view(2, 4)
    self.state.copy_(y.detach().sum(0))
    view[1].zero_()
    return y * self.state + view.sum()


def _no_grad(self: Any, y: torch.Tensor) -> Any:
    with torch.no_grad():
        z = y * 2
        w = z.exp()
        with torch.enable_grad():
            v = y.tanh() + z
        z.add_(1)
    return y * z + w + v


def _no_grad_through_views(self: Any, y: torch.Tensor) -> Any:
    t = torch.zeros_like(y)
    with torch.no_grad():
        self.state[2:4] = y[0, :2]
        t[0] = y[1]
    z = t + y * self.state
    t[1:3] = y[1:3]
    return z * t.detach()


def _into_out(self: Any, y: torch.Tensor) -> Any:
    with torch.no_grad():
        torch.mul(y[0], 2.0, out=self.state)
        nn.functional.normalize(self.state, dim=0, out=self.state)
    return y @ self.state.clone()


def _detached(self: Any, y: torch.Tensor) -> Any:
    with torch.no_grad():
        z = y * 2
    z.add_(y)
    z[0].mul_(3)
    return z.sin()


def _autocast_off(self: Any, y: torch.Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        return y.exp() * 2


def _split(self: Any, y: torch.Tensor) -> Any:
    a, b = y.chunk(2, dim=-1)
    c, d, e = y.split([1, 3, 4], dim=1)
    f, g, h, i = y.unbind(0)
    return a * b, c, (d, e), f + g * h - i, y.tensor_split(3, 1)[1]


def _unseen(self: Any, y: torch.Tensor) -> Any:
    y = y * 2
    with torch.no_grad():
        y[0].zero_()
    return y * y


def _unseen_through_views(self: Any, y: torch.Tensor) -> Any:
    y = (y * 1).unflatten(0, (2, 2))
    z = y.permute(2, 0, 1)
    with torch.no_grad():
        y.transpose(0, 1)[1:].sub_(2)
        z[0] = 0
    return y.sum(0), z[1]


def _unseen_between_others(self: Any, y: torch.Tensor) -> Any:
    y = y * 1
    row, apart = y[0], y.detach()
    apart.mul_(2)
    row.add_(1)
    with torch.no_grad():
        row.add_(3)
    apart[1] = 7
    return y + row, apart * 1


def _renormed(self: Any, y: torch.Tensor) -> Any:
    weight = y * 3
    return torch.nn.functional.embedding(torch.tensor([[0, 1], [1, 3]]), weight, max_norm=0.5).sum(1), weight


def _diagonals(self: Any, y: torch.Tensor) -> Any:
    tall, cube = torch.cat([y, y, y[:1]]), y.flatten()[:27].view(3, 3, 3)
    return (
        (y @ y.T).fill_diagonal_(-1e9).logsumexp(1),
        tall.clone().fill_diagonal_(3.0),
        tall[:, :3].clone().fill_diagonal_(3.0, wrap=True),
        y[:3].clone().fill_diagonal_(2, True) * y[:3],
        (cube * 2).fill_diagonal_(1.0),
    )


def _other_forms(self: Any, y: torch.Tensor) -> Any:
    powers = torch.arange(float(y.shape[1]))
    positive = y.abs() + 1
    return (
        (positive * 1.5).pow_(powers),
        (positive * 1.5).float_power_(powers),
        (positive * 1.5).float_power_(2.0),
        (y * 1.5).ldexp_(powers),
    )


def _views(self: Any, y: torch.Tensor) -> Any:
    y = y.reshape(2, -1, 4).movedim(0, -1).mT.unsqueeze(-1).squeeze(-1).flatten(-2).unflatten(1, (-1, 2))
    y = y.transpose(0, 1).swapaxes(1, 2).expand(-1, -1, 4).contiguous()[..., :].view_as(torch.empty(4, 2, 4)) + 0
    return (
        y,
        torch.broadcast_tensors(y, y[:1])[1].repeat(2, 1, 1),
        y.T.to(torch.float64).type_as(y).clone() * 1,
    )


def _dropped(self: Any, y: torch.Tensor) -> Any:
    y = nn.functional.dropout(y, 0.5, training=False)
    return nn.functional.dropout(y, 0.0, training=True, inplace=True).float().double()


def _multiple(self: Any, y: torch.Tensor) -> Any:
    values, indices = y.topk(3, dim=1)
    values.mul_(2)
    return {"values": values, "indices": indices, "none": None, "number": 3}


PROGRAMS = [
    _add, _row, _through_views, _windows, _rotated, _dims_in_place, _masked, _buffer, _buffer_and_view, _no_grad,
    _no_grad_through_views, _into_out, _detached, _autocast_off, _split, _views, _dropped, _multiple, _unseen,
    _unseen_through_views, _unseen_between_others, _renormed, _diagonals, _other_forms,
]  # fmt: skip


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_programs(function: Any) -> None:
    check(program(function), image(4, 8))


def test_what_is_overwritten_has_a_gradient_of_zeros() -> None:
    """An optimizer with weight decay decays such parameters, which it would not without a gradient."""
    model, x = program(lambda self, y: (y * 1.5).copy_(torch.ones(y.shape[1])) * self.scale).double(), image(4, 8)
    model.scale = torch.nn.Parameter(torch.ones(8, dtype=torch.float64))
    check(model, x)
    for each in (model, capture(model, (x,))):
        model.zero_grad()
        found = each(x) if each is model else run(each, model, (x,), {})[0]
        found.sum().backward()
        assert model.linear.weight.grad is not None and not model.linear.weight.grad.any()


def test_one_spelling() -> None:
    spelled = targets(check(program(_views), image(4, 8)))
    found = set(spelled)
    gone = (
        "view.default",
        "t.default",
        "transpose.int",
        "contiguous.default",
        "flatten.using_ints",
    )
    assert not found & {f"aten.{name}" for name in (*gone, "add.Tensor", "mul.Tensor")}
    assert spelled.index("aten.clone.default") == len(spelled) - 1  # the model returns a copy of its result
    assert "aten.split_with_sizes.default" in targets(check(program(_split), image(4, 8)))
    assert targets(check(program(_dropped), image(4, 8))) == [
        "aten.linear.default",
        "aten.to.dtype",
        "aten.to.dtype",
    ]


@pytest.mark.parametrize("training", [True, False])
def test_norms_that_remember(training: bool) -> None:
    norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True, momentum=0.3)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 4, 1)))
    check(model.train(training), image(2, 3, 6, 6))


_VIEWS: dict[str, Any] = {
    "select": lambda t, n: t[n % t.shape[0]],
    "last": lambda t, n: t[..., -1],
    "slice": lambda t, n: t[n % t.shape[0] :],
    "step": lambda t, n: t[..., n % 2 :: 2],
    "transpose": lambda t, n: t.transpose(0, -1),
    "rotate": lambda t, n: t.movedim(0, -1),
    "reshape": lambda t, n: t.reshape(-1),
    "unflatten": lambda t, n: t.unflatten(-1, (2, -1)) if t.shape[-1] % 2 == 0 else t,
    "unsqueeze": lambda t, n: t.unsqueeze(n % (t.dim() + 1)),
    "squeeze": lambda t, n: t.squeeze(),
    "narrow": lambda t, n: t.narrow(-1, 0, 1 + n % t.shape[-1]),
    "diagonal": lambda t, n: t.diagonal() if t.dim() == 2 else t,
    "contiguous": lambda t, n: t.contiguous(),
}
_WRITES: dict[str, Any] = {
    "add": lambda t, n, y: t.add_(n),
    "learned": lambda t, n, y: t.add_(y[0, n]),
    "multiply": lambda t, n, y: t.mul_(0.5 + n),
    "fill": lambda t, n, y: t.fill_(n),
    "copy": lambda t, n, y: t.copy_(t.detach().flip(0) * n),
    "clamp": lambda t, n, y: t.clamp_(-n - 1, n + 1),
}


def _random_program(seed: int) -> Any:
    """Four views, mostly of earlier views, and a write to one of all views after each of them."""
    chance = random.Random(seed)
    views = [(chance.choice(list(_VIEWS)), chance.randrange(8), chance.randrange(4)) for _ in range(4)]
    writes = [(chance.choice(list(_WRITES)), chance.randrange(8), chance.randrange(4)) for _ in range(4)]

    def function(self: Any, y: torch.Tensor) -> Any:
        # A buffer must not receive values that require a gradient; other tensors may. Under no_grad, values require none.
        buffer, fixed = seed % 3 == 0, seed % 6 == 0
        seen = [self.state.view(2, 4) if buffer else y * 2]
        for (view, of, i), (write, to, j) in zip(views, writes, strict=True):
            source, target = seen[of % len(seen)], seen[-1 - to % len(seen)]
            if source.dim():
                seen.append(_VIEWS[view](source, i))
            if target.numel() and target.dim():
                with torch.set_grad_enabled(not fixed):
                    _WRITES[write](target, j, y.detach() if buffer and not fixed else y)
        return [y.sum() + t.cos() for t in seen]

    return function


@pytest.mark.parametrize("seed", thinned(range(40), 4, whole=True))
def test_random_writes_through_views(seed: int) -> None:
    check(program(_random_program(seed)), image(4, 8))


def test_a_write_to_what_only_a_real_kernel_lays_out_anew_is_refused() -> None:
    """torch.export drops ``contiguous``, as fake and real result differ in strides, which they do not in the programs."""

    def copied(self: Any, y: torch.Tensor) -> Any:
        y = nn.functional.logsigmoid(y.t()).t()
        copy = y.contiguous()
        copy.add_(copy)
        return y

    with pytest.raises(CaptureError, match="log_sigmoid.*clone"):
        check(program(copied), image(4, 8))
    check(program(lambda self, y: nn.functional.logsigmoid(y).mul_(2)), image(4, 8))


def test_writes_to_an_angle_of_complex_numbers():
    def forward(self, y):
        angle = torch.polar(y.t(), y.t()).angle() if self.complex else y.t().angle()
        angle.contiguous().zero_()
        return angle

    made = program(forward)
    made.complex = True
    with pytest.raises(CaptureError, match="angle.*clone"):
        capture(made, (image(4, 8),))
    made.complex = False
    check(made, image(4, 8))


def test_inputs_keep_their_strides() -> None:
    """A copy of an expanded input has other strides, with which views are contiguous that are not in the model."""

    class Expanded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.transpose(0, 2).to(torch.float32).transpose(0, 2)
            y.contiguous()[:, :, 1:5].sub_(1)
            return y

    model, x = Expanded(), torch.randn(1, 2, 8).double().expand(8, 2, 8)
    compare(model, (x,), {}, capture(model, (x,)))


def test_a_write_to_what_only_a_real_kernel_makes_contiguous_is_refused() -> None:
    """Here, ``contiguous`` copies the fake result, but returns the real one itself."""

    def written(self: Any, y: torch.Tensor) -> Any:
        y = nn.functional.logsigmoid(y.t())
        y.contiguous()[:, 1:3].mul_(2)
        return y * 1

    with pytest.raises(CaptureError, match="log_sigmoid"):
        check(program(written), image(4, 8))


@pytest.mark.parametrize("operator", ["copysign", "xlogy", "logical_or"])
def test_a_write_to_what_only_a_fake_kernel_makes_contiguous_is_refused(operator: str) -> None:
    """Found by the fuzzer: the programs above do not permute operands of a binary operator."""

    def written(self: Any, y: torch.Tensor) -> Any:
        y = getattr(torch, operator)(y.t(), y.t().contiguous().flip(0)).t()
        copy = y.contiguous()
        y.fill_(0.5)
        return copy * 1

    with pytest.raises(CaptureError, match=f"{operator}.*clone"):
        check(program(written), image(4, 8))


@torch.library.custom_op("test_writes::double", mutates_args={"x"})
def double(x: torch.Tensor, *, times: float = 2.0) -> torch.Tensor:
    old = x.clone()
    x.mul_(times)
    return old


@double.register_fake
def _(x, *, times=2.0):
    return torch.empty_like(x)


@torch.library.custom_op("test_writes::swap_", mutates_args={"x", "y"})
def swap_(x: torch.Tensor, y: torch.Tensor) -> None:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)


@torch.library.custom_op("test_writes::swap", mutates_args=())
def swap(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 100  # unrelated to its name


swap.register_fake(lambda x, y: torch.empty_like(x))


@torch.library.custom_op("test_writes::fill", mutates_args={"x"})
def fill(x: torch.Tensor | None) -> None:
    if x is not None:
        x.fill_(1.0)


class Writer(nn.Module):
    """Changes copies of its inputs, a view of one, and a buffer in place, by custom operators."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.ones(4, 8))

    def forward(self, x, y):
        one, two = x.clone(), y.clone()
        old = double(one[:, ::2], times=3.0)
        swap_(one, two)
        double(self.seen)
        return self.linear(one) * self.seen + two, old


def test_operators_of_the_user_that_write_to_arguments():
    with float64_mode():
        torch.manual_seed(0)
        model = Writer()
        plain, args = copy.deepcopy(model), (torch.randn(4, 8), torch.randn(4, 8))
        plan = autotp.plan(model, slow_machine((2,)), args, strategy="megatron-1d")
        ours = autotp.simulate(model, plan, args)
        for _ in range(2):
            found, wanted = ours(*args), plain(*args)
            for got, want in zip(found, wanted, strict=True):
                assert torch.equal(got, want)
            found[0].sum().backward()
            wanted[0].sum().backward()
        assert torch.equal(ours.get_buffer("seen"), plain.seen) and (plain.seen == 4).all()
        for got, want in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda model, y: double(y), "no gradient flows"),
        (lambda model, y: swap_(y.detach().clone(), y), "no gradient flows"),
        (lambda model, y: fill(y), "no out-of-place form"),
    ],
)
def test_what_operators_of_the_user_may_not_write(write, message):
    class Model(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            write(self, y)
            return y

    with pytest.raises(CaptureError, match=message):
        capture(Model(8, 8), (torch.randn(4, 8),))
