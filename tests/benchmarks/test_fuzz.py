"""The fuzzer: cases are reproducible, correct plans pass, and a wrong lowering is found and reduced to a test."""

import pickle
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.fuzz import processes
from benchmarks.fuzz.campaign import case_of, fuzz, shrunk
from benchmarks.fuzz.case import Case, Leaf, Options, Ref, Step, build, source
from benchmarks.fuzz.draws import Operand, Seeded
from benchmarks.fuzz.generate import generate
from benchmarks.fuzz.growing import Growing
from benchmarks.fuzz.numbers import Careful, ill_conditioned, plain, step, worst
from benchmarks.fuzz.operators import arguments
from benchmarks.fuzz.parsers import fuzz_parsers, judge
from benchmarks.fuzz.parsers import inputs as parsers
from benchmarks.fuzz.run import Outcome, run
from benchmarks.fuzz.written import as_test
from passes.rules import table
from passes.rules.table import RULES

F64 = torch.float64


def test_every_rule_has_arguments():
    rng = random.Random(0)
    for name in RULES:
        args, _ = arguments(name, Seeded(rng, (2, 4)))
        assert any(isinstance(a, (Operand, list)) for a in args), name


def made(argument):
    if isinstance(argument, list):
        return [made(a) for a in argument]
    return argument.make() if isinstance(argument, Operand) else argument


def test_torch_takes_the_arguments_of_every_rule():
    rng = random.Random(1)
    torch.manual_seed(1)
    for name in RULES:
        library, op, overload = name.replace("autotp.batch_norm_train", "aten.batch_norm").split(".")
        for _ in range(5):
            args, kwargs = arguments(name, Seeded(rng, (1, 2, 3, 4)))
            found = getattr(getattr(getattr(torch.ops, library), op), overload)(*made(args), **kwargs)
            for result in found if isinstance(found, (list, tuple)) else [found]:
                assert not isinstance(result, torch.Tensor) or not result.isnan().any(), name


def test_every_rule_is_the_focus_of_one_case():
    called = {step.call.removeprefix("torch.ops.") for n in range(len(RULES)) for step in generate(110, n).steps}
    assert RULES.keys() - called <= {"autotp.batch_norm_train.default"}  # a name that only capture gives


def test_outputs_are_real():
    complex_numbers = 0
    for number in range(40):
        case = generate(3, number)
        model, args = build(case)
        with torch.no_grad():
            found = model(*args)
        assert not any(output.is_complex() for output in (found if isinstance(found, tuple) else [found]))
        complex_numbers += any(step.call.endswith((".polar.default", ".complex.default")) for step in case.steps)
    assert complex_numbers >= 2


def test_there_is_a_model_where_every_operand_would_be_too_large(monkeypatch):
    monkeypatch.setattr(Growing, "most", 8)
    for number in range(30):
        case = generate(5, number)
        assert case.leaves and case.outputs
        build(case)


def test_a_seed_gives_the_same_cases():
    for number in range(3):
        case = case_of(7, number)
        assert case == case_of(7, number)
        for (_, ours), (_, theirs) in zip(
            build(case)[0].named_parameters(), build(case)[0].named_parameters(), strict=True
        ):
            assert torch.equal(ours, theirs)
    assert len({source(case_of(7, number)) for number in range(3)}) == 3


@pytest.mark.exact
def test_right_plans_run_clean():
    tally, found = fuzz(0, minutes=1, first=0, last=5)
    assert not found and tally.kinds["ok"] >= 3
    assert len(tally.taken) >= 10 and tally.taken <= tally.offered
    assert all(rule in RULES for rule in tally.reached)


def softmax_of(dim_served):
    """A case with a sharded softmax among other operators."""
    steps = (
        Step("v1", "torch.ops.aten.mul.Tensor", (Ref("x"), Ref("p"))),
        Step("v2", ".transpose", (Ref("v1"), 0, 1)),
        Step("v3", "torch.ops.aten.softmax.int", (Ref("v2"), 0)),
        Step("v4", "torch.ops.aten.tanh.default", (Ref("v3"),)),
        Step("v5", "torch.ops.aten.sum.default", (Ref("v1"),)),
    )
    leaves = (Leaf("x", "input", (4, 12), F64, seed=1, form="strided"), Leaf("p", "parameter", (4, 12), F64, seed=2))
    return Case(leaves, steps, ("v4", "v5"), Options(mesh=(2, 2), served={("v3", 0): (dim_served, None)}))


