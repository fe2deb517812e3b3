"""Unusual models: what torch.export accepts is planned; what cannot be sharded is replicated, with the same numbers."""

import copy
import math

import pytest
import torch
from devices import SLOW, slow_machine
from thinned import SCHEDULES, thinned
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import autotp


class Lookup(nn.Module):
    """Padding index, buffers, ignored labels, label smoothing, a dict of lists as output."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(13, 10, padding_idx=3)
        self.inner = nn.Linear(10, 7)
        self.outer = nn.Linear(7, 13)
        self.register_buffer("scale", torch.rand(7))

    def forward(self, ids, labels):
        x = self.inner(self.table(ids)).tanh() * self.scale
        y = self.outer(x)
        loss = F.cross_entropy(y.view(-1, 13), labels.view(-1), ignore_index=2, label_smoothing=0.1)
        return {"loss": loss, "rest": [y, x.sum((0, 1))]}


class Grouped(nn.Module):
    """Grouped-query attention with a causal mask inside the operator."""

    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(16, 16), nn.Linear(16, 16)
        self.k, self.v = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2)) + x


class Picture(nn.Module):
    """Grouped, strided and transposed convolutions, einsum, padding, rolling, an integer output."""

    def __init__(self):
        super().__init__()
        self.grouped = nn.Conv2d(4, 8, 3, padding=1, groups=4)
        self.strided = nn.Conv2d(8, 12, 3, stride=2)
        self.norm, self.group = nn.BatchNorm2d(12), nn.GroupNorm(2, 12)
        self.up = nn.ConvTranspose2d(12, 4, 2, stride=2)
        self.mix = nn.Parameter(torch.randn(12, 12))

    def forward(self, x):
        y = F.relu(self.norm(self.strided(self.grouped(x))))
        y = self.group(torch.einsum("nchw,cd->ndhw", y, self.mix))
        y = F.pad(self.up(y), (1, 1, 1, 1))
        return y.roll(1, -1).flip(2).clamp(-1, 1), F.avg_pool2d(y, 2).argmax(1)


class Tied(nn.Module):
    """A tied table, an unused layer, a no_grad region, stacking, splitting, indexing, gathering."""

    def __init__(self):
        super().__init__()
        self.table, self.inner, self.unused = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(3, 3)

    def forward(self, ids):
        x = self.table(ids)
        with torch.no_grad():
            mean = x.mean()
        x = self.inner(x) - mean
        x = torch.stack([x, x * 2]).sum(0)
        a, b = x.chunk(2, -1)
        x = torch.cat([F.silu(a) * b, a], -1)[:, torch.arange(ids.shape[1]).flip(0)]
        x = x.masked_fill(ids.unsqueeze(-1) == 1, 0.5)
        return F.linear(x, self.table.weight).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


class Statistics(nn.Module):
    """Operators without a rule among operators with one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 9)), nn.Parameter(torch.randn(9))

    def forward(self, x):
        y = (x @ self.a).softmax(-1)
        z = torch.nanmedian(y, -1)[0].unsqueeze(-1)
        chosen = torch.where(y > 0.1, y, x.sum())
        return y * self.b + z + torch.renorm(y, 2, 0, 1.0) + y.cumsum(0) + y.amax(0) + chosen, (y**2).mean(), y.std()


