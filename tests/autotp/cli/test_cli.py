"""The command line and its tables: what is printed, where, and with which exit code."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from autotp import Plan, PlannedOperator, Predicted, cli
from autotp.cli.render import plan_table
from autotp.cli.terminal import Terminal
from autotp.plans.folded import fold_operators
from costmodel import Topology

MODEL = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Regression(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
            self.head = nn.Linear(32, 8)

        def forward(self, x, y):
            for layer in self.layers:
                x = F.gelu(layer(x))
            return F.mse_loss(self.head(x), y)

    def build():
        with torch.device("meta"):
            return Regression(), (torch.zeros(16, 32), torch.zeros(16, 8))

    def keywords():
        with torch.device("meta"):
            return Regression(), {"x": torch.zeros(16, 32), "y": torch.zeros(16, 8)}

    def mixed():
        with torch.device("meta"):
            return Regression(), (torch.zeros(16, 32),), {"y": torch.zeros(16, 8)}

    def alone():
        return nn.ReLU()

    def wrong():
        return "a model"

    def failing():
        return {}["nothing"]

    def crowded():
        return nn.Linear(2, 2), (torch.ones(2), torch.ones(2))

    def unnamed():
        return nn.Linear(2, 2), {"input": torch.ones(2), 3: 4}

    def endless():
        inputs = []
        inputs.append(inputs)
        return nn.Linear(2, 2), (inputs,)

    size = 3
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    file = tmp_path / "example_model.py"
    file.write_text(textwrap.dedent(MODEL))
    return file


def operator(name: str, module: str, **changes: object) -> PlannedOperator:
    fields: dict = {
        "name": name,
        "target": "aten.linear.default",
        "module": module,
        "scheme": "tensor3d",
        "assignment": ("n", "k"),
        "strategy": {"n": ("x",), "k": ("y",)},
        "layouts": ("S(2)@y", "S(0)@x S(1)@y", "S(2)@x P@y"),
        "count": 2,
        "fold": "linear",
        "seconds": 1e-3,
        "communication_seconds": 4e-4,
        "bytes_moved": 1e6,
        "bound_bytes": 4e5,
        "panels": 1,
        "replicated": False,
    }
    return PlannedOperator(**(fields | changes))


def fake_plan(**changes: object) -> Plan:
    fields: dict = {
        "strategy": "tensor3d",
        "mesh_shape": (2, 2),
        "mesh_axes": ("x", "y"),
        "topology": Topology.load("dgx-a100").resized(4),
        "operators": (
            operator("linear", "h.0.mlp"),
            operator("linear_1", "h.1.mlp"),
            operator("sort", "[head]", target="aten.sort.default", strategy={}, replicated=True),
        ),
        "layouts": {},
        "optimal": True,
        "gap": 0.0,
        "predicted": Predicted(3e-3, 2e-3, 1.5e-3, 1e-3, 60e9),
        "model_hash": "0" * 16,
        "mode": "train",
        "optimizer": "adamw",
        "memory_bound": 80e9,
        "planning": {"capture_seconds": 0.5, "seconds": 2.0, "variables": 1234, "meshes": 3},
    }
    return Plan(**(fields | changes))


def shown(plan: Plan, width: int = 200, **options: Any) -> str:
    console = Terminal(width=width, no_color=True, file=io.StringIO())
    with console.capture() as capture:
        console.print(plan_table(plan, **options))
    return capture.get()


def test_layers_are_folded_in_the_table() -> None:
    rows = fold_operators(fake_plan().operators)
    assert [(row.module, len(row.operators)) for row in rows] == [("h.*.mlp", 2), ("[head]", 1)]
    assert rows[0].seconds == pytest.approx(2e-3)
    assert rows[0].bytes_moved == pytest.approx(2e6)


def test_layers_planned_differently_stay_apart() -> None:
    other = operator("linear_1", "h.1.mlp", scheme="data", strategy={"b": ("x", "y")})
    assert len(fold_operators([operator("linear", "h.0.mlp"), other])) == 2


def test_a_number_inside_a_name_is_no_layer() -> None:
    (row,) = fold_operators([operator("conv", "blocks.10.conv1")])
    assert row.module == "blocks.*.conv1"


def test_the_table_says_when_a_step_waits_for_the_host() -> None:
    text = shown(fake_plan(predicted=Predicted(5e-3, 2e-3, 1.5e-3, 1e-3, 60e9, host_seconds=2e-3)))
    assert "5 ms = compute 2 ms + exposed communication 1 ms (of 1.5 ms in all) + waiting for the host 2 ms" in text
    assert "host" not in shown(fake_plan())


def test_the_table_says_everything() -> None:
    text = shown(fake_plan())
    for words in (
        "x=2 × y=2",
        "dgx-a100: 4 devices",
        "h.*.mlp",
        "n→x, k→y",
        "3 ms = compute 2 ms + exposed communication 1 ms",
        "60 GB of 80 GB (75.0%)",
        "proven optimal",
        "1,234 variables",
        "[head]",
        "replicated, having no rule (1): sort",
    ):
        assert words in text


def test_the_table_shows_the_gap_and_the_users_bound() -> None:
    text = shown(fake_plan(optimal=False, gap=0.034, memory_bound=40e9))
    assert "not proven: within 3.40% of the bound" in text
    assert "60 GB of 40 GB (150.0%)" in text


def test_a_narrow_terminal_gets_no_layouts() -> None:
    assert "S(0)@x S(1)@y" in shown(fake_plan(), width=140)
    narrow = shown(fake_plan(), width=80)
    assert "S(0)@x" not in narrow and "n→x, k→y" in narrow


def test_the_cheapest_rows_are_left_out_and_counted() -> None:
    def added(seconds: float) -> Plan:
        cheap = operator("add", "h.0", target="aten.add.Tensor", seconds=seconds, bytes_moved=0.0)
        return fake_plan(operators=(cheap, *fake_plan().operators))

    assert "│ add " in shown(added(1e-4))
    for text in (shown(added(1e-4), limit=2), shown(added(1e-6))):
        assert "│ add " not in text and "and 1 cheaper row" in text
    assert "│ add " in shown(added(1e-6), limit=None)


@pytest.mark.parametrize("factory", ["build", "keywords", "mixed"])
def test_plan_prints_a_table_without_colours(
    run_cli, model_file: Path, factory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--topology", "dgx-a100", "--devices", 4, "--strategy", "megatron-1d", "--mesh", "1,4")
    assert run_cli("plan", "--model", f"{model_file}:{factory}", *words) == 0
    out = capsys.readouterr().out
    assert "layers.*" in out and "predicted step" in out
    assert "\x1b" not in out


def test_plan_prints_and_saves_json(run_cli, model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    options = ("--topology", "cpu", "--devices", 2, "--memory", "1 GB", "--json", "--save", file)
    assert run_cli("plan", "--model", f"{model_file}:build", *options) == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert err == ""
    assert printed["strategy"] == "auto"
    assert printed["memory_bound"] == 1e9
    assert Plan.load(file).hash == printed["hash"]


def test_a_module_on_the_path_can_be_named(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model_file.parent)
    monkeypatch.syspath_prepend(str(model_file.parent))
    model, args, kwargs = cli.load_model("example_model:mixed")
    assert type(model).__name__ == "Regression"
    assert len(args) == 1 and kwargs is not None and list(kwargs) == ["y"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("FILE", "expected FILE.py:FACTORY"),
        ("absent.py:build", "no file absent.py"),
        ("no_such_package.models:build", "No module named 'no_such_package'"),
        ("FILE:bulid", "has no function 'bulid'; it has Regression, build, keywords"),
        ("FILE:size", "has no function 'size'"),
        ("FILE:wrong", "the factory returned str"),
        ("FILE:crowded", "the inputs that the factory returned do not fit the model's forward: too many positional"),
        ("FILE:unnamed", "the inputs that the factory returned do not fit the model's forward: "),
        ("FILE:endless", "the factory returned inputs that contain themselves"),
        ("FILE:failing", "failing() raised KeyError: 'nothing' ("),
    ],
)
def test_a_wrong_model_is_an_error_not_a_traceback(
    run_cli, model_file: Path, spec: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("plan", "--model", spec.replace("FILE", str(model_file)), "--topology", "cpu") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --model ") and message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--topology", "dgx-a1000"), "no topology preset is named 'dgx-a1000'"),
        (("--topology", "dgx-a100", "--devices", "13"), "cannot have 13 devices"),
        (("--topology", "cpu", "--mesh", "2,two"), "--mesh '2,two'"),
        (("--topology", "cpu", "--devices", "2", "--mesh", "3"), "3"),
        (("--topology", "cpu", "--memory", "80 GHz"), "--memory: "),
        (("--topology", "cpu", "--strategy", "zero4"), "strategy 'zero4' is unknown"),
        (("--topology", "cpu", "--optimizer", "adam"), "adam"),
        (("--topology", "cpu", "--memory", "1 kB"), "no plan"),
        (("--topology", "cpu", "--save", "/no/such/folder/plan.json"), "--save /no/such/folder/plan.json"),
        (("--topology", "cpu", "--html", "/no/such/folder/plan.html"), "--html /no/such/folder/plan.html"),
        (("--topology", "cpu", "--recompute", ""), "recompute=[''] is unknown"),
    ],
)
def test_wrong_options_end_with_2(
    run_cli, model_file: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("plan", "--model", f"{model_file}:build", *options) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err


def test_a_model_that_cannot_be_captured_ends_with_2(run_cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "branching.py"
    file.write_text(
        "import torch\n"
        "class Branching(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x if x.sum() > 0 else -x\n"
        "def build():\n"
        "    return Branching(), (torch.zeros(4),)\n"
    )
    assert run_cli("plan", "--model", f"{file}:build", "--topology", "cpu") == 2
    err = capsys.readouterr().err
    assert "error: " in err and "Branching" in err and "Traceback" not in err


def test_topologies_are_listed_and_shown(run_cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("topology") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in Topology.preset_names())
    assert run_cli("topology", "dgx-a100") == 0
    out = capsys.readouterr().out
    assert "300 GB/s" in out and "80 GB" in out and "312 TFLOP/s" in out


def test_usage(run_cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("--version") == 0
    assert capsys.readouterr().out.startswith("autotp ")
    assert run_cli("plan", "--help") == 0
    assert "--topology" in capsys.readouterr().out
    assert run_cli("plan", "--no-such-option") == 2
    assert run_cli("topology", "no-such-preset") == 2


@pytest.mark.slow
def test_output_of_libraries_stays_out_of_json(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(
        "import ctypes, torch\n"
        "def build():\n"
        "    ctypes.CDLL(None).puts(b'printed by a library')\n"
        "    return torch.nn.Linear(4, 4), torch.zeros(2, 4)\n"
    )
    command = [sys.executable, "-m", "autotp", "plan", "--model", "noisy.py:build", "--topology", "dgx-a100"]
    done = subprocess.run([*command, "--devices", "2", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["strategy"] == "auto"
    assert "printed by a library" in done.stderr
