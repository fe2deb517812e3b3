"""Parameters and inputs that a model changes in place change as in the model; see also torchrun_programs/written.py."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import torch.utils.checkpoint
from thinned import thinned
from torch import nn
from writing import WRITING, Recent, three_steps, whole

import autotp
from passes.capture import CaptureError, capture

WAYS = [("auto", (2,)), ("zero3", (4,)), ("megatron-1d", (4,)), ("tensor3d", (2, 2)), ("3d", (2, 2, 2))]


@pytest.mark.parametrize(
    ("kind", "strategy", "mesh", "schedule"),
    thinned([(k, s, m, c) for k in WRITING for s, m in WAYS for c in ("overlap", "none")], first=4, slow=2),
)
def test_three_steps(kind, strategy, mesh, schedule):
    torch.manual_seed(1)
    model, args, devices = kind().double(), WRITING[kind], torch.Size(mesh).numel()
    asked = {"strategy": strategy, "mesh": mesh, "schedule": schedule}
    plan = autotp.plan(model, autotp.Topology.flat(devices), args, **asked)
    three_steps(model, args, lambda model: autotp.simulate(model, plan, args))
    assert autotp.verify(model, plan, args).right


def test_attributes_that_carry_something_are_buffers_of_the_distributed_module(one_rank):
    torch.manual_seed(0)
    model, (x,) = Recent().double(), WRITING[Recent]
    parallel = autotp.parallelize(model, autotp.Topology.flat(1), (x,))
    assert not dict(model.recent.named_buffers()).keys() & {"calls", "mean", "kept"}
    assert not any(tensor.any() for tensor in (model.recent.calls, model.recent.kept))  # capturing changes nothing
    for module in (parallel, model):
        module(x)
        module.eval()
        with torch.no_grad():
            module(x[:4])  # runs another program
    assert parallel.recent.calls == model.recent.calls == 2
    assert parallel.state_dict().keys() == model.state_dict().keys()
    for name in ("mean", "kept", "one", "other"):
        assert torch.allclose(whole(getattr(parallel.recent, name)), getattr(model.recent, name), rtol=0, atol=1e-12), name
    assert torch.allclose(whole(parallel.last), model.last)


class _Trains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.mean = nn.Linear(8, 8), torch.zeros(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.head(x) - self.mean
        if self.training:
            self.mean = made.detach().mean(0)
        return made


def test_an_attribute_that_a_later_program_alone_changes_is_refused(one_rank):
    x = torch.randn(4, 8)
    parallel = autotp.parallelize(_Trains().eval(), autotp.Topology.flat(1), (x,))
    parallel(x)
    with pytest.raises(autotp.AutotpError, match=r"forward changes mean in this call.*register_buffer"):
        parallel.train()(x)
    model = _Trains()
    parallel = autotp.parallelize(model, autotp.Topology.flat(1), (x,))
    for module in (parallel, model):
        module(x)
    assert torch.allclose(parallel.eval()(x), model.eval()(x))


class _Leaves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.last, self.scale = nn.Linear(8, 8), torch.zeros(8), torch.ones(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.head(x) * self.scale
        if self.training:
            self.last = made.detach().mean(0)
            return made
        return made - self.last


@pytest.mark.parametrize("first", [True, False])
def test_an_attribute_that_some_calls_leave_and_others_read_is_refused(first):
    model, x = _Leaves().train(first), torch.randn(4, 8)
    simulated = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), (x,)), (x,))
    simulated(x)
    with pytest.raises(autotp.AutotpError, match="forward leaves last in some calls, and reads it in others"):
        simulated.train(not first)(x)


def test_constants_of_a_simulated_module_stay():
    model, x = _Leaves(), torch.randn(4, 8)
    simulated = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), (x,)), (x,))
    model.scale = torch.zeros(8)
    simulated.scale = model.scale
    with pytest.raises(autotp.AutotpError, match="scale was .* when the model was captured"):
        simulated(x)


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask, self.head = nn.Parameter(torch.zeros(8, 8), requires_grad=False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask.masked_fill_(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf).mul_(2)
        return ((self.head(x) + self.mask).softmax(-1) ** 2).sum()


def test_infinite_values_stay_infinite():
    torch.manual_seed(0)
    model, x = _Masked(), torch.randn(8, 8)
    expected = [copy.deepcopy(model)(x)]
    simulated = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), (x,)), (x,))
    expected.append(expected[0])
    for want in expected:
        assert torch.allclose(simulated(x), want)
    assert model.mask.isinf().sum() == 28


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        x.add_(y * 0 + 1)
        return (x * y * z * self.weight).sum()


def test_inputs_whose_change_would_be_lost_are_refused():
    x, y, z = torch.ones(4, 8), torch.ones(4, 8), torch.ones(8)
    model = _Scaled()
    plan = autotp.plan(model, autotp.Topology.flat(2), (x, y, z))
    simulated = autotp.simulate(model, plan, (x, y, z))
    with pytest.raises(
        autotp.AutotpError, match="input x: the model changes it in place, and input y lies in the same memory"
    ):
        simulated(x, x, z)
    with pytest.raises(autotp.AutotpError, match="input x: the model changes it in place, and input y needs a gradient"):
        simulated(x, y.clone().requires_grad_(), z)
    simulated(x.clone(), y, torch.ones(8, requires_grad=True)).backward()
    with pytest.raises(autotp.AutotpError, match="input x: the model changes it in place, and input x needs a gradient"):
        simulated(x.clone().requires_grad_() * 1, y, z)
    assert torch.equal(x, torch.ones(4, 8))
    simulated(x, y, z)
    assert torch.equal(x, torch.full((4, 8), 2.0))


class _FirstRow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:1].mul_(2)


def test_an_expanded_input_is_not_changed_in_place():
    x = torch.ones(2, 3)
    simulated = autotp.simulate(_FirstRow(), autotp.plan(_FirstRow(), autotp.Topology.flat(2), (x,)), (x,))
    assert torch.equal(simulated(x), torch.full((1, 3), 2.0)) and torch.equal(x[1], torch.ones(3))
    with pytest.raises(autotp.AutotpError, match="input x: .* it was expanded: several of its elements are one in memory"):
        simulated(torch.ones(1, 3).expand(2, 3))


class _Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(self.weight)


def test_writes_that_autograd_follows_are_refused():
    with pytest.raises(CaptureError, match="changes input 'x' in place, and a gradient flows there"):
        autotp.plan(_Weighed(), autotp.Topology.flat(2), (torch.ones(4, 8),))


def test_a_change_of_a_copy_in_another_dtype_is_refused():
    kind = next(kind for kind in WRITING if kind.__name__ == "Clamped")
    with pytest.raises(CaptureError, match="changes weight in place, and the precision gives it a copy in another dtype"):
        autotp.plan(kind(), autotp.Topology.flat(2), (torch.ones(8, 8),), precision="bf16-mixed")


def _beside(model, args, *calls, strategy="zero3"):
    """Whether results, inputs, gradients and parameters of model and simulation agree, for every call after the plan's."""
    plain, found = copy.deepcopy(model), []
    simulated = autotp.simulate(
        model, autotp.plan(model, autotp.Topology.flat(2), args, strategy=strategy, mesh=(2,)), args
    )
    for call in calls:
        both = []
        for each in (plain, simulated):
            given = [tensor.clone() for tensor in call]
            result = each(*given)
            result.sum().backward()
            both.append([result, *given, *(p.grad for p in each.parameters()), *each.parameters()])
            each.zero_grad()
        found += [torch.allclose(one.detach(), other.detach(), 1e-9) for one, other in zip(*both, strict=True)]
    return found


