"""The data, methods and modes of the model's own that a distributed module keeps, in a process group of one."""

import collections
import copy
import dataclasses
import functools
import pickle
import types
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._composable import replicate
from torch.distributed.fsdp import fully_shard

import autotp
from autotp.runtime.state import checksum

pytestmark = pytest.mark.usefixtures("one_rank")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.names, self.options, self.modules_too = ["a", "b"], {"size": 1}, [self.head]
        self.act, self.closed = torch.tanh, lambda x: x + self.head.bias.sum()

    def forward(self, x):
        return self.head(self.act(self.norm(self.inner(x))))

    def train(self, mode=True):
        """Keeps normalisation in evaluation mode."""
        super().train(mode)
        self.norm.eval()
        return self

    def encode(self, x):
        return self.inner(x)

    def freeze(self):
        self.inner.requires_grad_(False)

    @property
    def width(self):
        return self.inner.in_features

    @staticmethod
    def error(found, wanted):
        return (found - wanted).square().mean()


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_a_models_own_methods_act_on_the_distributed_module():
    parallel = autotp.parallelize(Net(), None, (X,), strategy="data")
    assert parallel.width == 4 and parallel.error(torch.ones(2), 0) == 1
    parallel.freeze()
    assert [name for name, p in parallel.named_parameters() if not p.requires_grad] == ["inner.weight", "inner.bias"]
    with pytest.raises(autotp.AutotpError, match="inner is a part of a distributed module, and holds state alone"):
        parallel.encode(X)
    with pytest.raises(AttributeError, match="no attribute 'decode'"):
        parallel.decode(X)


def test_data_is_read_and_not_changed():
    parallel = autotp.parallelize(Net(), None, (X,), strategy="data")
    assert parallel.names == ("a", "b") and parallel.options == {"size": 1} and not hasattr(parallel, "modules_too")
    for wrong in (
        lambda: parallel.options.update(size=2),
        lambda: setattr(parallel, "options", {}),
        lambda: setattr(parallel.inner, "in_features", 5),
        lambda: setattr(parallel, "act", torch.relu),
        lambda: setattr(parallel, "closed", torch.relu),
    ):
        with pytest.raises(autotp.AutotpError, match="the graph cannot follow a change"):
            wrong()
    assert parallel.act is torch.tanh and copy.deepcopy(parallel).options == {"size": 1}
    parallel.tag = torch.zeros(2)  # an attribute that the user adds


class Block(nn.Module):
    """Has class attributes, some of which its instances override."""

    scale, names, mode = 1.0, [], "plain"
    table: ClassVar = {"inner": {"k": 1.0}}

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale, self.names, self._gain, self._mask = 5.0, ["a"], 2.0, torch.ones(4)

    def post(self, y):
        return y

    def forward(self, x):
        return self.post(self.linear(x) * self.scale * self._gain * self._mask * self.table["inner"]["k"])