class Recurrent(nn.Module):
    """Nearly the whole model is one operator, whose only factor is the batch."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.cell(x)[0])


class Alone(nn.Module):
    """Has no inputs, and computes from its parameters."""

    def __init__(self):
        super().__init__()
        self.start, self.linear = nn.Parameter(torch.randn(8, 6)), nn.Linear(6, 4)

    def forward(self):
        return self.linear(self.start).tanh()


def remembering():
    """Running statistics of an instance norm, and vectors of a spectral norm, which are updated in place."""
    norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(4, 8, 3), norm, nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 4, 1)))


def encoder():
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)


class Words(nn.Module):
    """Gradients scaled by the frequency of words, and gradients that torch keeps sparse."""

    def __init__(self):
        super().__init__()
        self.often = nn.Embedding(12, 8, scale_grad_by_freq=True)
        self.seldom = nn.Embedding(12, 8, sparse=True)
        self.head = nn.Linear(8, 8)

    def forward(self, ids):
        return self.head(self.often(ids) * self.seldom(ids)).square()


class Bags(nn.Module):
    """Bags of embeddings of one size, weighted or not, and of given sizes."""

    def __init__(self):
        super().__init__()
        self.sums, self.means, self.largest = (nn.EmbeddingBag(12, 8, mode=mode) for mode in ("sum", "mean", "max"))
        self.padded = nn.EmbeddingBag(12, 8, padding_idx=3)

    def forward(self, ids, weights):
        begins = torch.tensor([0, 2, 2, 7])
        ragged = self.sums(ids.flatten()[:10], begins) + self.padded(ids[:4])
        return self.sums(ids, per_sample_weights=weights) * self.means(ids) + self.largest(ids), ragged.square()


class Checked(nn.Module):
    """Checks of values, a cache that starts empty, instance norms in training and in evaluation."""

    def __init__(self):
        super().__init__()
        self.linear, self.own = nn.Linear(8, 8), nn.InstanceNorm1d(4, affine=True)
        self.running = nn.InstanceNorm1d(4, affine=True, track_running_stats=True).eval()

    def forward(self, x, lengths):
        torch._check(lengths.max().item() <= 8)
        y = torch.cat([torch.tensor([], dtype=x.dtype), self.linear(x)], 1)
        torch._check(lengths.min().item() > 0)
        return self.running(self.own(y)).tanh()


class Waves(nn.Module):
    """Between a Fourier transform and its inverse, some frequencies are multiplied by complex weights in a copy."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5, dtype=torch.complex128))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        spectrum = torch.fft.rfft(self.head(x).transpose(1, 2))
        written = spectrum.clone()
        written[..., 1:3] = spectrum[..., 1:3].conj() * self.weight[:, 1:3]
        written[:, -2] = self.weight[0] * 2
        spectrum = written
        return torch.fft.irfft(spectrum, n=8).square(), torch.view_as_real(spectrum)


class Phases(nn.Module):
    """Complex inputs and outputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, z):
        made = torch.view_as_complex(self.linear(z.real + z.imag).unflatten(-1, (4, 2)).contiguous())
        return made * (z * z)[..., :4]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("strategy", ["data", "zero3", "megatron-1d"])
def test_conjugates_in_and_gradients_of_conjugates(strategy, schedule):
    torch.manual_seed(0)
    model, z = Phases().double(), torch.randn(4, 8, dtype=torch.complex128).conj()
    plan = autotp.plan(model, autotp.Topology.flat(2), (z,), strategy=strategy, mesh=(2,), chunks={})
    ours = autotp.simulate(model, plan, (z,), schedule=schedule)
    for loss in (
        lambda out: (out.conj() * torch.arange(4)).sum().real,
        lambda out: torch.view_as_real(out.conj().resolve_conj()).pow(3).sum(),
        lambda out: out.conj().imag.square().sum(),
    ):
        wanted = torch.autograd.grad(loss(model(z)), list(model.parameters()))
        found = torch.autograd.grad(loss(ours(z)), list(model.parameters()))
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


class Turned(nn.Module):
    """Complex constants, which the backward pass conjugates; an operand that ``einsum`` permutes, and one that it sums."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.einsum("btd->dbt", self.linear(x))
        turned = torch.view_as_complex(y.permute(1, 2, 0).unflatten(-1, (4, 2)).contiguous()) * (1 + 2j) / (3 - 1j)
        return turned.abs(), torch.exp(1j * torch.einsum("dbt->bd", y)).real


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("strategy", ["auto", "zero3", "megatron-1d"])
def test_complex_constants_and_sums_of_one_operand(strategy, schedule):
    torch.manual_seed(0)
    model, x = Turned().double(), torch.randn(4, 6, 8, dtype=torch.float64)
    plan = autotp.plan(model, autotp.Topology.flat(2, device=SLOW), (x,), strategy=strategy, mesh=(2,), chunks={})
    ours = autotp.simulate(model, plan, (x,), schedule=schedule)
    wanted, found = model(x), ours(x)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    losses = [sum(each.square().sum() for each in outputs) for outputs in (wanted, found)]
    slopes = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-9, atol=1e-12)
    assert schedule == "none" or all(ours._compiled.values()), "scheduled, not run as it is"