@pytest.mark.slow
def test_a_wrong_lowering_is_found_and_shrunk_to_a_test(monkeypatch):
    case, rule = softmax_of("v0"), RULES["aten.softmax.int"]
    assert run(case).kind == "ok"

    def broken(at, x, dim, *_):  # ignores the elements of other devices
        weights = torch.exp(x)
        return weights / weights.sum(dim, keepdim=True)

    with monkeypatch.context() as patch:
        patch.setattr(table, "RULES", {**RULES, "aten.softmax.int": replace(rule, lower=broken)})
        outcome = run(case)
        assert outcome.kind == "wrong"
        text = shrunk(case, outcome, "softmax")
        assert text.count("        v") == 1 and "softmax" in text and "mesh=(2,)" in text
        names = {"__name__": "found"}
        exec(compile(text, "<found>", "exec"), names)
        with pytest.raises(AssertionError, match="output 0"):
            names["test_softmax"]()
    names["test_softmax"]()


def test_a_crash_is_not_a_refusal(monkeypatch):
    case = softmax_of(None)
    assert run(case.where(family="data", mesh=(3,), served={})).kind == "refused"
    assert run(replace(case, steps=(Step("v4", ".nothing", (Ref("x"),)),), outputs=("v4",))).kind == "not a model"

    def fails(*_):
        raise KeyError("lost")

    rule = replace(RULES["aten.softmax.int"], lower=fails)
    monkeypatch.setattr(table, "RULES", {**RULES, "aten.softmax.int": rule})
    outcome = run(softmax_of("v0"))
    assert outcome.kind == "crash" and "KeyError" in outcome.reason


def cancelling():
    """A difference of equal sums, of which only rounding errors are left."""
    steps = (
        Step("v1", ".sum", (Ref("x"),)),
        Step("v2", ".sum", (Ref("x"), 0)),
        Step("v3", ".sum", (Ref("v2"),)),
        Step("v4", "torch.ops.aten.sub.Tensor", (Ref("v1"), Ref("v3"))),
    )
    return Case((Leaf("x", "input", (37, 53), F64, seed=1, trained=True),), steps, ("v4", "v2"))


def test_rounding_is_not_an_error():
    case = cancelling()
    theirs = plain(case)
    noise = {**theirs, "output 0": theirs["output 0"] + 1e-15}
    name, ratio = worst(case, noise, theirs, None)
    assert name == "output 0" and ratio > 1 and ill_conditioned(case, name, noise, theirs)
    wrong = {**theirs, "output 1": theirs["output 1"] * (1 + 1e-6)}
    name, ratio = worst(case, wrong, theirs, None)
    assert name == "output 1" and ratio > 1 and not ill_conditioned(case, name, wrong, theirs)


@pytest.mark.parametrize(("dtype", "seed"), [(F64, 1), (torch.float32, 1), (torch.bfloat16, 2), (torch.float16, 1)])
def test_a_sum_in_parts_less_the_same_sum_is_rounding(dtype, seed):
    """One sum is reduced and rounded, the other is not: their difference is 0 in the plain model only."""
    steps = (
        Step("v1", "torch.ops.aten.cross_entropy_loss.default", (Ref("x"), Ref("t"), None, 1, -100, 0.1)),
        Step("v2", ".expand", (Ref("v1"), [2, 6, 6])),
        Step("v3", "torch.ops.aten.sub.Tensor", (Ref("v2"), Ref("v1"))),
    )
    leaves = (Leaf("x", "input", (6, 8), dtype, seed=seed), Leaf("t", "input", (6,), torch.int64, "ids", seed=3, high=8))
    served = {("v1", 0): ("m",), ("v2", 0): ("d0",), ("v3", 0): ("+0",)}
    case = Case(leaves, steps, ("v3",), Options(served=served))
    assert run(case).kind == "ill-conditioned"
    theirs = plain(case)
    largest = theirs["output 0"] + plain(replace(case, outputs=("v1",)))["output 0"] * torch.finfo(dtype).eps
    assert ill_conditioned(case, "output 0", {"output 0": largest}, theirs)
    assert not ill_conditioned(case, "output 0", {"output 0": 40 * largest}, theirs)


def test_a_model_with_zeros_is_not_ill_conditioned():
    """Regression: a zero that was moved below 0 had no root, so every error was taken for rounding."""
    steps = (Step("v1", ".relu", (Ref("x"),)), Step("v2", ".sqrt", (Ref("v1"),)))
    case = Case((Leaf("x", "input", (8, 8), F64, seed=1),), steps, ("v2",))
    theirs = plain(case)
    assert not ill_conditioned(case, "output 0", {"output 0": theirs["output 0"] * (1 + 1e-6)}, theirs)


