"""`docs/guide/contributing.md`: its snippets work in the places that their first lines name, and its files exist."""

import importlib
import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from devices import slow_machine
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import autotp
from autotp.plans.families import FAMILIES
from costmodel import Link, Topology, collectives, compile_formula
from passes.capture import capture
from passes.overlap import pipeline
from passes.rules import table
from passes.rules.factors import analyse
from passes.strategies.space import strategies

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "contributing.md").read_text()
#: File -> (place in it, text) of the page's snippets.
SNIPPETS = {
    file: (place, text)
    for file, place, text in re.findall(r"^```\w+\n# ([\w/.-]+), (?:in )?(.+?)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
}
MACHINE = slow_machine((4,))


def entry(file, name, form):
    """What a snippet adds to a table of a file, evaluated with the file's names; ``form`` is the code around it."""
    place, text = SNIPPETS[file]
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    assert place == name and hasattr(module, name)
    return eval(form.format(text), dict(vars(module)))


def run(module, model, x, weights):
    """The output and the gradients of the model's parameters."""
    model.zero_grad()
    output = module(x)
    (output * weights).sum().backward()
    return {"output": output.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


def exact(model, plan, x, schedule="overlap"):
    weights = torch.rand(model(x).shape, dtype=x.dtype)
    ours, theirs = (run(m, model, x, weights) for m in (autotp.simulate(model, plan, (x,), schedule=schedule), model))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


class Pairs(nn.Module):
    """Products of all pairs of features."""

    def __init__(self):
        super().__init__()
        self.project, self.pairs = nn.Linear(8, 8), nn.Bilinear(8, 4, 4)

    def forward(self, x):
        return self.pairs(self.project(x), x[..., :4])


def operator_of(plan):
    return next(op for op in plan.operators if op.target == "aten.bilinear.default")


@pytest.mark.slow
def test_an_operator(monkeypatch):
    torch.manual_seed(0)
    model, x = Pairs().double(), torch.randn(4, 2, 8, dtype=torch.float64)
    added = entry("passes/rules/table.py", "RULES", "{{{}}}")
    assert not added.keys() & table.RULES.keys(), "the page adds an operator that has a rule already"
    before = autotp.plan(model, MACHINE, (x,), mesh=(2, 2))
    assert before.replicated == [operator_of(before).name]
    for name, rule in added.items():
        monkeypatch.setitem(table.RULES, name, rule)
    plan = autotp.plan(model, MACHINE, (x,), mesh=(2, 2))
    assert not plan.replicated, "the planner shards it"
    exact(model, plan, x)
    name = operator_of(plan).name
    captured = capture(model, (x,)).graph_module.graph
    (operator,) = (op for node, op in analyse(captured).items() if node.name == name)
    every = [strategy.assignment for strategy in strategies(operator, plan.mesh_shape)]
    assert {"m2", "n", "i", "j"} <= {factor for assignment in every for factor in assignment}
    for assignment in every:  # the planner might not choose a wrong one
        others = tuple(replace(op, assignment=assignment) if op.name == name else op for op in plan.operators)
        exact(model, replace(plan, operators=others), x, "none")


def test_a_family(monkeypatch):
    torch.manual_seed(0)
    (family,) = entry("autotp/plans/families.py", "FAMILIES", "({},)")
    assert family.name not in FAMILIES
    monkeypatch.setitem(FAMILIES, family.name, family)
    model, x = (
        nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double(),
        torch.randn(2, 6, 8, dtype=torch.float64),
    )
    plan = autotp.plan(model, MACHINE, (x,), mesh=(2, 2), strategy=family.name)
    for op in plan.operators:
        used = plan.assignments[op.name]
        assert None not in used and len(set(used)) == 2, "the batch of 2 goes to one axis, the tokens to the other"
    assert all(str(placement) == "R" for name, _ in model.named_parameters() for placement in plan.resting(name))
    exact(model, plan, x)


def test_an_algorithm(monkeypatch):
    added = entry("costmodel/collectives.py", "ALGORITHMS", "{{{}}}")
    ((kind, algorithms),) = added.items()
    known = collectives.ALGORITHMS[kind]
    assert known.items() <= algorithms.items() and len(algorithms) == len(known) + 1
    libraries = {"mpi": collectives.LIBRARIES["mpi"] | algorithms.keys()}
    monkeypatch.setattr(collectives, "ALGORITHMS", MappingProxyType({**collectives.ALGORITHMS, **added}))
    with monkeypatch.context() as patch:
        before = seconds(kind)
        patch.setattr(collectives, "LIBRARIES", libraries)
        after = seconds(kind)
    assert after(64, 64.0) == pytest.approx(6 * (1e-6 + 32.0 / 1e9)) and after(64, 64.0) < before(64, 64.0)
    assert after(64, 1e9) == before(64, 1e9), "long messages go in pairs"


def seconds(kind):
    """Seconds of an MPI collective as a function of the number of ranks and of bytes, on one level: 1 us, 1 GB/s."""
    compiled = compile_formula(collectives.OF_LINK, collectives.expression(kind, "mpi"))
    return lambda n, volume: compiled(volume, *collectives.figures(Link(n, 1e9, 1e-6)))


def test_a_pass(monkeypatch):
    file, (_, text) = next((file, found) for file, found in SNIPPETS.items() if file.startswith("passes/overlap/"))
    assert not (ROOT / file).exists()
    names = {"torch": torch, "fx": torch.fx}
    exec(text, names)
    added = names[Path(file).stem]
    traced = make_fx(lambda x: (x.neg().neg() * 2, x.neg().neg()))(torch.ones(3))
    added(traced.graph)
    traced.graph.lint()
    assert [node.name for node in traced.graph.nodes if node.target is torch.ops.aten.neg.default] == ["neg_2", "neg_3"]
    counts = []
    counted = (lambda graph: counts.append(negations(graph)), added, lambda graph: counts.append(negations(graph)))
    monkeypatch.setattr(pipeline, "PASSES", (*pipeline.PASSES, *counted))
    model, x = Twice().double(), torch.randn(8, 8, dtype=torch.float64)
    exact(model, autotp.plan(model, MACHINE, (x,), mesh=(2, 2), strategy="data"), x)
    assert counts[:2] == [2, 0] and not any(counts[1::2]), "the forward graph's two, and the backward graph's if it has any"


class Twice(nn.Module):
    """Negates a value twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.layer(x).neg().neg()


def negations(graph):
    return sum(node.target is torch.ops.aten.neg.default for node in graph.nodes)


def test_a_preset(tmp_path):
    file, (_, text) = next((file, found) for file, found in SNIPPETS.items() if file.startswith("costmodel/presets/"))
    assert not (ROOT / file).exists()
    path = tmp_path / Path(file).name
    path.write_text(text)
    found = Topology.load(path)
    assert found.name == path.stem and found.name not in Topology.preset_names()
    assert found.resized(16).links((2, 8))[0].bandwidth < found.levels[0].bandwidth


def test_every_snippet_is_checked():
    assert len(SNIPPETS) == len(re.findall("^```.", PAGE, re.MULTILINE)) == 5


def test_every_file_that_is_named_is_there():
    new = {file for file, (place, _) in SNIPPETS.items() if place == "a new file"}
    named = set(re.findall(r"`((?:passes|autotp|costmodel|tests|benchmarks|docs)/[\w./-]*)`", PAGE)) - new
    assert len(named) > 30
    assert not [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize(("name", "file"), re.findall(r"`(\w+)` in `([\w/]+\.py)`", PAGE))
def test_what_a_file_is_said_to_have_is_in_it(name, file):
    assert re.search(rf"^(def |class )?{name}\b", (ROOT / file).read_text(), re.MULTILINE)