class Scaled(nn.Module):
    """A product over a sharded dim, multiplied by a number."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, factor):
        y = self.down(self.up(x).relu())
        return y * factor, y / (1 / factor), torch.add(y, y.flip(0), alpha=factor)


@pytest.mark.parametrize("planned_for", [2.0, math.inf])
@pytest.mark.parametrize("strategy", ["megatron-1d", "zero3"])
def test_terms_of_a_sum_do_not_become_infinite(strategy, planned_for):
    torch.manual_seed(0)
    model, x = Scaled().double(), torch.randn(4, 8, dtype=torch.float64)
    plan = autotp.plan(model, autotp.Topology.flat(2), (x, planned_for), strategy=strategy, mesh=(2,))
    ours = autotp.simulate(model, plan, (x, planned_for))
    for factor in (2.0, math.inf):
        torch.testing.assert_close(ours(x, factor), model(x, factor), rtol=1e-9, atol=1e-12, equal_nan=True)


class Mapped(nn.Module):
    """Functions of one element or row, mapped over all by ``torch.vmap``."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x):
        torch.vmap(lambda row: row.exp())(x)
        rows = torch.vmap(torch.vmap(lambda row: self.linear(row).tanh()))(x)
        return rows, torch.vmap(torch.vmap(lambda row: row.sum() * 2 + 1))(rows), torch.vmap(self.written)(rows)

    def written(self, rows):
        rows = rows.clone().mul_(3)
        rows[0] = 1.0
        return rows


class Potential(nn.Module):
    """Forces that are gradients of an energy, as in molecular models, and whose own gradients train the parameters."""

    def __init__(self):
        super().__init__()
        self.near, self.norm, self.far = nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 1)
        self.root = nn.RMSNorm(8)  # writes to its own intermediate results in place, as forward does
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, positions):
        positions = positions.detach().requires_grad_()
        with torch.no_grad():
            self.calls += 1
        distances = (positions.unsqueeze(1) - positions.unsqueeze(2)).square().sum(-1).add(1).sqrt()
        near = self.root(F.silu(self.near(positions)).mul_(2).tanh_())
        energy = (distances @ self.far(self.norm(near + self.near(positions)).tanh())).sum((1, 2))
        return energy, -torch.autograd.grad(energy.sum(), positions, create_graph=self.training)[0]


class Learning(nn.Module):
    """Steps of gradient descent in forward: of weights by ``torch.autograd.grad``, of an input by ``torch.func.grad``."""

    def __init__(self):
        super().__init__()
        self.net, self.norm = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)), nn.LayerNorm(6)

    def forward(self, x):
        # Its operator returns no gradients of x and the bias.
        (step,) = torch.autograd.grad(self.norm(x).pow(3).sum(), [self.norm.weight], create_graph=True)
        x = F.layer_norm(x, (6,), self.norm.weight - step / 10, self.norm.bias)
        weights = dict(self.net.named_parameters())
        for _ in range(2):
            loss = torch.func.functional_call(self.net, weights, (x,)).softmax(-1).square().mean()
            steps = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: weight - step for (name, weight), step in zip(weights.items(), steps, strict=True)}
        y = torch.func.functional_call(self.net, weights, (x,))
        return y - torch.func.grad(lambda y: self.net(y).sigmoid().sum())(y)