class _Program(nn.Module):
    def __init__(self, function, weight=None):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.head = function, nn.Linear(8, 8).double()
        self.weight = nn.Parameter(torch.randn(8, 8).double() if weight is None else weight)

    def forward(self, x):
        return self.function(self, x)


def _filled_anew(self, x):
    with torch.no_grad():
        self.weight.copy_(x)
    return (self.head(x) @ self.weight) ** 2


def _turned(self, x):
    with torch.no_grad():
        self.weight.mul_(-0.5j if self.weight.is_complex() else -0.0)
    return (self.head(x) * self.weight.new_ones(()) * self.weight).abs() + torch.copysign(x, self.weight.real)


def _no_dropout(self, x):
    hidden = self.head(x)
    return nn.functional.relu(nn.functional.dropout(hidden, 0.0), inplace=True) + hidden @ self.weight


@pytest.mark.parametrize(
    ("function", "weight"),
    [
        (_filled_anew, torch.full((8, 8), torch.nan).double()),
        (_filled_anew, torch.full((8, 8), torch.inf).double()),
        (_turned, None),
        (_turned, torch.ones(8, 8, dtype=torch.cdouble)),
        (_no_dropout, None),
    ],
)
def test_a_parameter_is_a_leaf_whatever_it_held(function, weight):
    x = torch.randn(8, 8).double()
    assert all(_beside(_Program(function, weight), (x,), (x,), (x + 1,)))


