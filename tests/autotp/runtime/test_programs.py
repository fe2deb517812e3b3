"""One module, many programs: modes, shapes and calls without gradients, over the same parameters."""

import copy
import dataclasses
import enum
import functools
import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from float64 import double, float64_mode
from models import MODELS
from thinned import SCHEDULES, thinned
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import prune
from torch.utils._pytree import tree_map, tree_structure
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import autotp
from autotp.runtime.programs import Key, blueprint

F64 = {"dtype": torch.float64}
SIX = {"rtol": 1e-9, "atol": 1e-12}


class Net(nn.Module):
    """Differs between training and evaluation by dropout and batch statistics; labels are optional."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop, self.second = (
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.0),
            nn.Linear(16, 4),
        )
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x, labels=None, *, times=1):
        y = self.second(self.drop(self.norm(torch.relu(self.first(x))))) * self.scale * times
        return y if labels is None else nn.functional.cross_entropy(y, labels)


def net():
    torch.manual_seed(0)
    return Net().double(), (torch.randn(8, 8, **F64), torch.randint(4, (8,)))


def distributed(model, args, strategy="megatron-1d", mesh=(4,), schedule="overlap", **options):
    plan = autotp.plan(model, autotp.Topology.flat(4), args, strategy=strategy, mesh=mesh, **options)
    return autotp.simulate(model, plan, args, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("strategy", "mesh"), thinned([("zero3", (4,)), ("data", (4,)), ("megatron-1d", (4,)), ("tensor3d", (2, 2))], first=1)
)
def test_training_with_evaluation_in_between(strategy, mesh, schedule):
    """Modes, a smaller last batch, and calls without labels or without gradients all use the same state."""
    model, (x, y) = net()
    plain = copy.deepcopy(model)
    ours = distributed(model, (x, y), strategy, mesh, schedule)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2, momentum=0.9) for each in (ours, plain)]
    for _ in range(2):
        for rows in (8, 5):  # the last batch is smaller
            losses = []
            for each, optimizer in zip((ours, plain), optimizers, strict=True):
                optimizer.zero_grad()
                losses.append(each.train()(x[:rows], y[:rows]))
                losses[-1].backward()
                optimizer.step()
            torch.testing.assert_close(*losses, **SIX)
        with torch.no_grad():
            torch.testing.assert_close(ours.eval()(x[:3]), plain.eval()(x[:3]), **SIX)
        with torch.inference_mode():
            torch.testing.assert_close(ours(x, labels=y, times=2), plain(x, labels=y, times=2), **SIX)
    for (name, mine), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, **SIX, msg=name)
    assert len(ours.programs) == 4
    assert all(each.plan.layouts == ours.programs[0].plan.layouts for each in ours.programs)
    assert [each.plan.mode for each in ours.programs] == ["train", "train", "inference", "inference"]


class Widened(nn.Module):
    """Norms in float32, as Llama's: graphs of different dtypes have different casts."""

    def __init__(self):
        super().__init__()
        self.inner, self.weight = nn.Linear(8, 8), nn.Parameter(torch.rand(8))

    def forward(self, x):
        y = self.inner(x)
        wide = y.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(y.dtype)


def test_programs_follow_the_dtypes_of_parameters():
    """Earlier tests only cast to another dtype and back, after which the first graph is right again."""
    torch.manual_seed(0)
    model, x = Widened(), torch.randn(8, 8)
    plain, ours = copy.deepcopy(model), distributed(model, (x,), "data")
    for dtype in (torch.bfloat16, torch.float64, torch.float32, torch.bfloat16):
        found = []
        for each in (ours, plain):
            each.to(dtype)
            each.zero_grad()
            found.append(each(x.to(dtype)))
            found[-1].sum().backward()
        assert found[0].dtype == dtype and {p.grad.dtype for p in model.parameters()} == {dtype}
        bound = {torch.bfloat16: 0.02, torch.float32: 1e-5, torch.float64: 1e-6}[dtype]
        torch.testing.assert_close(*found, rtol=bound, atol=bound)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=bound, atol=bound)
    assert [len(each.key.cast) for each in ours.programs] == [0, 3, 3]
    assert "3 parameters and buffers cast to float64" in str(ours.programs[2].key)