class Derived(nn.Module):
    """Transforms of ``torch.func``, also nested, and of functions that stop gradients."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.members = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def stopped(self, row):
        with torch.no_grad():
            factor = self.net(row).exp()
        return (factor * row.softmax(0) + row.sin() * row.detach()).sum()

    def forward(self, x):
        value, back = torch.func.vjp(self.net, x)
        along = torch.func.jvp(self.net, (x,), (torch.ones_like(x),))[1]
        curved = torch.vmap(torch.func.hessian(lambda row: self.net(row).square().sum()))(x).sum(-1)
        stopped = torch.vmap(torch.func.grad(self.stopped), out_dims=1)(x).t()
        # A torch kernel that takes its operands to be contiguous: autograd's rule copies them for it.
        stopped = stopped + torch.vmap(torch.func.jacrev(lambda row: F.layer_norm(row, (4,))))(x)[:, 1]
        weights = {n: torch.stack([m.get_parameter(n) for m in self.members]) for n in ("weight", "bias")}
        both = torch.vmap(lambda w: torch.func.functional_call(self.members[0], w, (x,)))(weights).mean(0)
        return back(value)[0] * along, curved, stopped, both, torch.vmap(lambda row: torch.eye(4, dtype=x.dtype) @ row)(x)


class Empty(nn.Module):
    """Parameters without elements, and a product over a dim of size 0."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.rows, self.columns = nn.Parameter(torch.empty(0, 8)), nn.Parameter(torch.empty(8, 0))

    def forward(self, x):
        return self.linear(torch.cat([x, 2 * self.rows])), x @ self.columns @ self.columns.t()


CASES = {
    "empty": (Empty, lambda: (torch.randn(8, 8).double(),)),
    "potential": (Potential, lambda: (torch.randn(8, 4, 3).double(),)),
    "learning": (Learning, lambda: (torch.randn(8, 6).double(),)),
    "mapped": (Mapped, lambda: (torch.randn(8, 4, 8).double(),)),
    "words": (Words, lambda: (torch.randint(0, 12, (8, 6)),)),
    "bags": (Bags, lambda: (torch.randint(0, 12, (8, 6)), torch.rand(8, 6).double())),
    "checked": (Checked, lambda: (torch.randn(8, 4, 8).double(), torch.arange(8) + 1)),
    "waves": (Waves, lambda: (torch.randn(4, 8, 8).double(),)),
    "lookup": (Lookup, lambda: (torch.randint(0, 13, (8, 6)), torch.randint(0, 13, (8, 6)))),
    "grouped": (Grouped, lambda: (torch.randn(4, 8, 16).double(),)),
    "picture": (Picture, lambda: (torch.randn(4, 4, 8, 8).double(),)),
    "tied": (Tied, lambda: (torch.randint(0, 11, (8, 6)),)),
    "statistics": (Statistics, lambda: (torch.randn(8, 6).double(),)),
    "recurrent": (Recurrent, lambda: (torch.randn(4, 3, 6).double(),)),
    "alone": (Alone, lambda: ()),
    "remembering": (remembering, lambda: (torch.randn(4, 4, 6, 6).double(),)),
    "derived": (Derived, lambda: (torch.randn(8, 4).double(),)),
    "encoder": (encoder, lambda: (torch.randn(4, 8, 16).double(),)),
}


def tensors(output):
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def loss_of(outputs):
    """Gives every element its own weight, so that a permuted result has another loss."""
    weigh = (t * torch.linspace(0.5, 1, t.numel(), dtype=t.dtype).view(t.shape) for t in outputs if t.requires_grad)
    return sum(t.sum() for t in weigh)


