"""The benchmark of architectures: its verdicts, and that existing results are not computed again."""

import dataclasses
import json
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.coverage import __main__ as command
from benchmarks.coverage import check as checking
from benchmarks.coverage.architectures import ARCHITECTURES
from benchmarks.coverage.build import example
from passes.rules.table import RULES


class Doubled(nn.Module):
    """One operator with a rule, one without, and a boolean output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x):
        y = self.linear(x).exp()
        return torch.renorm(y, 2, 0, 1.0), y > 1


class Deciding(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


def test_there_are_enough():
    assert len(ARCHITECTURES) >= 150 and len({name.split(":")[0] for name in ARCHITECTURES}) == 5


def test_what_is_built_is_tiny_and_draws_nothing():
    model, args, kwargs = ARCHITECTURES["transformers: BertForMaskedLM"]()
    assert not args and sum(p.numel() for p in model.parameters()) < 1e5
    assert model.training and torch.equal(model(**kwargs).loss, model(**kwargs).loss)


def test_verdicts(monkeypatch):
    models = {"doubled": Doubled, "deciding": Deciding}
    table = {name: lambda make=make: example(make(), ((4, 8),)) for name, make in models.items()}
    monkeypatch.setattr(checking, "ARCHITECTURES", table)
    found = checking.check("doubled")
    assert found.verdict == "exact" and found.error < 1e-12 and found.without == {"aten.renorm.default": 1}
    assert 0.5 < found.share < 1 and set(found.seconds) == set(checking.PLANS) and found.operators == 4
    assert checking.check("deciding").verdict == "not exported"
    assert checking.check("unknown").verdict == "not built"
    # Makes an operator wrong on every device: each of them adds the bias.
    wrong = dataclasses.replace(RULES["aten.linear.default"], form="… k, n k, n -> … n", additive=())
    monkeypatch.setattr("passes.rules.table.RULES", {**RULES, "aten.linear.default": wrong})
    monkeypatch.setattr(checking, "PLANS", {"megatron-1d": (4,)})
    table["wide"] = partial(example, nn.Linear(8, 1), ((1, 8),))
    assert checking.check("wide").verdict == "differs"


def test_a_run_goes_on_where_it_ended(monkeypatch, tmp_path, capsys):
    row = {"name": "a: b", "verdict": "exact", "detail": "", "error": 1e-16, "without": {"aten.x.default": 2}}
    row |= {"share": 0.9, "seconds": {"auto": 11.0}, "operators": 3}
    monkeypatch.setattr(command, "KEPT", tmp_path / "kept")
    command.KEPT.write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(command, "_names", lambda: ["a: b"])
    monkeypatch.setattr(command.sys, "argv", ["coverage"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "Of 1, **1 are exact**" in text and "1 take longer than 10 s to plan: a: b" in text
    assert "**0** of these" in text and "`x` 1" in text
