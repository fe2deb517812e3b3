"""Input made to break parsers: it is refused at once with autotp's own error, and names are never taken for markup."""

import dataclasses
import io
import json
import math
import os
import re
import subprocess
import sys
import time
from importlib import resources

import pytest
import torch
from thinned import thinned
from torch import nn

import autotp
from autotp.analysis.explain import priced_plan
from autotp.cli import huggingface, load_model, main
from autotp.cli.render import plan_table, topology_table
from autotp.cli.sweep_output import label_of
from autotp.cli.terminal import Terminal
from autotp.planner import plan_captured
from autotp.plans.constraints import parse
from autotp.plans.options import Options
from autotp.validate import read_runs
from costmodel import Level, Topology, TopologyError, parse_quantity
from passes.capture import capture

CPU = (resources.files("costmodel") / "presets" / "cpu.toml").read_text()
MODEL = """
import asyncio
import sys
import torch
from torch import nn

class Hidden(Exception):
    def __str__(self): raise KeyError("no text")

def build(): return nn.Linear(8, 8), (torch.zeros(2, 8),)
def leave(): sys.exit(0)
def hidden(): raise Hidden
def endless(): return endless()
def cancelled(): raise asyncio.CancelledError
def noname(): exec(compile("raise ValueError('boom')", "", "exec"))

class Exits(nn.Module):
    def forward(self, x): sys.exit(0)

class Groups(nn.Linear):
    def parameters(self, recurse=True): raise KeyError("use groups()")

class Odd(tuple):
    def __len__(self): raise KeyError("no length")

def shapes(): return nn.Linear(8, 8), (torch.zeros(2, 7),)
def exits(): return Exits(), (torch.zeros(2, 8),)
def groups(): return Groups(8, 8), (torch.zeros(2, 8),)
def lazy(): return nn.LazyLinear(8), (torch.zeros(2, 8),)
def odd(): return Odd(build())
def inside():
    model, args = build()
    model.add_module("again", model)
    return model, args
"""
CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 16, "n_head": 2}


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).double()