def test_evaluation_with_gradients_is_a_program_of_its_own():
    model, (x, y) = net()
    plain = copy.deepcopy(model).eval()
    ours = distributed(model, (x, y)).eval()
    ours(x, y).backward()
    plain(x, y).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **SIX)
    assert str(ours.programs[1]) == repr(ours.programs[1]) == "evaluation with gradients, inputs float64[8, 8], int64[8], 1"


class Way(enum.Enum):
    PLAIN = 1
    TWICE = 2


def test_members_of_an_enumeration_are_arguments():
    class Choosing(Net):
        def forward(self, x, way=Way.PLAIN, more=None):
            ways = [way, *(more or {}).get("ways", ())]
            return super().forward(x, times=1 + ways.count(Way.TWICE))

    torch.manual_seed(0)
    model, x = Choosing().double(), torch.randn(8, 8, **F64)
    plain = copy.deepcopy(model)
    ours = distributed(model, (x, Way.TWICE))
    for given in ((x, Way.TWICE), (x,), (x, Way.PLAIN, {"ways": [Way.TWICE, Way.TWICE]}), (x, Way.TWICE)):
        torch.testing.assert_close(ours(*given), plain(*given), **SIX)
    assert len(ours._programs.known) == 3


def test_programs_that_differ_in_what_they_write_are_two():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.register_buffer("one", torch.zeros(8))
            self.register_buffer("other", torch.zeros(8))

        def forward(self, x, z, first):
            mean = self.inner(x).detach().mean(0) + self.one + self.other
            (self.one if first else self.other).copy_(mean)
            (x if first else z).mul_(2)
            return self.inner(x + z) + mean

    torch.manual_seed(0)
    model, x = Writes().double(), torch.randn(8, 8, **F64)
    ours = distributed(copy.deepcopy(model), (x, x + 1, True))
    for first in (True, False, False, True):
        given = [[x.clone(), x + 1] for _ in range(2)]
        torch.testing.assert_close(ours(*given[0], first), model(*given[1], first), **SIX)
        torch.testing.assert_close(given[0], given[1], **SIX)
        for name in ("one", "other"):
            torch.testing.assert_close(getattr(ours, name), getattr(model, name), **SIX)


def test_zeros_of_both_signs_are_arguments():
    class Over(Net):
        def forward(self, x, by=1.0):
            return super().forward(x) / torch.tensor(by, **F64)

    torch.manual_seed(0)
    model, x = Over().double(), torch.randn(8, 8, **F64)
    ours = distributed(copy.deepcopy(model), (x,))
    for by in (0.0, -0.0, math.nan, math.nan):
        torch.testing.assert_close(ours(x, by), model(x, by), equal_nan=True, **SIX)
    assert len(ours._programs.known) == 4


def test_calls_are_told_apart_here_and_alike_on_all_ranks():
    """Ranks compare keys as text, which contains no addresses and does not depend on the order of a set's elements."""

    def made():
        class Held:
            pass

        def triple(x):
            return 3 * x

        return [triple, torch.relu, torch.nn.functional.gelu, Held(), torch.Generator(), functools.partial(triple, 2)]

    def key(value):
        return Key((True,), True, ((type(value), value),), tree_structure({"value": value}))

    mine, theirs = made(), made()
    for one, other in zip(mine, theirs, strict=True):
        assert str(key(one)) == str(key(other)), "as another process has it"
    assert [key(one) == key(other) for one, other in zip(mine, theirs, strict=True)] == [False, True, True, *[False] * 3]
    assert len({str(key(one)) for one in mine}) == len(mine)
    assert f"{__name__}.test_calls_are_told" in str(key(mine[0]))
    assert str(key(frozenset("abc"))).endswith("{'a', 'b', 'c'}")
    assert str(key("<A at 0x1>")) != str(key("<A at 0x2>"))


@pytest.mark.parametrize("frozen", ["norm", "drop"])
def test_a_part_in_another_mode(frozen):
    """Modules may be switched one by one, as in fine-tuning with frozen statistics."""
    model, (x, y) = net()
    model.drop.p = 0.5 if frozen == "drop" else 0.0
    plain = copy.deepcopy(model)
    ours = distributed(model, (x, y))
    for each in (ours, plain):
        each.get_submodule(frozen).eval()
    torch.testing.assert_close(ours(x, y), plain(x, y), **SIX)
    assert len(ours.programs) == 2
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean, **SIX)