@pytest.mark.parametrize("mesh", thinned([(2, 2), (2,), (4,)], first=1, whole=True), ids=str)
@pytest.mark.parametrize("strategy", thinned(["auto", "tensor3d", "megatron-sp", "zero3"], first=1, whole=True))
@pytest.mark.parametrize("name", thinned(CASES, first=len(CASES) // 2, slow=len(CASES), whole=True))
def test_the_numbers_are_the_plain_models(name, strategy, mesh):
    factory, example = CASES[name]
    torch.manual_seed(1)
    args = example()
    torch.manual_seed(1)
    plain = factory().double()
    torch.manual_seed(1)
    model = factory().double()
    topology = slow_machine(mesh)
    plan = autotp.plan(model, topology, args, strategy=strategy, mesh=mesh)
    expected, outputs = plain(*args), autotp.simulate(model, plan, args)(*args)
    for got, want in zip(tensors(outputs), tensors(expected), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    loss_of(tensors(expected)).backward()
    loss_of(tensors(outputs)).backward()
    for (n, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        wanted = torch.zeros_like(want) if want.grad is None else want.grad.to_dense()
        found = torch.zeros_like(got) if got.grad is None else got.grad
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11, msg=lambda m, n=n: f"{n}: {m}")
    for want, got in zip(plain.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_a_reshape_by_other_strides_than_kernels_have():
    """Regression: inside `vmap`, torch.export made it a view, by the strides that it assumed for the norm's result."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(2)

        def forward(self, x):
            return torch.vmap(lambda row: row.reshape(1, 1, -1).sin())(self.norm(x.transpose(0, 2)).transpose(0, 2))

    model, args = Normed().double(), (torch.randn(2, 2, 2, 1, dtype=torch.float64, requires_grad=True),)
    other, found = copy.deepcopy(model), []
    plan = autotp.plan(model, autotp.Topology.flat(2), args)
    for each in (model, autotp.simulate(other, plan, args)):
        args[0].grad = None
        result = each(*args)
        result.pow(3).sum().backward()
        found.append([result, args[0].grad])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


def test_what_has_no_rule_is_reported():
    torch.manual_seed(1)
    plan = autotp.plan(Statistics().double(), autotp.Topology.flat(2), (torch.randn(8, 6).double(),))
    assert {"nanmedian", "renorm", "std"} == set(plan.replicated)


class Vector(nn.Module):
    """A linear operator whose weight is a vector, whereas the rule is for matrices."""

    def __init__(self):
        super().__init__()
        self.inner, self.weight = nn.Linear(6, 8), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return F.linear(self.inner(x), self.weight).square().mean()


def test_what_a_rule_does_not_fit_is_replicated_and_reported(caplog):
    torch.manual_seed(1)
    model, args = Vector().double(), (torch.randn(8, 6).double(),)
    plan = autotp.plan(model, autotp.Topology.flat(2), args, strategy="data")
    assert plan.replicated == ["linear_1"]
    assert "linear_1 (aten.linear.default) is computed whole on every device" in caplog.text
    torch.testing.assert_close(autotp.simulate(model, plan, args)(*args), model(*args), rtol=1e-9, atol=1e-12)


class NoSamples(nn.Module):
    """An empty batch: kernels that infer a size from the others cannot do so, and a fake kernel cannot tell."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(1, 4)

    def forward(self, x):
        larger = self.norm(nn.functional.interpolate(x, scale_factor=2))
        larger[:, 0] += 1
        return larger


def test_a_batch_without_samples():
    model, args = NoSamples().double(), (torch.randn(0, 4, 4, 4).double(),)
    plan = autotp.plan(model, slow_machine((2,)), args, mesh=(2,), constraints=["group_norm=c@x"])
    assert [op.assignment for op in plan.operators if op.name == "group_norm"] == [("c",)]
    simulated = autotp.simulate(model, plan, args)
    result = simulated(*args)
    assert result.shape == (0, 4, 8, 8)
    result.sum().backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_a_cell_of_a_batch_without_samples(cell):
    model, args = cell(4, 4).double(), (torch.randn(0, 4).double(),)
    plan = autotp.plan(model, slow_machine((2,)), args, mesh=(2,))
    (result, *_) = tensors(autotp.simulate(model, plan, args)(*args))
    assert result.shape == (0, 4)
    result.sum().backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_a_recurrent_layer_of_onednn_trains_in_the_order_of_autograd():
    """In bfloat16, its kernel keeps a workspace for the backward pass, which a scheduled graph would not have."""
    torch.manual_seed(0)
    model, x = nn.LSTM(8, 8, batch_first=True).bfloat16(), torch.randn(4, 3, 8, dtype=torch.bfloat16)
    plan = autotp.plan(model, autotp.Topology.flat(2), (x,), mesh=(2,), strategy="data")
    ours = autotp.simulate(model, plan, (x,), schedule="overlap")
    found = []
    for each in (ours, model):
        model.zero_grad()
        each(x)[0].square().sum().backward()
        found.append([parameter.grad.float() for parameter in model.parameters()])
    torch.testing.assert_close(*found, rtol=0.05, atol=0.05)