X = (torch.linspace(-1, 1, 128, dtype=torch.float64).reshape(8, 16),)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "net.py").write_text(MODEL)
    (folder / "leaving.py").write_text("raise SystemExit(0)")
    (folder / "importing.py").write_text("def __getattr__(name): raise ImportError('needs libfoo')")
    (folder / "parts.toml").write_text(
        f"[{'.'.join('a' * 32)}]\n" + "".join(f"{'a.' * 30}b{i} = 1\n" for i in range(29_000))
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("fifo", "fifo.toml", "fifo.json", "fifo.py", "fifo.csv"):
        os.mkfifo(folder / name)
    for name, text in TOPOLOGIES.items():
        (folder / f"{name}.toml").write_text(text)
    for name, text in {
        "digits": "9" * 5_000,
        "deep": "[" * 60_000,
        "no": "[]",
        "layers": '{"n_layer": 1000000000}',
        "groups": '{"model_type": "albert", "num_hidden_groups": 2147483648}',
        "labels": '{"model_type": "bert", "num_labels": 2147483648}',
        "types": '{"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global", "local"], 200000000]]}',
    }.items():
        (folder / f"{name}.json").write_text(text)
    autotp.plan(two_layers(), autotp.Topology.flat(2), X).save(folder / "plan.json")
    load_model(f"{folder}/config.json:batch=1,sequence=1")  # imports transformers, which takes seconds
    return folder


TOPOLOGIES = {
    "digits": re.sub("(?m)^size = .*", "size = " + "9" * 5_000, CPU),
    "many": re.sub("(?m)^size = .*", "size = 1000000000", CPU),
    "subnormal": CPU.replace('bandwidth = "', 'bandwidth = "5e-324 B/s" #'),
    "overflow": CPU.replace('latency = "', 'latency = "1e999 s" #'),
    "deep": "a = " + "[" * 50_000,
    "dotted": "a" + ".a" * 50_000 + " = 1",
    "tables": "[a" + ".a" * 50_000 + "]",
    "word": CPU + "x" * 500_000,
    "quotes": CPU + "a = '" + '"' * 500_000,
    "nul": CPU.replace('name = "', 'name = "\0'),
    "large": "#" * 2**22,
}
COMMANDS = [
    *(f"topology {name}.toml" for name in TOPOLOGIES),
    "topology fifo.toml",
    "topology /dev/zero",
    "topology " + "n" * 5_000,
    "topology " + "d/" * 5_000 + "x.toml",
    "topology absent.toml",
    "topology .",
    *(f"diff plan.json {file}" for file in ("fifo", "/dev/zero", "digits.json", "deep.json", "no.json", "d/" * 5_000, ".")),
    *(f"plan --topology cpu --model {model}" for model in ("net.py:leave", "net.py:hidden", "net.py:endless")),
    *(
        f"plan --topology cpu --model net.py:{name}"
        for name in ("cancelled", "noname", "exits", "groups", "lazy", "odd", "inside")
    ),
    "plan --topology parts.toml --model net.py:build",
    *(
        f"plan --topology cpu --model {model}"
        for model in ("leaving.py:build", "importing.py:build", "fifo.py:build", "d/" * 5_000 + "net.py:build")
    ),
    *(
        f"plan --topology cpu --model {model}.json"
        for model in ("absent/config", "fifo", "digits", "deep", "no", "layers", "groups", "labels", "types")
    ),
    *(f"plan --topology cpu --model config.json:batch={batch}" for batch in ("²", "٣", "9" * 5_000, "1000000000", "-1")),
    *(
        f"plan --topology cpu --model net.py:build --devices {count}"
        for count in ("1000000000", "9" * 40, "9" * 5_000, "²")
    ),
    *(f"plan --topology cpu --model net.py:build --mesh {mesh}" for mesh in ("²", "9" * 5_000, "2" + ",2" * 5_000, "1e9")),
    *(
        f"plan --topology cpu --model net.py:build --chunks {chunks}"
        for chunks in ("batch=²", "rows=" + "9" * 5_000, "=", "x")
    ),
    *(f"plan --topology cpu --model net.py:build --gap {gap}" for gap in ("nan", "1e999", "5e-324", "-1")),
    *(f"plan --topology cpu --model net.py:build --memory {size}" for size in ("5e-324", "1e999", "9" * 5_000, "0", "٣")),
    *(
        f"plan --topology cpu --model net.py:build --pin {pin}"
        for pin in ("a=S(" + "9" * 5_000 + ")@x", "*" * 5_000 + "=R", "=")
    ),
    "plan --topology cpu --model net.py:build --accumulate " + "9" * 40,
    "sweep --topology cpu --model net.py:build --devices 1000000000",
    "sweep --topology cpu --model net.py:build --devices 1 --csv " + "d/" * 5_000 + "s.csv",
    "inspect plan.json --model net.py:build --html " + "d/" * 5_000 + "r.html",
    "explain all_reduce --topology cpu --bytes 1e999",
    "explain all_reduce --topology cpu --bytes 1 --mesh " + "9" * 5_000,
    "explain all_reduce --topology cpu --bytes 1 --mesh 1,1,1,1,1,1,1,8",
    "explain all_reduce --topology cpu --bytes 1 --memory --alternatives 7",
    "explain relu --plan plan.json --model net.py:build --axes q --bytes junk",
    "inspect plan.json --model net.py:build --code --json",
    "inspect plan.json --model net.py:build --timeline",
    "plan --topology cpu --model net.py:build --no-timeline",
    "plan --topology cpu --model net.py:shapes",
    "sweep --topology cpu --model net.py:build --devices 1 --csv same.svg --plot same.svg",
    "validate fifo.csv",
    "validate /dev/zero",
    "--unknown",
    "plan",
]


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line[:70])
def test_the_command_line_refuses_it_at_once(place, monkeypatch, capsys, line):
    monkeypatch.chdir(place)
    begin = time.process_time()
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    took, said = time.process_time() - begin, capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    assert said.err.startswith("error: ") and len(said.err) < 10_000
    assert took < 5, "a tenth of a second on a quiet machine; what does not end takes minutes"