CHANGES = {
    "private": lambda block: setattr(block, "_gain", 3.0),
    "tensor": lambda block: setattr(block, "_mask", torch.zeros(4)),
    "of the class": lambda block: setattr(block, "mode", "other"),
    "its own instead": lambda block: setattr(block, "scale", 1.0),
    "deleted": lambda block: delattr(block, "scale"),
    "list": lambda block: setattr(block, "names", ["b"]),
    "inner dict": lambda block: block.table["inner"].update(k=2.0),
    "method": lambda block: setattr(block, "post", torch.relu),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("part", [False, True])
def test_data_of_classes_and_private_data(change, part):
    parallel = autotp.parallelize(nn.Sequential(Block()) if part else Block(), None, (X,), strategy="data")
    for module in (parallel, copy.deepcopy(parallel)):
        block = module[0] if part else module
        with pytest.raises(autotp.AutotpError, match="the graph cannot follow a"):
            CHANGES[change](block)
        block.names, block.mode = ["a"], "plain"  # equal values may be assigned
        assert (block.scale, block.names, block._gain) == (5.0, ("a",), 2.0)
    assert (Block.names, Block.table) == ([], {"inner": {"k": 1.0}})


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int = 4


class Registered:
    known: ClassVar = {}

    def __init_subclass__(cls, *, key):
        Registered.known[key] = cls


class Settings(Registered, key="settings"):
    def __init__(self):
        self.factor = 2.0


class Configured(nn.Module):
    """Attributes of many types, in the place of class attributes that are None."""

    sizes = settings = space = ordered = None

    def __init__(self):
        super().__init__()
        self.linear, self.sizes, self.settings = nn.Linear(4, 4), Sizes(), Settings()
        self.space, self.ordered = types.SimpleNamespace(bias=1.0), collections.OrderedDict(gain=3.0)
        self.counts, self.dims = collections.Counter("aab"), [1, 2]

    @property
    def factor(self):
        return self.settings.factor

    @factor.setter
    def factor(self, value):
        self.settings.factor = value

    def forward(self, x):
        return self.linear(x) * self.settings.factor * self.ordered["gain"] + self.space.bias


@pytest.mark.parametrize("part", [False, True])
def test_data_of_many_kinds(part):
    model = nn.Sequential(Configured()) if part else Configured()
    parallel = autotp.parallelize(copy.deepcopy(model), None, (X,), strategy="data")
    torch.testing.assert_close(copy.deepcopy(parallel)(X), parallel(X))
    block = copy.deepcopy(parallel)[0] if part else copy.deepcopy(parallel)
    assert (block.sizes.width, block.space.bias, block.factor, block.dims) == (4, 1.0, 2.0, (1, 2))
    assert block.counts.most_common(1) == [("a", 2)] and Registered.known == {"settings": Settings}
    for change in (
        lambda: setattr(block.sizes, "width", 5),
        lambda: setattr(block.settings, "factor", 5.0),
        lambda: setattr(block, "factor", 5.0),
        lambda: block.ordered.update(gain=5.0),
        lambda: block.counts.update("a"),
    ):
        with pytest.raises(autotp.AutotpError, match="the graph cannot follow a change"):
            change()
    for copied in (copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        counts, options = copied(block.counts), copied(block.ordered)
        counts.update("a")
        options["gain"] = 5.0
        assert (counts["a"], options["gain"], block.counts["a"], block.ordered["gain"]) == (3, 5.0, 2, 3.0)
    assert dataclasses.replace(copy.copy(block.sizes), width=5) == Sizes(5)


@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, fully_shard, replicate])
@pytest.mark.parametrize("part", [False, True])
def test_it_goes_into_no_other_sharding(wrap, part):
    parallel = autotp.parallelize(Net(), None, (X,), strategy="data")
    with pytest.raises(autotp.AutotpError, match="it goes into no DistributedDataParallel, fully_shard or the like"):
        wrap(parallel.head if part else parallel)
    copy.deepcopy(parallel)(X).sum().backward()


class Scaled(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * self.weight

    def __repr__(self):
        return f"Scaled({self.size})"  # an attribute that it lacks


class Strict(nn.Module):
    """A class that cannot be subclassed."""

    def __init_subclass__(cls):
        raise TypeError

    def forward(self, x):
        return x + 1


def test_submodules_are_of_the_models_classes():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Scaled(4), Strict())
    parallel = autotp.parallelize(model, None, (X,), strategy="data")
    decayed = [name for name, module in parallel.named_modules() if isinstance(module, (Scaled, nn.Linear))]
    assert decayed == ["0", "2"] and "Scaled()" in str(parallel)
    torch.testing.assert_close(copy.deepcopy(parallel)(X), model(X))
    for each in (parallel, copy.deepcopy(parallel)):
        assert len(each) == 4 and [type(part).__name__ for part in each] == ["Linear", "ReLU", "Scaled", "Submodule"]
        assert all(part is each.get_submodule(str(n)) for n, part in enumerate(each))
        assert each[1] is each.get_submodule("1") and each[-1] is each[3] and len(each[:2]) == 2
    with pytest.raises(autotp.AutotpError, match="1 is a part of a distributed module"):
        parallel[1](X)
    simulated = autotp.simulate(model, parallel.plan, (X,))
    assert len(simulated) == 4 and simulated[0] is model[0] and copy.deepcopy(simulated)[2] is not simulated[2]
    for each in (parallel, simulated):
        with pytest.raises(autotp.AutotpError, match="__setitem__: the graph cannot follow"):
            each[0] = nn.Linear(4, 4)
        with pytest.raises(autotp.AutotpError, match="__delitem__: the graph cannot follow"):
            del each[0]