def _writes(changed, read=lambda x: x):
    """Returns a program that takes ``read(x)``, changes ``changed(x)`` in place, and then uses what it took."""

    def program(self, x):
        seen = read(x)
        changed(x).mul_(2)
        return self.head(seen) @ self.weight

    return program


def _computed(self, x):
    made = x + 1
    same = made.contiguous()
    same.mul_(2)
    return (self.head(made) + same) @ self.weight


_BY_STRIDES = {
    "flatten": _writes(lambda x: x.flatten()),
    "contiguous": _writes(lambda x: x.contiguous()),
    "format": _writes(lambda x: x[None, None].to(memory_format=torch.channels_last)),
    "cast": _writes(lambda x: x.double(memory_format=torch.contiguous_format)),
    "operator": _writes(lambda x: torch.ops.aten.contiguous(x)),
    "part": _writes(lambda x: x.chunk(2)[1].detach().contiguous()),
    "permuted": _writes(lambda x: x.mT.contiguous()),
    "read": _writes(lambda x: x, lambda x: x.contiguous()),
    "computed": _computed,
    "as_strided": lambda self, x: self.head(x.as_strided((4, 8), (16, 1))) @ self.weight,
    "computed strided": lambda self, x: self.head((x[None] * 2).as_strided((4, 8), (16, 1))) @ self.weight,
}


@pytest.mark.parametrize("kind", thinned(_BY_STRIDES, first=3, slow=3, whole=True))
def test_what_is_a_copy_or_not_by_strides_has_a_program_for_each_kind(kind):
    x = torch.randn(8, 8).double()
    program = _Program(_BY_STRIDES[kind])
    if kind == "as_strided":
        assert all(_beside(program, (x,), (x,), (x + 1,)))
        with pytest.raises(CaptureError, match="reads the memory of input 'x', which is not contiguous"):
            _beside(program, (x,), (x.t(),))
        return
    for one, other in ((x, x.t()), (x.t(), x)):
        assert all(_beside(program, (one,), (one,), (other,), (one,)))


def _only_copies_are_read(self, x):
    made = self.head(x).contiguous()  # whatever the strides of x
    other = made.reshape(4, 16)
    other.mul_(2)
    nn.functional.relu(made, inplace=True)
    return self.head(made) @ self.weight


def test_strides_of_inputs_do_not_matter_behind_a_product():
    x, program = torch.randn(8, 8).double(), _Program(_only_copies_are_read)
    for one, other in ((x, x.t()), (x.t(), x)):
        assert all(_beside(program, (one,), (one,), (other,)))
    captured = capture(program, (x,))
    assert not captured.written.strided


def test_what_copies_nothing_is_the_same_object():
    def same(self, x):
        made = x * 2
        view = made.contiguous()
        view.t_()
        self.weight = self.weight.contiguous()
        with torch.no_grad():
            fixed = (x * 3).contiguous()
        fixed += self.weight
        return self.head(made) @ self.weight * (1 if x.contiguous() is x else 2) + fixed

    x = torch.randn(8, 8).double()
    assert all(_beside(_Program(same), (x,), (x,)))