def test_a_model_of_too_many_parts_is_not_made(place, monkeypatch, capsys):
    monkeypatch.setattr(huggingface, "_MOST_PARTS", 20)
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--topology", "cpu", "--model", f"{place}/config.json:batch=1,sequence=1"])
    assert "more than 20 parameters and modules" in capsys.readouterr().err


@pytest.mark.slow
def test_output_that_cannot_be_written(place, monkeypatch):
    command = [sys.executable, "-m", "autotp", "topology", "cpu"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", thinned([["--version"], ["topology"], ["plan", "--topology", "cpu", "--model", "config.json"]], 3, whole=True)
)
def test_closed_output(place, words):
    command = f"{sys.executable} -m autotp {' '.join(words)} >&-"
    ended = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False, cwd=place)
    assert ended.returncode == 2
    assert ended.stderr.endswith("error: the output cannot be written: Bad file descriptor\n")
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_in_an_encoding_without_all_characters(place, encoding):
    command = [sys.executable, "-m", "autotp", "plan", "--topology", "cpu", "--devices", "2", "--model", "plain.py:build"]
    (place / "plain.py").write_text("import torch\ndef build(): return torch.nn.Linear(8, 8), (torch.ones(4, 8),)\n")
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    ended = subprocess.run(command, capture_output=True, check=False, cwd=place, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert b"predicted step" in ended.stdout


@pytest.mark.slow
def test_a_reader_that_has_gone(place):
    with subprocess.Popen(
        [sys.executable, "-m", "autotp", "topology", "cpu", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        command.stdout.close()
        assert (command.stderr.read(), command.wait()) == ("", 1)


@pytest.mark.parametrize("size", ["²", "0", "9" * 5000, "-3", "1.5"])
def test_sizes_of_a_terminal_that_are_none(monkeypatch, capsys, size):
    monkeypatch.setenv("COLUMNS", size)
    monkeypatch.setenv("LINES", size)
    with pytest.raises(SystemExit, match="0"):
        main(["topology", "cpu"])
    assert "bandwidth" in capsys.readouterr().out


MODULES = {
    "raises": "class Own(BaseException): pass\nraise Own('no')",
    "replaced": "import sys\nsys.modules[__name__] = object()",
    "ends": "def __getattr__(name): raise SystemExit(0)",
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("suffix", ["", ".py"])
def test_modules_that_are_unlike_any(place, monkeypatch, capsys, kind, suffix):
    (place / f"unlike_{kind}.py").write_text(MODULES[kind])
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--topology", "cpu", "--model", f"unlike_{kind}{suffix}:build"])
    assert capsys.readouterr().err.startswith(f"error: --model 'unlike_{kind}{suffix}:build': ")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "abc", "RANK is 'abc'"),
        ("RANK", "7", "RANK is 7"),
        ("MASTER_PORT", "70000", "MASTER_PORT is 70000"),
        ("MASTER_ADDR", None, "(MASTER_ADDR is not set)"),
    ],
)
def test_environments_that_torchrun_does_not_make(tmp_path, monkeypatch, capsys, name, value, said):
    for key, usual in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, usual)
    monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        main(["calibrate", "--output", str(tmp_path / "box.toml")])
    assert said in capsys.readouterr().err


def test_what_no_input_should_lead_to(monkeypatch, capsys):
    def broken(*_, **__):
        raise KeyError("lost")

    monkeypatch.setattr(Topology, "load", broken)
    with pytest.raises(SystemExit, match="3"):
        main(["topology", "cpu"])
    assert "error: KeyError: 'lost' (" in (said := capsys.readouterr().err) and "report it" in said
    monkeypatch.setenv("AUTOTP_TRACEBACK", "1")
    with pytest.raises(KeyError):
        main(["topology", "cpu"])


