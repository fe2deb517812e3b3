"""A distributed module in a training script: it does what eager modules do, or reports that it does not."""

import copy
import logging
import operator
import pickle
import resource

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune

import autotp


class Hidden(nn.Module):
    """Returns a loss, the hidden state from which it is computed, and that state detached."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x):
        hidden = self.norm(self.first(x)) * self.scale
        return self.second(hidden.sigmoid()).square().mean(), hidden, hidden.detach()


def distributed(model, x, schedule):
    ranks = dist.get_world_size()
    return autotp.parallelize(copy.deepcopy(model), None, (x,), strategy="data", mesh=(ranks,), schedule=schedule)


def hooks_on_what_others_are_made_of(model, x, schedule):
    """Gradients flow through the hidden state to the first layer; if a hook would not see all of them, it is an error."""
    parallel, plain = distributed(model, x, schedule), copy.deepcopy(model)
    sees = schedule == "none" and not parallel.programs[0].relations.made_apart[1]  # nothing is gathered between them
    assert sees or (schedule, dist.get_world_size()) != ("none", 1)
    for ask in (lambda h: h.register_hook(lambda g: 3 * g), lambda h: h.retain_grad()):
        found = []
        for each in (plain, parallel):
            each.zero_grad()
            loss, hidden, _ = each(x)
            ask(hidden)
            total = loss + hidden.square().mean()
            if each is parallel and not sees:
                with pytest.raises(autotp.AutotpError, match="output 1 has a hook or retains its gradient, and output 0"):
                    total.backward()
            else:
                total.backward()
                gradient = each.get_parameter("first.weight").grad
                found.append(gradient.full_tensor() if each is parallel else gradient)
        assert len(found) < 2 or torch.allclose(*found, rtol=1e-9, atol=1e-12)
    hidden = parallel(x)[1]  # by itself, it is a loss like any other
    hidden.retain_grad()
    hidden.sum().backward()
    assert hidden.grad.eq(1).all()


_CHANGES = (lambda p, x, h: x.zero_(), lambda p, x, h: h.mul_(2), lambda p, x, h: p.scale.mul_(2))


def changes_before_the_backward_pass(model, x, schedule):
    """Changes an input, output or buffer that backward may read: it raises, or uses the values from before the change."""
    plain, refused = copy.deepcopy(model), 0
    loss, hidden, _ = plain(x)
    (loss + hidden.square().mean()).backward()
    for change in _CHANGES:
        parallel, given = distributed(model, x, schedule), x.clone()
        loss, hidden, _ = parallel(given)
        with torch.no_grad():
            change(parallel, given, hidden)
        factor = 0.5 if change is _CHANGES[1] else 1  # the caller computes its own part of the loss from the changed value
        try:
            (loss + factor * hidden.square().mean()).backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            refused += 1
            continue
        for name, parameter in plain.named_parameters():
            found = parallel.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-9)
    assert refused


def outputs_changed_in_place(model, x, schedule):
    """Outputs may be changed in place while gradients are recorded, as the model's may."""
    found = []
    for each in (copy.deepcopy(model), distributed(model, x, schedule)):
        loss, hidden, _ = each(x)
        hidden /= 2
        loss *= 3
        hidden.square().sum().backward()
        gradient = each.get_parameter("first.weight").grad
        found.append(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def submodules(model, x, schedule):
    """Submodules have their layers' types and attributes; changes that the graph cannot follow are refused."""
    parallel = distributed(model, x, schedule)
    layers = [module for module in parallel.modules() if isinstance(module, nn.Linear)]
    assert {layer.weight for layer in layers} == {parallel.get_parameter(f"{name}.weight") for name in ("first", "second")}
    norm = parallel.norm
    assert isinstance(norm, nn.BatchNorm1d) and norm.momentum == 0.1 and norm.training
    for wrong in (
        lambda: setattr(norm, "momentum", 0.5),
        lambda: torch.optim.swa_utils.update_bn([x], parallel),
        lambda: norm(x),
        lambda: setattr(parallel, "first", nn.Linear(8, 8)),
        lambda: setattr(norm, "weight", nn.Parameter(torch.ones(8))),
        lambda: norm.register_forward_hook(lambda *_: None),
    ):
        with pytest.raises(autotp.AutotpError):
            wrong()
    norm.momentum, norm.tag = 0.1, "mine"
    assert "BatchNorm1d(8" in str(parallel) and [name for name, _ in parallel.named_children()][:3] == [
        "first",
        "norm",
        "second",
    ]
    other = copy.deepcopy(parallel)
    assert isinstance(other.norm, nn.BatchNorm1d) and all(p.grad is None for p in other.parameters())


class Holding(nn.Module):
    """Uses all of torch's containers."""

    def __init__(self):
        super().__init__()
        self.layers, self.named = nn.ModuleList([nn.Linear(8, 8), nn.ReLU()]), nn.ModuleDict({"last": nn.Linear(8, 8)})
        self.steps = nn.Sequential(nn.LayerNorm(8), nn.GELU())
        self.scales = nn.ParameterList([torch.ones(8)])
        self.shifts = nn.ParameterDict({"first": torch.zeros(8)})

    def forward(self, x):
        return self.steps(self.named["last"](self.layers[1](self.layers[0](x)))) * self.scales[0] + self.shifts["first"]


def changes_of_structure(model, x, schedule):
    """Additions and removals are refused at once, by whichever of torch's ways; the module stays as it is."""
    model = Holding().double()
    parallel = distributed(model, x, schedule)
    layers, named, steps, scales, shifts = (
        getattr(parallel, name) for name in ("layers", "named", "steps", "scales", "shifts")
    )
    weight, linear = nn.Parameter(torch.zeros(8)), nn.Linear(8, 8)
    wrong = {
        "layers.append": lambda: layers.append(linear),
        "layers.extend": lambda: layers.extend([linear]),
        "layers.insert": lambda: layers.insert(0, linear),
        "layers.pop": lambda: layers.pop(),
        "layers.__delitem__": lambda: layers.__delitem__(1),
        "layers.1": lambda: layers.__setitem__(1, linear),
        "named.new": lambda: named.__setitem__("new", linear),
        "named.clear": lambda: named.clear(),
        "named.update": lambda: named.update({"new": linear}),
        "steps.append": lambda: steps.append(linear),
        "scales.append": lambda: scales.append(weight),
        "shifts.pop": lambda: shifts.pop("first"),
        "steps.0.forward": lambda: setattr(steps[0], "forward", linear.forward),
        "steps.0.eps": lambda: delattr(steps[0], "eps"),
        "steps.0.bias": lambda: delattr(steps[0], "bias"),
        "steps": lambda: delattr(parallel, "steps"),
        "layers.0.new": lambda: layers[0].add_module("new", linear),
        "layers.0.other": lambda: layers[0].register_module("other", linear),
        "new": lambda: parallel.register_parameter("new", weight),
        "other": lambda: parallel.register_buffer("other", torch.zeros(2)),
        "third": lambda: setattr(parallel, "third", nn.Buffer(torch.zeros(2))),
        "layers.0.weight_orig": lambda: prune.l1_unstructured(layers[0], "weight", 0.5),
        "layers.0.weight": lambda: nn.utils.spectral_norm(layers[0], dim=0),
        "layers._modules": lambda: operator.setitem(layers._modules, "0", linear),
        "named._modules": lambda: named._modules.update(more=linear),
        "_modules": lambda: parallel._modules.pop("layers"),
    }
    layers._modules["0"] = layers[0]  # the same module may be assigned
    for table, told in (("_forward_hooks", "is not observed"), ("_backward_hooks", "calls no backward hooks")):
        with pytest.raises(autotp.AutotpError, match=told):
            getattr(layers[0], table)[0] = print
    for each in (parallel, layers[0]):
        with pytest.raises(autotp.AutotpError, match=r"share_memory.*belong to one process each"):
            each.share_memory()
    for name, change in wrong.items():
        with pytest.raises(autotp.AutotpError, match=f"^{name}: the graph cannot follow"):
            change()
    assert len(layers) == 2 and len(layers[:1]) == 1 and [*named] == ["last"] and len(scales) == len(shifts) == 1
    assert parallel.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(copy.deepcopy(parallel.float().double())(x), parallel(x))


def modes(model, x, schedule):
    """Evaluation, calls without gradients and other batches alternate with training, as with the plain module."""
    parallel, plain = distributed(model, x, schedule), copy.deepcopy(model)
    for switch in (lambda m: m.eval(), lambda m: m.train(), lambda m: m.norm.eval()):
        for each in (x, x[:6], x[:1]):
            found = []
            for module in (parallel, plain):
                switch(module)
                if module.norm.training and len(each) == 1:
                    continue
                module.zero_grad()
                with torch.no_grad():
                    found.append(module(each)[1])
                module(each)[0].backward()
                gradient = module.get_parameter("first.weight").grad
                found += [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient]
            half = len(found) // 2
            torch.testing.assert_close(found[:half], found[half:], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(parallel.norm.running_mean, plain.norm.running_mean, rtol=1e-9, atol=1e-12)
    copied = copy.deepcopy(parallel)
    torch.testing.assert_close(copied(x[:6])[1], parallel(x[:6])[1])
    assert len(copied.programs) == len(parallel.programs)


def parameters_of_others(model, x, schedule):
    """Tensors that would replace the plan's parameters, or have replaced them bypassing the module, are refused."""
    parallel = distributed(model, x, schedule)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(autotp.AutotpError, match=r"the state dict has a plain tensor for first\.weight, a DTensor here"):
        parallel.load_state_dict(state, assign=True)
    with pytest.raises(autotp.AutotpError, match="first.weight: the graph cannot follow a parameter that takes the place"):
        parallel.first.weight = nn.Parameter(state["first.weight"])
    parallel(x)
    parallel.first._parameters["weight"] = nn.Parameter(state["first.weight"])
    with pytest.raises(autotp.AutotpError, match="first.weight rests as R by the plan, and is now a plain tensor"):
        parallel(x)
    sharded = autotp.parallelize(model, None, (x,), strategy="zero3", mesh=(dist.get_world_size(),))
    if dist.get_world_size() > 1:
        parallel.first._parameters["weight"] = sharded.first.weight
        with pytest.raises(autotp.AutotpError, match=r"rests as R by the plan, and is now S\(0\)@x"):
            parallel(x)


def what_parameters_carry(model, x, schedule):
    """Attributes for optimizers stay. Hooks on gradients, which would not be called, and lost parameters are refused."""
    marked = copy.deepcopy(model)
    marked.first.bias.no_decay = True
    how = {"strategy": "data", "mesh": (dist.get_world_size(),), "schedule": schedule}
    parallel = autotp.parallelize(marked, None, (x,), **how)
    assert parallel.first.bias.no_decay and not hasattr(parallel.first.weight, "no_decay")
    assert copy.deepcopy(parallel).first.bias.no_decay
    other = copy.copy(parallel)
    assert type(other) is type(parallel) and other.plan is parallel.plan and other.first.bias is parallel.first.bias
    torch.testing.assert_close(other(x)[1], model(x)[1])
    with pytest.raises(autotp.AutotpError, match="cannot be pickled: save its state_dict"):
        pickle.dumps(parallel)
    with pytest.raises(autotp.AutotpError, match=r"second\.weight: the graph cannot follow a parameter that is taken"):
        nn.utils.parametrize.register_parametrization(parallel.second, "weight", nn.Identity())
    del parallel.first._parameters["weight"]
    with pytest.raises(autotp.AutotpError, match=r"parameter first\.weight is gone"):
        parallel(x)
    everywhere, last = range(dist.get_world_size()), [dist.get_world_size() - 1]
    for hooked, ranks in (("register_hook", everywhere), ("register_post_accumulate_grad_hook", last)):
        other = copy.deepcopy(model)
        if dist.get_rank() in ranks:
            getattr(other.second.bias, hooked)(lambda gradient: None)
        with pytest.raises(autotp.AutotpError, match="parameter second.bias has a hook on its gradient"):
            autotp.parallelize(other, None, (x,), **how)


def compiled_by_torch(model, x, schedule):
    """The graph is compiled already: ``torch.compile`` runs it unchanged, which is logged once."""
    plain, parallel = copy.deepcopy(model), distributed(model, x, schedule)
    quick, said = torch.compile(parallel), []
    log = logging.getLogger("autotp.compile")
    log.addFilter(watch := lambda record: said.append(record.getMessage()))
    for each in (plain, quick):
        each(x)[0].backward()
    parallel.compile()
    assert len(said) == 1 and "give autotp.parallelize compile=True" in said[0]
    for change in (lambda m: m.first.compile(), lambda m: setattr(m, "first", torch.compile(m.first))):
        change(part := copy.deepcopy(model))
        options = {"strategy": "data", "mesh": (dist.get_world_size(),), "schedule": schedule}
        torch.testing.assert_close(autotp.parallelize(part, None, (x,), **options)(x), plain(x))
        assert said[-1] == "torch.compile of first changes nothing: give autotp.parallelize compile=True"
    log.removeFilter(watch)
    assert len(said) == 3
    with torch.no_grad():
        torch.testing.assert_close(quick(x)[1], plain(x)[1])
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parallel.get_parameter(name).grad.full_tensor(), parameter.grad, rtol=1e-9, atol=1e-12)


def what_a_profiler_shows(model, x, schedule):
    """Modules' names enclose what they compute and communicate, in both passes if those are scheduled."""
    parallel, plain = distributed(model, x, schedule), copy.deepcopy(model)
    for each in (parallel, plain):
        each(x)[0].backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        parallel(x)[0].backward()
    plain(x)[0].backward()
    inside = set()
    for event in seen.events():
        parent = event.cpu_parent
        while parent is not None:
            inside.add((parent.name, event.name))
            parent = parent.cpu_parent
    assert inside >= {("first", "aten::addmm"), ("second", "aten::addmm")} and "norm" in {place for place, _ in inside}
    sent = {place for place, kernel in inside if kernel.startswith("c10d::")}
    assert "linear in first" in sent or dist.get_world_size() == 1
    if schedule == "overlap":
        assert inside >= {("first", "aten::mm"), ("second", "aten::mm")}
        assert "the gradient of mul" in sent or dist.get_world_size() == 1
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parallel.get_parameter(name).grad.full_tensor(), parameter.grad, rtol=1e-9, atol=1e-12)