def test_parts_are_copied_and_not_pickled():
    model = nn.Sequential(nn.LSTM(4, 4), nn.Identity())
    part = autotp.parallelize(Taking(model), None, (X,), strategy="data").model[0]
    copied = copy.deepcopy(part)
    with torch.no_grad():
        copied.weight_hh_l0.zero_()
    assert part.weight_hh_l0.any() and copy.copy(part).weight_hh_l0 is part.weight_hh_l0
    with pytest.raises(autotp.AutotpError, match="cannot be pickled"):
        pickle.dumps(part)
    with pytest.raises(AttributeError, match="model.0._flat_weights of the model holds tensors"):
        part.flatten_parameters()


class Taking(nn.Module):
    """Returns the first of a model's outputs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)[0]


def test_a_module_on_another_device_is_not_called():
    parallel = autotp.parallelize(nn.Linear(4, 4), None, (X,), strategy="data")
    with pytest.raises(autotp.AutotpError, match="weight is on meta, and the graphs run on cpu"):
        copy.deepcopy(parallel).to("meta")(X)
    assert parallel.to("cpu")(X).shape == X.shape and len({parallel.plan, copy.deepcopy(parallel.plan)}) == 1


class Leaving(Net):
    """Its forward pass sets attributes, and more of them in evaluation."""

    def __init__(self):
        super().__init__()
        self.aux, self.inner.calls = 0.0, 0

    def forward(self, x):
        y = super().forward(x)
        self.inner.calls += 1
        self.aux = y.square().mean()
        if not self.training:
            self.head.last = y
        return y

    @property
    def penalty(self):
        return 0.1 * self.aux


@pytest.mark.slow
def test_what_forward_leaves_behind_can_be_read():
    model = Leaving()
    parallel = autotp.parallelize(copy.deepcopy(model), None, (X,), strategy="data")
    for each in (model, parallel):
        (each(X).sum() + each.penalty).backward()
    torch.testing.assert_close(parallel.aux, model.aux)
    torch.testing.assert_close(parallel.head.weight.grad.full_tensor(), model.head.weight.grad)
    for each in (model, parallel):
        each.aux = None
        each.eval()(X)
    torch.testing.assert_close((parallel.head.last, parallel.aux), (model.head.last, model.aux))


class Answers(nn.Linear):
    """The attributes that it sets and the structure of its output depend on its mode; its graphs do not."""

    def forward(self, x):
        y = super().forward(x)
        name = "aux" if self.out_features == 4 else "first" if self.training else "last"
        setattr(self, name, y + getattr(self, "aux", 0) if self.training else y)
        return {"y": y} if self.training else (y,)


def test_programs_of_one_graph_have_answers_of_their_own():
    parallel = autotp.parallelize(Answers(4, 8), None, (X,), strategy="data")
    assert torch.equal(parallel(X)["y"], parallel.first) and not hasattr(parallel, "last")
    assert torch.equal(*parallel.eval()(X), parallel.last)


def test_what_one_program_left_and_another_would_add_to_cannot_be_read():
    parallel = autotp.parallelize(Answers(4, 4), None, (X,), strategy="data")
    assert torch.equal(*parallel.eval()(X), parallel.aux)
    parallel.train()(X)
    with pytest.raises(AttributeError, match="^aux: the model's forward sets it"):
        _ = parallel.aux


@pytest.mark.parametrize(("name", "path"), [("graph", "graph"), ("_data", "0._data")])
def test_forward_leaves_nothing_where_a_distributed_module_has_something_else(name, path):
    class Names(nn.Linear):
        def forward(self, x):
            setattr(self, name, super().forward(x))
            return getattr(self, name)

    model = Names(4, 4)
    with pytest.raises(autotp.AutotpError, match=f"the model's {path} cannot keep that name"):
        autotp.parallelize(nn.Sequential(model) if "." in path else model, None, (X,), strategy="data")


def test_what_forward_counts_cannot_be_read():
    parallel = autotp.parallelize(Leaving(), None, (X,), strategy="data")
    copied = copy.deepcopy(parallel)
    parallel(X)
    for each in (parallel, copied):
        with pytest.raises(AttributeError, match="^inner.calls: the model's forward sets it.* Let forward return it"):
            _ = each.inner.calls
    with pytest.raises(autotp.AutotpError, match="^inner.calls: the model's forward sets it"):
        parallel.inner.calls = 0


def test_modes_are_those_that_the_models_own_train_gives():
    model = Net().train()
    parallel = autotp.parallelize(copy.deepcopy(model), None, (X,), strategy="data")
    for switch in (lambda m: m.eval(), lambda m: m.train()):
        for each in (model, parallel):
            switch(each)
        assert not parallel.norm.training and parallel.head.training == model.head.training
        torch.testing.assert_close(parallel(X), model(X))
    torch.testing.assert_close(parallel.norm.running_mean, model.norm.running_mean)
    nested = autotp.parallelize(nn.Sequential(Net()), None, (X,), strategy="data")
    assert not nested.train()[0].norm.training
    with pytest.raises(autotp.AutotpError, match=r"0.train is the model's own: call train or eval of the distributed"):
        nested[0].eval()


def test_a_language_model_has_its_configuration():
    sizes = {"n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 16, "bos_token_id": None, "eos_token_id": None}
    config = transformers.GPT2Config(**sizes, use_cache=False)
    parallel = autotp.parallelize(transformers.GPT2LMHeadModel(config), None, (torch.zeros(2, 4, dtype=torch.long),))
    assert isinstance(parallel.config, transformers.GPT2Config) and parallel.config.to_dict() == config.to_dict()
    assert parallel.dtype == torch.float32 and parallel.num_parameters() == sum(p.numel() for p in parallel.parameters())
    assert parallel.get_input_embeddings() is parallel.transformer.wte
    with pytest.raises(autotp.AutotpError, match=r"GPT2Config.use_cache of a distributed module"):
        parallel.config.use_cache = False
    for copied in (copy.deepcopy(parallel.config), pickle.loads(pickle.dumps(parallel.config))):
        copied.use_cache = not config.use_cache
        assert type(copied) is transformers.GPT2Config
    with pytest.raises(AttributeError, match=r"has no GPT2LMHeadModel.generate: use autotp.integrations.generate"):
        parallel.generate(torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(autotp.AutotpError, match="gradient_checkpointing was False when the model was captured"):
        parallel.gradient_checkpointing_enable()


def test_an_optimizer_of_the_models_own_parameters_is_an_error():
    model, plain = Net(), Net()
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = autotp.parallelize(model, None, (X,), strategy="data")

    def gradients(module, optimizer):
        optimizer.zero_grad()
        loss = module(X).square().mean()
        loss.backward()
        return loss

    for wrong in (before, torch.optim.AdamW(model.parameters())):
        closure = functools.partial(gradients, parallel, wrong)
        for args, kwargs in (((), {}), ((None,), {}), ((closure,), {}), ((), {"closure": closure})):
            gradients(parallel, wrong)
            with pytest.raises(autotp.AutotpError, match="parameters of the model that was distributed, not those of the"):
                wrong.step(*args, **kwargs)
    again = autotp.parallelize(model, None, (X,), strategy="data")
    for other in (again, copy.deepcopy(model), plain):  # without gradients, as usual
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    for trained in (parallel, again, model, plain):
        for made in (torch.optim.SGD(trained.parameters(), lr=0.1), torch.optim.LBFGS(trained.parameters(), max_iter=1)):
            made.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
            weight = trained.head.weight.detach().clone()
            if isinstance(made, torch.optim.LBFGS):
                made.step(functools.partial(gradients, trained, made))
            else:
                gradients(trained, made)
                made.step()
            assert not torch.equal(weight, trained.head.weight)
    gradients(again, torch.optim.SGD(again.parameters(), lr=0.1))  # gradients of another module of the same model
    model.zero_grad()
    with pytest.raises(autotp.AutotpError, match="parameters of the model that was distributed, not those of the"):
        torch.optim.SGD([*again.parameters(), model.head.weight], lr=0.1).step()
    mixed = torch.optim.SGD(parallel.parameters(), lr=0.1)
    gradients(parallel, mixed)
    mixed.step()
    mixed.add_param_group({"params": [*again.parameters()]})  # trained elsewhere
    mixed.step()
    mixed.add_param_group({"params": [model.head.weight]})
    model.zero_grad()
    with pytest.raises(autotp.AutotpError, match="parameters of the model that was distributed, not those of the"):
        mixed.step()
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    gradients(plain, own)
    own.step()
    own.zero_grad()
    autotp.parallelize(plain, None, (X,), strategy="data")
    with pytest.raises(autotp.AutotpError, match="make it of the parameters"):
        own.step()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda simulated, model: setattr(simulated.get_submodule("1"), "p", 0.5), "1.p was 0.0 when .* is 0.5 now"),
        (lambda simulated, model: setattr(model[2], "eps", 1.0), "2.eps was 1e-05 when .* is 1.0 now"),
        (lambda simulated, model: setattr(simulated, "scale", 2), "^scale was 1 when .* is 2 now"),
        (lambda simulated, model: setattr(model[2], "eps", None), "2.eps was 1e-05 when .* is None now"),
        (lambda simulated, model: simulated.eval(), None),
        (lambda simulated, model: setattr(simulated, "steps", 2), None),
    ],
)
def test_what_a_simulated_module_cannot_follow_is_refused(change, said):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.LayerNorm(4)), torch.randn(4, 4)
    model.scale = 1
    simulated = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), (x,)), (x,))
    simulated(x)
    change(simulated, model)
    with pytest.raises(autotp.AutotpError, match=said) if said else nullcontext():
        simulated(x)


@pytest.mark.parametrize("schedule", ["overlap", "none"])
def test_the_graph_is_for_reading(schedule):
    parallel = autotp.parallelize(Net(), None, (X,), strategy="data", schedule=schedule)
    expected, written = parallel(X), parallel.recompile().src
    assert parallel.recompile().src == written == copy.deepcopy(parallel).recompile().src
    with pytest.raises(autotp.AutotpError, match="the graph of a distributed module is for reading"):
        parallel.graph = copy.deepcopy(parallel.graph)
    tanh = next(node for node in parallel.graph.nodes if "tanh" in str(node.target))
    tanh.target = torch.ops.aten.relu.default
    with pytest.raises(autotp.AutotpError, match="the graph of a distributed module is for reading"):
        parallel.recompile()
    torch.testing.assert_close(parallel(X), expected)


def test_the_callers_default_device_may_be_meta():
    """As where models are created without values: shards, new programs and comparisons have values nevertheless."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        parallel = autotp.parallelize(
            model, None, (torch.empty(8, 4),), strategy="zero3", initialise=lambda each: each.apply(_ones)
        )
    real = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).apply(_ones)
    with torch.device("meta"):
        torch.testing.assert_close(parallel(X), real(X))  # with other rows than the example
    for switch in (torch.device("meta"), torch.no_grad(), torch.inference_mode()):
        with switch:
            found = autotp.verify(real, parallel.plan, (torch.ones(8, 4, device="cpu"),))
        assert found and found.gradients.keys() == {"0.weight", "0.bias"}


class Writer(nn.Module):
    """Generates with a method of its own, as small models do."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, words):
        return self.head(self.words(words))

    @torch.no_grad()
    def generate(self, words, count):
        for _ in range(count):
            words = torch.cat([words, self(words)[:, -1].argmax(-1, keepdim=True)], 1)
        return words


def test_a_models_own_generate_is_its_own():
    model, words = Writer(), torch.arange(6).view(2, 3)
    parallel = autotp.parallelize(model, None, (words,), strategy="data")
    assert torch.equal(parallel.generate(words, 3), model.generate(words, 3))
    with pytest.raises(autotp.AutotpError, match="generate: the graph cannot follow"):
        parallel.generate = None


def test_values_of_fake_tensors_are_not_compared():
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(autotp.AutotpError, match="exchange fake tensors"):
        checksum(X)


def _ones(module):
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)