@pytest.mark.parametrize("where", ["import", "factory"])
def test_a_model_that_moves_elsewhere_leaves_paths_and_streams_as_they_are(place, monkeypatch, where):
    monkeypatch.chdir(place)
    (place / "sub").mkdir(exist_ok=True)
    moving = "import os, sys; os.chdir(os.path.dirname(os.path.abspath(__file__))); sys.stdout = None"
    whole = "    import torch\n    return torch.nn.Linear(8, 8), (torch.ones(4, 8),)\n"
    text = f"{moving}\ndef build():\n{whole}" if where == "import" else f"def build():\n    {moving}\n{whole}"
    (place / "sub" / f"moves_on_{where}.py").write_text(text)
    with pytest.raises(SystemExit, match="0"):
        main(f"plan --topology cpu --devices 2 --model sub/moves_on_{where}.py:build --save {where}.json".split())
    assert (place / f"{where}.json").is_file() and not (place / "sub" / f"{where}.json").exists()


def test_a_file_may_begin_with_the_mark_of_its_byte_order(tmp_path):
    text = (resources.files("costmodel") / "presets" / "cpu.toml").read_bytes()
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf" + text)
    assert Topology.load(tmp_path / "marked.toml") == Topology.load("cpu")


def test_a_report_of_a_file_whose_name_is_no_text(place, monkeypatch, tmp_path):
    odd = os.fsdecode(b"caf\xe9.py")
    (place / odd).write_text(MODEL)
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--topology", "cpu", "--model", f"{odd}:build", "--html", str(tmp_path / "report.html")])
    assert "caf?.py" in (tmp_path / "report.html").read_text()


def test_a_name_with_a_nul_is_no_file(tmp_path):
    for load in (autotp.Topology.load, autotp.Plan.load, read_runs):
        with pytest.raises(autotp.AutotpError, match="NUL"):
            load(tmp_path / "a\0b.toml")
    plan = autotp.plan(two_layers(), autotp.Topology.flat(2), X)
    with pytest.raises(OSError, match="NUL"):
        plan.save(tmp_path / "a\0b")


@pytest.mark.parametrize(
    "value",
    [10**40, 10**5_000, 5e-324, 1e308, math.nan, math.inf, "²", "٣ s", "9" * 5_000, None, []],
    ids=lambda value: str(value)[:20] if not isinstance(value, int) else "int",
)
def test_quantities(value):
    with pytest.raises(autotp.AutotpError):
        parse_quantity(value, "time")
    with pytest.raises(TopologyError):
        Level("in", 2, 1e9, value)


@pytest.mark.parametrize(
    "count",
    [10**9, 10**5_000, 0, -1, 2.0, True, "2", None],
    ids=lambda count: repr(count)[:9] if count != 10**5_000 else "long",
)
def test_numbers_of_devices(count):
    with pytest.raises(TopologyError):
        autotp.Topology.flat(count)
    with pytest.raises(TopologyError):
        autotp.Topology.load("dgx-a100").resized(count)
    with pytest.raises(autotp.AutotpError):
        Options(mesh=(count, 2))


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": []},
        {"strategy": "x" * 10**6},
        {"optimizer": {}},
        {"mesh": 4},
        {"mesh": "22"},
        {"memory": "80 GB"},
        {"memory": math.nan},
        {"time_limit": -1},
        {"gap": "x"},
        {"panels": 10**5_000},
        {"accumulate": True},
        {"chunks": {"batch": 10**5_000}},
        {"chunks": {(): 1}},
        {"precision": []},
        {"precision": "cast_forward_inputs=float32"},
        {"recompute": 3},
        {"constraints": 5},
        {"constraints": False},
        {"constraints": [5]},
        {"constraints": ["a=S(" + "9" * 5_000 + ")@x"]},
        {"constraints": ["a" * 10**6 + "=R"]},
    ],
    ids=lambda options: str(options)[:40] if "panels" not in options and "chunks" not in options else "number",
)
def test_options(options):
    with pytest.raises(autotp.AutotpError) as error:
        Options(**options)
    assert len(str(error.value)) < 1_000


def test_a_dim_in_other_digits_is_no_dim():
    with pytest.raises(autotp.AutotpError, match="cannot be read"):
        parse(["a=S(٣)@x"])


@pytest.fixture(scope="module")
def captured():
    captured = capture(two_layers(), X)
    return captured, plan_captured(captured, autotp.Topology.flat(2), Options())