def test_gradients_without_memory_are_not_moved():
    """Regression: the gradient of a sign is a zero tensor without memory; writing to it ended the process."""
    steps = (Step("v1", "torch.ops.aten.sgn.default", (Ref("x"),)),)
    case = Case((Leaf("x", "input", (64, 64), F64, seed=1, trained=True),), steps, ("v1",))
    assert not plain(case, 0)["gradient of input 0"].any()


def test_halves_are_compared_with_float64():
    leaf = Leaf("x", "input", (64, 64), torch.bfloat16, seed=3)
    case = Case((leaf,), (Step("v1", ".cumsum", (Ref("x"), 0)),), ("v1",))
    theirs = plain(case)
    exact = theirs | {"output 0": build(case, F64)[0](*build(case, F64)[1])}
    assert worst(case, theirs, theirs, exact)[1] == 0
    double = theirs | {"output 0": (2 * (theirs["output 0"].double() - exact["output 0"]) + exact["output 0"]).bfloat16()}
    coarse = theirs | {"output 0": exact["output 0"].mul(1.1).bfloat16()}
    assert worst(case, theirs | {"output 0": exact["output 0"].bfloat16()}, theirs, exact)[1] <= 1
    assert worst(case, coarse, theirs, exact)[1] > 1 > worst(case, double, theirs, exact)[1] / 2


def test_a_printed_test_has_what_operators_serve():
    text = as_test(softmax_of("v0"), "served", "as it is")
    assert "served = {" in text and "('v0', None)" in text
    names = {"__name__": "found"}
    exec(compile(text, "<found>", "exec"), names)
    names["test_served"]()


class Norms(nn.Module):
    def __init__(self, training):
        super().__init__()
        torch.manual_seed(0)
        self.training_norm = training
        self.weight, self.bias = nn.Parameter(torch.rand(4).double()), nn.Parameter(torch.rand(4).double())
        self.register_buffer("mean", torch.rand(8).double()[::2])
        self.register_buffer("variance", torch.rand(4).double() + 0.5)

    def forward(self, x):
        statistics = self.mean, self.variance, self.training_norm
        y = torch.ops.aten.batch_norm.default(x, self.weight, self.bias, *statistics, 0.1, 1e-5, False)
        return torch.ops.aten.group_norm.default(y, 2, self.weight, self.bias, 1e-5, False)


@pytest.mark.parametrize("training", [False, True])
def test_the_careful_plain_model_is_the_plain_model(training):
    """Regression: statistics written back after each kernel left saved tensors stale and cut group norm's bias gradient."""
    x = torch.randn(3, 4, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, careful = Norms(training), Norms(training)
    expected = step(plain, plain, (x,))
    with Careful():
        found = step(careful, careful, (x,))
    assert expected.keys() == found.keys()
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want, rtol=1e-12, atol=1e-14, msg=name)


def test_the_case_after_one_that_fails_is_run_by_new_processes(monkeypatch):
    """Regression: processes of the first case end with its error, which was counted as a crash of the second case."""
    outcomes, seen = [Outcome("crash", "the first's"), Outcome("crash", "the second's")], []

    def start(_, args, nprocs, **__):
        for rank in range(nprocs):
            (Path(args[1]) / f"0.{rank}").write_bytes(pickle.dumps(outcomes[len(seen)]))
        return SimpleNamespace(processes=[])

    monkeypatch.setattr(processes.mp, "start_processes", start)
    jobs = [processes.Job(number, cancelling(), "", Outcome("ok")) for number in range(2)]
    processes.run_processes(jobs, 2, lambda job, outcome: seen.append(outcome))
    assert seen == outcomes


def test_damaged_input_is_taken_or_refused():
    outcomes = {kind: set() for kind in parsers.KINDS}
    for number in range(150):
        case = parsers.case_of(11, number)
        if isinstance(case.content, bytes):
            kind, reason = judge.judged(case)
            assert kind in ("ok", "refused"), reason
            outcomes[case.kind].add(kind)
    assert outcomes["plan"] == outcomes["topology"] == {"ok", "refused"}


def test_what_a_parser_may_not_do_is_found_and_shrunk_to_a_test(monkeypatch):
    def broken(file):
        return {}["found"] if b"one" in file.read_bytes() else None

    number = next(
        n for n in range(100) if parsers.case_of(11, n).kind == "runs" and b"one" in parsers.case_of(11, n).content
    )
    monkeypatch.setitem(judge._PARSERS, "runs", broken)
    tally, found = fuzz_parsers(11, 5, number, number)
    assert tally.kinds["crash"] == 1
    ((reason, text),) = found.items()
    assert "KeyError" in reason and "Damaged('runs', b'one')" in text
    names = {}
    exec(compile(text, "<found>", "exec"), names)
    with pytest.raises(AssertionError):
        names[f"test_seed_11_parsers_{number}"]()