def test_programs_are_found_again_and_bounded():
    model, (x, y) = net()
    ours = distributed(model, (x, y))
    ours._programs.most = 3
    with torch.no_grad():
        for rows in (8, 4, 8, 4):
            ours(x[:rows], y[:rows])
    assert len(ours.programs) == 3
    with torch.no_grad(), pytest.raises(autotp.AutotpError, match=r"(?s)float64\[2, 8\].*max_programs=3.*float64\[4, 8\]"):
        ours(x[:2], y[:2])
    with torch.no_grad():
        assert ours(x[:4], y[:4]).shape == model(x[:4], y[:4]).shape, "those that there are still run"
    for wrong in ({"max_programs": 0}, {"debug": "no"}, {"broadcast": "False"}, {"initialise": 7}, {"topology": object()}):
        with pytest.raises(autotp.AutotpError, match=next(iter(wrong))):
            autotp.parallelize(model, **wrong)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, step=0):
        return self.linear(x) * (2 if step > 100 else 1)


def test_what_forward_ignores_needs_no_program(caplog):
    """Calls differ in an argument that is read or ignored: programs are limited in number, kinds of calls are not."""
    model, x = Counting().double(), torch.randn(4, 8, **F64)
    ours = distributed(model, (x, 0))
    ours._programs.most = 2
    for step in range(4):
        torch.testing.assert_close(ours(x, step), model(x, step), **SIX)
    assert len(ours.programs) == 1
    assert sum("kinds of calls run 1 programs" in each.message for each in caplog.records) == 2
    ours(x, 101)
    ours(x, 102)
    with torch.no_grad(), pytest.raises(autotp.AutotpError, match="max_programs=2"):
        ours(x, 0)


def test_programs_made_ahead_of_time():
    model, (x, y) = net()
    ours = distributed(model, (x, y))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = ours.prepare((x[:4],), {"times": 3}, mode="inference")
    assert ours.training and made is ours.programs[1] and made.plan.mode == "inference"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        ours.eval()(x[:4], times=3)
    assert ours.programs == (ours.programs[0], made)
    assert ours.prepare((x, y), mode="train") is ours.programs[0]
    with pytest.raises(autotp.AutotpError, match="mode='test' is unknown; choose one of train, inference"):
        ours.prepare((x, y), mode="test")


def test_a_plan_for_inference_stays_one():
    model, (x, _) = net()
    ours = distributed(model.eval(), (x,), mode="inference")
    plain = copy.deepcopy(model)
    torch.testing.assert_close(ours(x), plain(x), **SIX)
    torch.testing.assert_close(ours(x[:6]), plain(x[:6]), **SIX)
    assert [each.plan.mode for each in ours.programs] == ["inference"] * 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_outputs_that_stay_sharded_are_whole_in_lockstep(schedule):
    """Also in later programs; a single device would have only its part of the outputs."""
    model, (x, y) = net()
    plain = copy.deepcopy(model)
    asked = {"outputs": "dtensor", "constraints": ["output:0=S(0)@x"]}
    ours = distributed(model, (x,), "data", schedule=schedule, **asked)
    for rows in (8, 4):
        found = []
        for each in (ours, plain):
            each.zero_grad()
            scores = each(x[:rows])
            nn.functional.cross_entropy(scores, y[:rows]).backward()
            found += [scores, each.get_parameter("first.weight").grad]
        torch.testing.assert_close(found[:2], found[2:], **SIX)
    assert len(ours.programs) == 2


def test_micro_batches_of_different_sizes():
    """Pending gradients belong to two programs; the last backward pass reduces all of them."""
    model, (x, y) = net()
    model.norm.eval()
    plain = copy.deepcopy(model)
    ours = distributed(model, (x, y), "data")
    parts = (slice(0, 4), slice(4, 8), slice(0, 2))
    for number, part in enumerate(parts):
        plain(x[part], y[part]).backward()
        if number < 2:
            with ours.no_sync():
                ours(x[part], y[part]).backward()
        else:
            ours(x[part], y[part]).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **SIX)
    with ours.no_sync():
        ours(x[:4], y[:4]).backward()
    with torch.no_grad():
        model.second.bias.add_(1)
    with pytest.raises(autotp.AutotpError, match="parameters were changed while gradients of steps under no_sync"):
        ours(x[:2], y[:2])