def test_every_program_sees_strides_as_they_are(caplog):
    model, wide = _Program(lambda self, x: self.head(x) * x.stride(0)), torch.randn(8, 16).double()
    x = wide[:, :8]
    simulated = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), (x,)), (x,))
    assert "forward asks x.stride()" in caplog.text
    assert torch.allclose(simulated(x), model(x))
    assert torch.allclose(simulated.eval()(x), model(x))
    with pytest.raises(CaptureError, match="asks for x.storage_offset"):
        capture(_Program(lambda self, x: self.head(x) * x.storage_offset()), (x,))


def _moving(self, x):
    self.weight.copy_(x * 2)
    return self.head(x @ self.weight)


def test_frozen_parameters_take_values_with_gradients():
    model, x = _Program(_moving), torch.randn(8, 8).double()
    model.weight.requires_grad_(False)
    plan = autotp.plan(model, autotp.Topology.flat(2), (x,), strategy="zero3", mesh=(2,))
    found = []
    for each in (copy.deepcopy(model), autotp.simulate(copy.deepcopy(model), plan, (x,))):
        given = x.clone().requires_grad_()
        each(given * 1).sum().backward()
        found.append(given.grad)
    assert torch.allclose(*found)
    simulated = autotp.simulate(model, plan, (x,))
    model.weight.requires_grad_()
    with pytest.raises(autotp.AutotpError, match="parameter weight: .* torch allows that of a frozen parameter"):
        simulated(x)


def _checkpointed(self, x):
    def inner(hidden):
        with torch.no_grad():
            self.weight.mul_(0.9)
        return torch.tanh(hidden @ self.weight)

    return torch.utils.checkpoint.checkpoint(inner, self.head(x), use_reentrant=False)


def test_changes_in_a_checkpoint_are_refused():
    with pytest.raises(CaptureError, match="changes parameter 'p_weight' in a checkpointed function"):
        autotp.plan(_Program(_checkpointed), autotp.Topology.flat(2), (torch.randn(8, 8).double(),))


def test_parameters_in_one_memory_are_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(autotp.AutotpError, match=r"0.weight and 1.weight lie in the same memory"):
        autotp.plan(model, autotp.Topology.flat(2), (torch.randn(8, 8),))


def test_a_copy_is_a_module_of_its_own():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(8, 8)
    simulated = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), (x,)), (x,))
    made = copy.deepcopy(simulated)
    assert torch.equal(made(x), simulated(x))
    with torch.no_grad():
        model[0].weight.zero_()
    assert not torch.equal(made(x), simulated(x))
    with pytest.raises(autotp.AutotpError, match="cannot be pickled"):
        pickle.dumps(simulated)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda self, x: self.head(x) * (1 if torch.is_grad_enabled() else 2), "asks torch.is_grad_enabled"),
        (lambda self, x: (y := self.head(x)) * (1 if y.requires_grad else 2), "asks x.requires_grad (test_written.py:"),
        (lambda self, x: (y := self.head(x)) * (1 if y.grad_fn else 2), "asks x.grad_fn"),
        (lambda self, x: (setattr(self, "weight", nn.Parameter(self.weight * 2)), self.head(x))[1], "the parameters of"),
    ],
)
def test_what_the_graph_does_not_follow_is_said(function, said, caplog):
    autotp.plan(_Program(function), autotp.Topology.flat(2), (torch.randn(8, 8).double(),))
    assert said in caplog.text


class _Defaults(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x, scale=torch.ones(8)):  # noqa: B008
        return self.head(x) * scale


def test_a_default_that_is_a_tensor_is_an_input():
    model, x = _Defaults(), torch.randn(8, 8)
    simulated = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), (x,)), (x,))
    for given in ((x,), (x, torch.full((8,), 2.0))):
        assert torch.allclose(simulated(*given), model(*given))