def altered(plan, path, value):
    """A plan's JSON with one value changed, and the hash that matches it."""
    data = json.loads(plan.to_json())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value(place[path[-1]]) if callable(value) else value
    try:
        autotp.Plan.from_json(json.dumps(data))
    except autotp.AutotpError as error:
        found = str(error).partition("content ")[2].rstrip(")")
        return json.dumps(data | {"hash": found}) if found else json.dumps(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("mesh_shape",), [4]),
        (("mesh_shape",), [2, 1]),
        (("mesh_shape",), [10**40]),
        (("mesh_axes",), ["y"]),
        (("operators",), lambda rows: rows[:-1]),
        (("operators",), lambda rows: [*rows, rows[0]]),
        (("operators", 0, "name"), "other"),
        (("operators", 0, "module"), "9"),
        (("operators", 0, "fold"), "other"),
        (("operators", 0, "assignment"), ["v99"]),
        (("operators", 0, "assignment"), ["+9"]),
        (("operators", 0, "assignment"), []),
        (("operators", 0, "panels"), 7),
        (("operators", 0, "seconds"), -1.0),
        (("operators", 0, "count"), 0),
        (("operators", 0, "strategy"), {"m": ["q"]}),
        (("layouts", "0.weight"), [[10**18, 1]]),
        (("layouts", "0.weight"), [[0, 10**18]]),
        (("layouts", "0.weight"), [[5, 1]]),
        (("layouts", "0.weight"), [[0, 7]]),
        (("layouts", "0.weight"), ["R", "R"]),
        (("layouts",), lambda layouts: layouts | {"other": ["R"]}),
        (("gathered_once",), ["other"]),
        (("batch_axes",), ["q"]),
        (("precision",), "bf16-of-sorts"),
        (("constraints",), ["nothing"]),
        (("planning", "seconds"), "long"),
        (("planning", "variables"), "many"),
        (("planning", "repriced"), {}),
        (("predicted", "step_seconds"), 1e308),
        (("topology", "levels", 0, "size"), 4),
        (("topology", "levels", 0, "bandwidth"), 5e-324),
    ],
)
def test_a_plan_that_was_edited_and_hashed_anew(captured, path, value):
    with pytest.raises(autotp.AutotpError):
        loaded = autotp.Plan.from_json(altered(captured[1], path, value))
        priced_plan(captured[0], loaded)


def test_a_plan_that_was_edited_and_is_a_plan_computes_the_same(captured):
    plan = captured[1]
    other = autotp.Plan.from_json(altered(plan, ("layouts", "0.weight"), [[0, 1]]))
    model = two_layers()
    assert torch.allclose(autotp.simulate(model, other, X)(*X), model(*X), rtol=0, atol=1e-12)


NAMES = ["[/]", "[/markup]", "[bold red]x[/]", ":smile:", "\\", "a\\[b]"]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_no_markup(name):
    machine = dataclasses.replace(autotp.Topology.flat(2), name=name)
    plan = autotp.plan(two_layers(), machine, X)
    operators = tuple(dataclasses.replace(op, scheme=name, module=name) for op in plan.operators)
    for shown in (plan_table(dataclasses.replace(plan, operators=operators), None), topology_table(machine)):
        out = io.StringIO()
        Terminal(file=out, width=200).print(shown)
        assert name in out.getvalue()
    with Terminal(file=io.StringIO(), force_terminal=True).status(f"building {name} …"):
        pass


def test_names_do_not_control_the_terminal(capsys):
    out = io.StringIO()
    Terminal(file=out, width=80).print("a\x1b[31mred\x07\n\tb")
    assert out.getvalue().startswith("a�[31mred") and "\x1b" not in out.getvalue()
    with pytest.raises(SystemExit):
        main(["topology", "\x1b[31mred"])
    assert "\x1b" not in capsys.readouterr().err


def test_names_are_no_formulas_in_plots():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    for name in (r"$\frac{", "_hidden", "$x$"):
        axes.plot([1], [1], label=label_of(name))
    axes.legend()
    figure.savefig(io.BytesIO(), format="svg")
    assert len(axes.get_legend().get_texts()) == 3