def test_what_does_not_fit_is_planned_all_the_same():
    model, (x, y) = net()
    ours = distributed(model, (x, y), "data")
    ours._programs.plan = dataclasses.replace(ours._programs.plan, memory_bound=4e3)
    with torch.no_grad():
        ours(x.repeat(64, 1))
    assert ours.programs[1].plan.memory_bound == float("inf")


def test_the_call_is_the_models():
    model, (x, y) = net()
    ours = distributed(model, (x, y))
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        ours(x, other=y)
    with pytest.raises(autotp.AutotpError, match=r"torch\.export failed on Net"):
        ours(x[:, :4], y)
    assert len(ours.programs) == 1
    torch.testing.assert_close(ours(x, y), model(x, y), **SIX)


@pytest.mark.parametrize("schedule", thinned(["none", "overlap"], slow=1, whole=True))
def test_a_checkpoint_sees_nothing_of_a_program_that_is_made_within_it(schedule):
    """The same holds for selective checkpoints and other saved-tensor hooks."""
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.relu.default])
    model, (x, y) = net()
    for way in ("plain", "selective", "hooks"):
        for rows in (len(x), 4):
            ours = distributed(model, (x, y), schedule=schedule)
            found = []
            for each in (ours, model):
                model.zero_grad()
                if way == "hooks":
                    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy(), torch.from_numpy):
                        loss = each(x[:rows], y[:rows])
                else:
                    how = {"context_fn": contexts} if way == "selective" else {}
                    loss = checkpoint(each, x[:rows], y[:rows], use_reentrant=False, **how)
                loss.backward()
                found.append([loss.detach(), *(p.grad for p in model.parameters())])
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_model_that_cannot_be_copied_has_one_program():
    model, _ = net()
    model.lock = threading.Lock()
    assert isinstance(copied := blueprint(model), autotp.AutotpError)
    assert "Net cannot be copied to make one (TypeError: cannot pickle" in str(copied)
    bare = blueprint(net()[0])
    assert all(value.untyped_storage().nbytes() == 0 for value in bare.state_dict().values())


@pytest.mark.parametrize(
    ("name", "strategy", "mesh"),
    thinned(
        [("gpt2", "megatron-sp", (2,)), ("llama", "auto", (2, 2)), ("unet", "tensor3d", (2, 2)), ("bert", "3d", (2, 2, 2))],
        slow=1,
    ),
)
def test_models_of_the_suite(name, strategy, mesh):
    """Runs half the batch in evaluation mode."""
    model, args, kwargs = double(MODELS[name])

    def half(leaf):
        return leaf[: len(leaf) // 2] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf

    topology = autotp.Topology.flat(math.prod(mesh))
    with float64_mode():
        plan = autotp.plan(model, topology, args, kwargs, strategy=strategy, mesh=mesh)
        plain = copy.deepcopy(model).eval()
        ours = autotp.simulate(model, plan, args, kwargs, schedule="overlap").eval()
        halves, named = tree_map(half, (args, kwargs))
        with torch.no_grad():
            mine, theirs = (each(*halves, **named) for each in (ours, plain))
    assert len(ours.programs) == 2
    tree_map(lambda a, b: torch.testing.assert_close(a, b, **SIX) if isinstance(a, torch.Tensor) else None, mine, theirs)


class Remembering(nn.Module):
    """Keeps earlier values in a buffer, as a cache of keys does; its persistent buffer ``calls`` is no cache."""

    def __init__(self, length=6):
        super().__init__()
        self.into, self.out = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("seen", torch.zeros(4, 4, length, 4), persistent=False)
        self.register_buffer("calls", torch.zeros(16))

    def forward(self, x, at):
        """x: [4, n, 8]; at: [n]."""
        self.calls += 1
        new = self.into(x).unflatten(2, (4, 4)).transpose(1, 2)
        self.seen.index_copy_(2, at, new)
        return self.out(self.seen.mean(2).flatten(1) / self.calls)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("strategy", "mesh", "rests"),
    thinned(
        [
            ("megatron-1d", (4,), "S(1)@x"),
            ("data", (4,), "S(0)@x"),
            ("zero3", (4,), "S(0)@x"),
            ("tensor3d", (2, 2), "S(1)@"),
        ],
        first=1,
        slow=1,
    ),
)
def test_a_cache_rests_where_it_is_read(strategy, mesh, rests, schedule):
    torch.manual_seed(0)
    model = Remembering().double().eval()
    plain, args = copy.deepcopy(model), (torch.randn(4, 3, 8, **F64), torch.arange(3))
    parallel = distributed(model, args, strategy, mesh, schedule, mode="inference")
    with torch.no_grad():
        for start, count in ((0, 3), (3, 1), (4, 1), (5, 1)):
            given = torch.randn(4, count, 8, **F64), torch.arange(start, start + count)
            torch.testing.assert_close(parallel(*given), plain(*given), **SIX)
            torch.testing.assert_close(parallel.seen, plain.seen, **SIX)
    assert len(parallel.programs) == 2
    for program in parallel.programs:
        assert program.plan.parameters["seen"].startswith(rests)
        assert "calls" not in program.plan.layouts, "state dicts hold it"
        assert autotp.Plan.from_json(program.plan.to_json()).layouts == program.plan.layouts