class _Shown(nn.Module):
    """``shown`` is a view of ``whole``, which evaluation changes in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("whole", torch.ones(8))
        self.register_buffer("shown", self.whole[2:6])
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        if not self.training:
            self.whole.mul_(0.5)
        return self.head(x) * self.shown


def test_what_shares_memory_does_so_in_later_programs():
    model, x = _Shown(), torch.randn(4, 4)
    simulated = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), (x,)), (x,))
    with pytest.raises(CaptureError, match="writes to memory that b_shown, b_whole share"):
        simulated.eval()(x)


class _Kept(nn.Module):
    """Keeps its last input in a buffer; ``table`` is a plain tensor, which no state dict has."""

    def __init__(self):
        super().__init__()
        self.head, self.table = nn.Linear(8, 8).double(), torch.ones(4, 8).double()
        self.register_buffer("last", torch.zeros(4, 8).double())

    def forward(self, x, y):
        self.last.copy_(x)
        y.mul_(2)
        return self.head(x) * y * self.table


def test_inputs_in_the_memory_of_state_are_refused():
    model, x = _Kept(), torch.randn(4, 8).double()
    args = (x, x.clone())
    simulated = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), args), args)
    for given, said in (
        ((model.last, x), "buffer last: .* input x lies in the same memory"),
        ((x, model.last), "input y lies in the same memory"),
        ((x, model.table), "input y: .* input c_table lies in the same memory"),
    ):
        with pytest.raises(autotp.AutotpError, match=said):
            simulated(*given)
    simulated(x, x.clone())


class _Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.register_buffer("state", torch.zeros(4, 8))

    def forward(self, x):
        self.state.copy_(torch.tanh(self.head(x) + self.state.clone()))
        return self.state.clone()


def test_a_gradient_from_call_to_call_is_warned_of(caplog):
    autotp.plan(_Remembers(), autotp.Topology.flat(2), (torch.randn(4, 8),))
    assert "gives buffer state a value with a gradient, which ends with the call" in caplog.text


class _Viewed(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.head, flat = nn.Linear(8, 8), torch.randn(8, 16)
        self.left, self.right = nn.Parameter(flat[:, :8]), nn.Parameter(flat[:, 8:])
        self.register_buffer("seen", self.head.weight.data if rows else torch.ones(8, 8))

    def forward(self, x):
        return self.head(x) @ self.seen @ self.left @ self.right


def test_state_that_shares_memory_with_a_trained_parameter_is_refused():
    x = torch.randn(4, 8)
    assert autotp.plan(_Viewed(False), autotp.Topology.flat(2), (x,)).layouts
    with pytest.raises(autotp.AutotpError, match=r"head.weight and seen lie in the same memory"):
        autotp.plan(_Viewed(True), autotp.Topology.flat(2), (x,))


class _Closed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head, self.lock = nn.BatchNorm1d(8), nn.Linear(8, 8), threading.Lock()
        self.steps = [lambda hidden: self.norm(self.head(hidden))]

    def forward(self, x):
        return self.steps[0](x).tanh()


def test_closures_are_followed_or_refused(one_rank):
    model, x = _Closed(), torch.randn(4, 8)
    plan, before = autotp.plan(model, autotp.Topology.flat(1), (x,)), copy.deepcopy(model.state_dict())
    assert autotp.verify(model, plan, (x,)).right
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    del model.lock  # further programs need a copy of the model
    parallel = autotp.parallelize(model, autotp.Topology.flat(1), (x,), plan=plan)
    assert torch.allclose(parallel(x), model(x))
    with pytest.raises(autotp.AutotpError, match="holds the model itself|changes .c_.* in place, which is a constant"):
        parallel.eval()(x)


class _Only(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x, scale=torch.full((8,), 2.0), /):  # noqa: B008
        return self.head(x) * scale


def test_a_default_that_is_a_tensor_may_come_by_position_alone():
    model, x = _Only(), torch.randn(4, 8)
    simulated = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), (x,)), (x,))
    assert torch.allclose(simulated(x), model(x))


def test_numbers_are_drawn_as_inputs_lie():
    model, x = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Dropout(0.5)).double(), torch.randn(4, 4, 6, 6).double()
    plan = autotp.plan(model, autotp.Topology.flat(2), (x,), strategy="data", mesh=(2,))
    simulated = autotp.simulate(model, plan, (x,), dropout="as-single")
    for each in (x, x.contiguous(memory_format=torch.channels_last), x):
        found = []
        for run in (simulated, model):
            torch.manual_seed(3)
            found.append(run(each))
        torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    assert len(simulated.programs) == 2