def memory_of_forward_passes(model, x, schedule):
    """A forward pass without a backward pass leaves no memory allocated."""
    wide = nn.Sequential(nn.Linear(8, 512), nn.Sigmoid()).double()
    x = torch.randn(1024, 8, dtype=torch.float64)  # 4 MiB of results
    parallel = distributed(wide, x, schedule)
    for _ in range(5):
        parallel(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(60):
        parallel(x)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 2**10


def main(schedules=("overlap", "none")):
    torch.manual_seed(0)
    model, x = Hidden().double(), torch.randn(8, 8, dtype=torch.float64)
    split = copy.deepcopy(model)
    split.norm = nn.Identity()  # no rank holds the whole hidden state
    assert dist.get_world_size() == 1 or distributed(split, x, "none").programs[0].relations.made_apart[1]
    for schedule in schedules:
        hooks_on_what_others_are_made_of(model, x, schedule)
        hooks_on_what_others_are_made_of(split, x, schedule)
        changes_before_the_backward_pass(model, x, schedule)
        outputs_changed_in_place(split, x, schedule)
        submodules(model, x, schedule)
        changes_of_structure(model, x, schedule)
        modes(model, x, schedule)
        parameters_of_others(model, x, schedule)
        what_parameters_carry(model, x, schedule)
        compiled_by_torch(model, x, schedule)
        what_a_profiler_shows(model, x, schedule)
        memory_of_forward_passes(model, x, schedule)


def overlapped():
    main(["overlap"])