def test_a_cache_in_parts_takes_less_memory():
    args = torch.randn(4, 3, 8, **F64), torch.arange(3)
    models = [Remembering(length).double().eval() for length in (1000, 2000)]
    asked = {"strategy": "megatron-1d", "mesh": (4,), "mode": "inference"}
    plans = [autotp.plan(model, autotp.Topology.flat(4), args, **asked) for model in models]
    grown = plans[1].predicted.memory_bytes - plans[0].predicted.memory_bytes
    # The cache at rest and its new value, each sharded.
    assert grown == pytest.approx(2 * (models[1].seen.nbytes - models[0].seen.nbytes) / 4, rel=0.1)


def test_a_program_that_only_reads_a_cache_takes_it_as_it_rests():
    class Reading(Remembering):
        def forward(self, x, at=None):
            return self.out(self.seen.mean(2).flatten(1)) if at is None else super().forward(x, at)

    torch.manual_seed(0)
    model = Reading().double().eval()
    plain, args = copy.deepcopy(model), (torch.randn(4, 3, 8, **F64), torch.arange(3))
    for first in (args, args[:1]):
        parallel = distributed(copy.deepcopy(model), first, mode="inference")
        with torch.no_grad():
            mine, theirs = ([each(*given) for given in (args, args[:1])] for each in (parallel, copy.deepcopy(plain)))
        torch.testing.assert_close(mine, theirs, **SIX)
        layouts = {program.plan.parameters.get("seen", "R") for program in parallel.programs}
        assert layouts == ({"S(1)@x"} if len(first) == 2 else {"R"}), "the first program decides"


class Given(nn.Module):
    """A layer whose forward pass is a function of the test."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "shown",
    [
        lambda z: (z.t(), z, z.detach()[1]),
        lambda z: (z, z.clone(), z.diagonal()),
        lambda z: (z, z.t().reshape(-1)),
        *thinned((lambda z: (z, z), lambda z: (z, z.flatten()), lambda z: (z[:2], z)), first=1, whole=True),
    ],
)
def test_outputs_that_are_views_of_each_other_change_together(shown, schedule):
    class Model(Given):
        def forward(self, x):
            return shown(self.layer(x))

    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(4, 4, **F64)
    plain, ours = copy.deepcopy(model), distributed(model, (x,), schedule=schedule)
    for grad in (True, False):
        found = []
        for each in (ours, plain):
            with torch.set_grad_enabled(grad):
                made = each(x)
                made[0].mul_(2)
            if grad:
                sum((k + 1) * one.square().sum() for k, one in enumerate(made) if one.requires_grad).backward()
            found.append(made)
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, **SIX)
    torch.testing.assert_close(model.layer.weight.grad, plain.layer.weight.grad, **SIX)


def test_free_keywords_are_read_in_the_order_of_the_call():
    class Model(Given):
        def forward(self, **named):
            first, *rest = named.values()
            return self.layer(first) + sum(rest)

    torch.manual_seed(0)
    model, x, y = Model().double(), torch.randn(4, 4, **F64), torch.randn(4, 4, **F64)
    ours = autotp.simulate(
        model, autotp.plan(model, autotp.Topology.flat(4), kwargs={"x": x, "y": y}), kwargs={"x": x, "y": y}
    )
    for call in ({"x": x, "y": y}, {"y": y, "x": x}, {"y": x, "x": y}):
        torch.testing.assert_close(ours(**call), model(**call), **SIX)
    assert {str(key).partition("inputs ")[2] for key in ours._programs.known} == {
        "named['x'] float64[4, 4], named['y'] float64[4, 4]",
        "named['y'] float64[4, 4], named['x'] float64[4, 4]",
    }


def test_a_call_says_which_optional_argument_it_has():
    class Model(Given):
        def forward(self, x, add=None, times=None):
            return self.layer(x) + (0 if add is None else add) * 2 + (0 if times is None else times)

    model, x = Model().double(), torch.randn(4, 4, **F64)
    ours = distributed(model, (x,))
    for call in ({"add": x}, {"times": x}):
        torch.testing.assert_close(ours(x, **call), model(x, **call), **SIX)
    assert [str(key).partition("inputs ")[2] for key in ours._programs.known] == [
        "float64[4, 4]",
        "float64[4, 4], float64[4, 4]",
        "float64[4, 4], times float64[4, 4]",
    ]


def test_the_default_dtype_tells_programs_apart():
    class Model(Given):
        def forward(self, x):
            return self.layer(x) + torch.arange(4) / torch.tensor(3.0)

    model, x = Model(), torch.randn(4, 4)
    ours = distributed(model, (x,))
    usual = torch.get_default_dtype()
    for dtype in (usual, torch.float64, usual):
        torch.set_default_dtype(dtype)
        try:
            torch.testing.assert_close(ours(x), model(x), rtol=1.3e-6, atol=1e-5)  # it multiplies in float32
        finally:
            torch.set_default_dtype(usual)
    assert [key.default for key in ours._programs.known] == [None, torch.float64]
    assert str([*ours._programs.known][1]).endswith(", default dtype float64")


@pytest.mark.slow
def test_threads_make_programs_and_plans_one_after_the_other(caplog):
    model, example = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).eval(), (torch.randn(4, 8),)
    reference = copy.deepcopy(model)  # a model must not run while another thread captures it
    served = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), example, mode="inference"), example)
    models = [copy.deepcopy(model) for _ in range(4)]
    asked, called = torch.is_grad_enabled, nn.Module.__call__

    def request(rows):
        x = torch.randn(rows, 8)
        with torch.no_grad():
            return served(x), reference(x)

    def job(mine):
        plan = autotp.plan(mine, autotp.Topology.flat(4), example)
        return autotp.simulate(mine, plan, example)(*example), reference(*example)

    with ThreadPoolExecutor(4) as threads:
        for got, expected in (*threads.map(request, (6, 8, 10, 12)), *threads.map(job, models)):
            torch.testing.assert_close(got, expected)
    assert (torch.is_grad_enabled, nn.Module.__call__) == (asked, called)
    assert "forward asks" not in caplog.text


@pytest.mark.parametrize(
    "how", thinned([nn.utils.weight_norm, nn.utils.spectral_norm, prune.l1_unstructured], first=1, slow=2, whole=True)
)
def test_weights_that_torch_computes_in_hooks_are_computed_in_every_program(how):
    def made():  # torch cannot copy such a model
        torch.manual_seed(0)
        found = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12)).double()
        how(found[0], *(("weight", 0.3) if how is prune.l1_unstructured else ()))
        return found

    x = torch.randn(8, 12).double()
    plain, model = made(), made()
    for each in (plain, model):
        each(x)  # leaves a weight that has a gradient function
    ours = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), (x,), strategy="data"), (x,))
    for training, gradients, rows in itertools.product((True, False), (True, False), (8, 3)):
        with torch.set_grad_enabled(gradients):
            got, expected = (each.train(training)(x[:rows]) for each in (ours, plain))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        for each in (ours, plain) if gradients else ():
            each.zero_grad()
            each(x[:rows]).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-10)


def test_transforms_of_a_sharded_module_are_errors():
    model, x = nn.Linear(4, 4).double(), torch.rand(4, 4, **F64)
    plan = autotp.plan(model, autotp.Topology.load("cpu").resized(2), (x,))
    simulated = autotp.simulate(model, plan, (x,))
    for transformed in (torch.func.vmap(simulated), torch.func.grad(lambda x: simulated(x).sum())):
        with pytest.raises(autotp.AutotpError, match="transform the model"):
            transformed(x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(autotp.AutotpError, match="transform the model"):
        simulated(torch.autograd.forward_ad.make_dual(x, x))
    simulated(x)


TRACERS = (
    torch.jit.trace,
    torch.jit.script,
    lambda module, args: torch.export.export(module, args, strict=False),
    lambda module, args: torch.fx.symbolic_trace(module),
)


@pytest.mark.parametrize("how", TRACERS)
def test_a_sharded_module_is_neither_traced_nor_exported(how):
    model, x = nn.Linear(4, 4).double(), torch.rand(4, 4, **F64)
    simulated = distributed(model, (x,))
    with pytest.raises(autotp.AutotpError, match="the model"):
        how(simulated, (x,))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert simulated(mode.from_tensor(x)).shape == x.shape, "to see what memory a step takes, for example"
    torch.testing.assert_close(simulated(x), model(x), **SIX)


class Laid(nn.Module):
    """Outputs whose dims are permuted in memory, as recurrent layers and convolutions return them."""

    def __init__(self):
        super().__init__()
        self.recurrent, self.conv = nn.LSTM(8, 6, batch_first=True), nn.Conv2d(4, 6, 1)

    def forward(self, x):
        found = self.recurrent(x)[0]
        image = self.conv(x.unflatten(2, (4, 2)).permute(0, 2, 1, 3).to(memory_format=torch.channels_last))
        return found, image, found.transpose(0, 1), image.sum()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("strategy", thinned(["megatron-1d", "data"], first=1, whole=True))
def test_outputs_lie_as_the_models(strategy, schedule):
    """Outputs have the model's strides: views of them are views where the model's are, and show writes through them."""
    torch.manual_seed(0)
    model, x = Laid().double(), torch.randn(8, 5, 8, **F64)
    ours = distributed(model, (x,), strategy, schedule=schedule)
    for rows in (8, 4):
        got, expected = ours(x[:rows]), model(x[:rows])
        for mine, its in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, its, **SIX)
            assert mine.stride() == its.stride()
    gradients = []
    for each in (ours, model):
        model.zero_grad()
        found, image, *_ = each(x)
        flat = found.transpose(0, 1).reshape(-1)
        with torch.no_grad():
            flat[:7] = 0
        (found.square().sum() + image.permute(0, 2, 3, 1).view(-1).square().sum()).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, **SIX)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_batches_of_gradients_are_errors(schedule):
    model, x = nn.Linear(4, 4).double(), torch.rand(4, 4, **F64)
    simulated = distributed(model, (x,), schedule=schedule)
    with pytest.raises(autotp.AutotpError, match="one by one"):
        torch.autograd.functional.jacobian(simulated, x, vectorize=True)
    expected = torch.autograd.functional.jacobian(model, x, vectorize=True)
    torch.testing.assert_close(torch.autograd.functional.jacobian(simulated, x), expected, **SIX)


class Late(nn.Module):
    """Changes an input in place through a reshape that is a view, in evaluation only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, **F64)

    def forward(self, x):
        if not self.training:
            x.reshape(-1).mul_(2)
        return self.linear(x)


def test_how_inputs_lie_may_matter_in_a_later_program_first():
    model, x = Late(), torch.rand(4, 4, **F64)
    simulated = autotp.simulate(model, autotp.plan(model, autotp.Topology.load("cpu").resized(2), (x,)), (x,))
    for training, transposed in ((True, False), (False, True), (False, False), (False, True), (True, True)):
        given = [x.clone().t() if transposed else x.clone() for _ in range(2)]
        torch.testing.assert_close(simulated.train(training)(given[0]), model.train(training)(given[1]), **SIX)
        torch.testing.assert_close(*given, **SIX)
