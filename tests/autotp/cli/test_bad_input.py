"""Bad input: each error names the place and the remedy."""

import json
import pickle
from fractions import Fraction
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.masked import masked_tensor

import autotp
from autotp.analysis.sweep import sweep
from autotp.cli import main
from autotp.errors import Change
from costmodel import TopologyError
from passes.capture import CaptureError

_SELF: list = []
_SELF.append(_SELF)


class Branch(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


def two_layers():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def test_a_model_that_export_refuses():
    with pytest.raises(CaptureError) as error:
        autotp.plan(Branch(), autotp.Topology.flat(2), (torch.randn(4),))
    assert "Branch" in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": nn.Linear}, "the model is the class Linear: give an instance of torch.nn.Module"),
        ({"model": None}, "the model is a NoneType, None: give an instance"),
        ({"topology": None}, "the topology is a NoneType, None: give an autotp.Topology, a preset's name"),
        (
            {"args": torch.zeros(1, 4)},
            r"args is a Tensor, tensor.*: give a tuple of a call's positional arguments, such as",
        ),
        ({"args": (), "kwargs": torch.zeros(1, 4)}, "kwargs is a Tensor, .*: give a dict of"),
        ({"observe": None}, "observe=None: give a list of modules' names"),
        ({"args": (torch.zeros(2, 5),)}, r"So does a plain call, .*float32\[2, 5\] on cpu"),
        ({"args": _SELF}, "arguments of the model contain themselves"),
        ({"args": range(10**9)}, "args has 1,000,000,000 positional arguments"),
        ({"args": (), "kwargs": {1: 1}}, "Linear: the example inputs do not fit forward: keywords must be strings"),
        ({"kwargs": {"input": torch.zeros(2, 4)}}, "do not fit forward: multiple values for argument 'input'"),
    ],
)
def test_arguments_of_another_kind(wrong, said):
    job = {"model": nn.Linear(4, 4), "topology": autotp.Topology.flat(2), "args": (torch.zeros(2, 4),)}
    with pytest.raises(autotp.AutotpError, match=said):
        autotp.plan(**job | wrong)
    if "topology" not in wrong and "observe" not in wrong:
        made = {"plan": autotp.plan(**job), "model": job["model"], "args": job["args"]}
        with pytest.raises(autotp.AutotpError, match=said):
            autotp.simulate(**made | wrong)
    for use in (autotp.simulate, autotp.verify):
        with pytest.raises(autotp.AutotpError, match=r"the plan is a str, 'plan.json': give an autotp.Plan"):
            use(job["model"], "plan.json", job["args"])


@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr"])
def test_inputs_that_are_not_dense(kind):
    model, topology, x = nn.Linear(4, 4), autotp.Topology.flat(2), torch.ones(2, 4)
    plan = autotp.plan(model, topology, (x,))
    with pytest.raises(
        autotp.AutotpError, match=r"a sparse tensor, with layout torch.sparse_\w+; graphs are planned for dense"
    ):
        autotp.plan(model, topology, (getattr(x, kind)(),))
    simulated = autotp.simulate(model, plan, (x,))
    with pytest.raises(autotp.AutotpError, match="layout torch.sparse_"):
        simulated(getattr(x, kind)())
    with pytest.raises(autotp.AutotpError, match="on the meta device, which holds no numbers"):
        simulated(x.to("meta"))


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (lambda: freed(torch.ones(2, 4)), "the memory of an input was freed"),
        (lambda: torch.empty(2, 4, dtype=torch.uint4), "a Tensor of torch.uint4, which torch cannot copy"),
        (
            lambda: masked_tensor(torch.ones(2, 4), torch.ones(2, 4, dtype=torch.bool)),
            "a masked tensor; graphs are planned",
        ),
    ],
    ids=["freed", "uint4", "masked"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_inputs_without_numbers_that_can_be_read(x, said):
    model, topology, example = nn.Linear(4, 4), autotp.Topology.flat(2), (torch.ones(2, 4),)
    with pytest.raises(autotp.AutotpError, match=said):
        autotp.plan(model, topology, (x(),))
    simulated = autotp.simulate(model, autotp.plan(model, topology, example), example)
    with pytest.raises(autotp.AutotpError, match=said):
        simulated(x())


def test_parameters_whose_memory_was_freed():
    """Kernels would read past the end of their storages; a plan needs no values."""
    model, args = nn.Linear(4, 4), (torch.ones(2, 4),)
    freed(model.weight)
    plan = autotp.plan(model, autotp.Topology.flat(2), args)
    for use in (lambda: autotp.simulate(model, plan, args)(*args), lambda: autotp.verify(model, plan, args)):
        with pytest.raises(autotp.AutotpError, match="the memory of weight was freed"):
            use()


def test_parameters_that_a_simulated_model_has_no_more():
    model, args = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.ones(2, 4),)
    simulated = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), args), args)
    simulated[1].bias = simulated[0].bias
    assert torch.equal(simulated(*args), model(*args)), "tied afterwards"
    del simulated[1].bias
    with pytest.raises(autotp.AutotpError, match=r"the model has no 1\.bias any more"):
        simulated(*args)


def test_a_name_that_no_file_can_hold():
    model = nn.Linear(4, 4)
    model.register_parameter("\ud800", nn.Parameter(torch.ones(1)))
    with pytest.raises(autotp.AutotpError, match=r"'\\ud800' is not Unicode text"):
        autotp.plan(model, autotp.Topology.flat(2), (torch.ones(2, 4),))


class _Sparse(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind
        if kind == "buffer":
            self.register_buffer("links", torch.eye(4).to_sparse())
        self.fixed = torch.eye(4).to_sparse()

    def forward(self, x):
        x = self.layer(x)
        return {
            "buffer": lambda: torch.sparse.mm(self.links, x),
            "attribute": lambda: torch.sparse.mm(self.fixed, x),
            "inside": lambda: x.to_sparse().to_dense(),
            "output": lambda: x.to_sparse(),
        }[self.kind]()


@pytest.mark.parametrize("kind", ["buffer", "attribute", "inside", "output"])
def test_models_that_are_not_dense(kind):
    with pytest.raises(autotp.AutotpError, match=r"is a sparse tensor, with layout torch.sparse_coo"):
        autotp.plan(_Sparse(kind), autotp.Topology.flat(2), (torch.ones(4, 4),))


@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(2, 4))])
def test_modules_of_torchscript(make):
    with pytest.warns(DeprecationWarning):
        made = make(nn.Linear(4, 4))
    for model, path in ((made, "the model"), (nn.Sequential(made), "0")):
        with pytest.raises(autotp.AutotpError, match=f"^{path} is a module of torch.jit"):
            autotp.plan(model, autotp.Topology.flat(2), (torch.ones(2, 4),))


def test_numbers_of_numpy_can_be_written():
    sizes = {
        "mesh": [np.int64(2), np.int64(2)],
        "memory": np.float32(1e9),
        "gap": np.float32(0.1),
        "accumulate": np.int64(2),
    }
    halves = {"memory": Fraction(10**9), "gap": Fraction(1, 2), "time_limit": np.int64(60)}
    for options in (sizes, halves, {"chunks": {"batch": np.int64(2)}}, {"panels": np.int64(2)}):
        plan = autotp.plan(nn.Linear(8, 8), autotp.Topology.flat(4), (torch.zeros(8, 8),), **options)
        assert autotp.Plan.from_json(plan.to_json()).hash == plan.hash
    points = sweep(lambda: (nn.Linear(8, 8), (torch.zeros(8, 8),)), ["cpu"], np.array([1, 2]), tokens=np.int64(64))
    assert [point["devices"] for point in json.loads(json.dumps([each.to_dict() for each in points]))] == [1, 2]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"factory": nn.Linear(4, 4)}, "give a function that returns a model"),
        ({"devices": 2}, "devices is 2: give a list"),
        ({"strategies": None}, "strategies is None: give a list"),
        ({"devices": ["2"]}, "must be a whole number"),
        ({"devices": range(10**9)}, r"devices is range\(.*\): give a list, of at most 10,000"),
    ],
)
def test_sweeps_of_another_kind(wrong, said):
    right = {"factory": lambda: (nn.Linear(4, 4), (torch.zeros(4, 4),)), "topologies": ["cpu"], "devices": [1]}
    with pytest.raises(autotp.AutotpError, match=said):
        sweep(**right | wrong)


def test_topologies_plans_and_comparisons_of_another_kind(tmp_path):
    model, x = nn.Linear(4, 4), torch.zeros(4, 4)
    plan, cpu = autotp.plan(model, autotp.Topology.flat(2), (x,)), autotp.Topology.load("cpu")
    for device, levels in (("cpu", cpu.levels), (cpu.device, "levels"), (cpu.device, None)):
        with pytest.raises(autotp.AutotpError, match="give a Device, and a list of Levels"):
            autotp.Topology("mine", device, levels)
    for path in (None, 1.5, b"plan.json"):
        with pytest.raises(autotp.AutotpError, match="is no path"):
            plan.save(path)
    with pytest.raises(autotp.AutotpError, match="tolerance is"):
        autotp.verify(model, plan, (x,), tolerance="small")
    with pytest.raises(autotp.AutotpError, match="give a World"):
        autotp.simulate(model, plan, (x,), world="all")
    for use in (autotp.load_pretrained, autotp.save_pretrained):
        with pytest.raises(autotp.AutotpError, match="no process group"):
            use(model, tmp_path)


@pytest.mark.parametrize("name", ["input", "device", "torch", "inf"])
def test_arguments_may_have_names_that_generated_code_has(name):
    class Named(nn.Module):
        pass

    scope = {}
    exec(f"def forward(self, x, {name}):\n    return x + {name}", scope)  # noqa: S102
    Named.forward = scope["forward"]
    x = torch.ones(4, 4)
    plan = autotp.plan(Named(), autotp.Topology.flat(2), (x, x))
    assert torch.equal(autotp.simulate(Named(), plan, (x, x))(x, **{name: x}), 2 * x)


def test_no_example_inputs():
    with pytest.raises(ValueError, match="args"):
        autotp.plan(two_layers(), autotp.Topology.flat(2))


def test_topology_file_with_a_wrong_key(tmp_path):
    file = tmp_path / "box.toml"
    preset = resources.files("costmodel") / "presets" / "cpu.toml"
    file.write_text(preset.read_text().replace("memory_bandwidth =", "memory_bandwith ="))
    with pytest.raises(TopologyError) as error:
        autotp.Topology.load(str(file))
    assert "box.toml" in str(error.value)
    assert "memory_bandwith" in str(error.value)


def test_topology_file_with_a_wrong_unit(tmp_path):
    file = tmp_path / "box.toml"
    file.write_text((resources.files("costmodel") / "presets" / "cpu.toml").read_text().replace("GB/s", "GBq/s"))
    with pytest.raises(TopologyError) as error:
        autotp.Topology.load(str(file))
    assert "box.toml" in str(error.value)
    assert "GBq/s" in str(error.value)


@pytest.mark.parametrize("mesh", [(3,), (2, 3), (8, 2)])
def test_a_device_count_that_fits_no_mesh(mesh):
    with pytest.raises(autotp.AutotpError, match=r"has 4; choose a mesh whose sizes multiply to 4"):
        autotp.plan(two_layers(), autotp.Topology.flat(4), (torch.randn(4, 64),), mesh=mesh)


def test_devices_that_do_not_fit_the_topology():
    with pytest.raises(TopologyError, match="12"):
        autotp.Topology.load("dgx-a100").resized(12)


def test_unknown_names():
    topology, x = autotp.Topology.flat(2), (torch.randn(4, 64),)
    with pytest.raises(autotp.AutotpError, match=r"'megatron' is unknown; choose one of auto, data"):
        autotp.plan(two_layers(), topology, x, strategy="megatron")
    with pytest.raises(autotp.AutotpError, match="optimizer 'lion' is unknown"):
        autotp.plan(two_layers(), topology, x, optimizer="lion")
    with pytest.raises(autotp.AutotpError, match="mode 'test' is unknown"):
        autotp.plan(two_layers(), topology, x, mode="test")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    autotp.plan(two_layers(), autotp.Topology.flat(2), (torch.randn(4, 64),)).save(file)
    return file


@pytest.mark.parametrize(
    ("path", "wrong", "said"),
    [
        (("operators",), ["abc"], "key 'operators.0': "),
        (("operators",), {}, "key 'operators': "),
        (("operators", 0, "scheme"), None, "key 'operators.0.scheme': "),
        (("operators", 0, "assignment"), "abc", "key 'operators.0.assignment': "),
        (("layouts",), [], "key 'layouts': "),
        (("layouts", "0.weight"), ["S"], "key 'layouts.0.weight.0': "),
        (("layouts", "0.weight"), [[0, 0]], 'it should be "R" or [dim, blocks], not [0, 0]'),
        (("layouts", "0.weight"), ["P"], "it should be \"R\" or [dim, blocks], not 'P'"),
        (("chunks",), {"batch": 0}, "key 'chunks.batch': "),
        (("chunks",), {"lines": 2}, "one of batch, rows"),
        (("chunks",), None, "key 'chunks': "),
        (("chunked",), [], "key 'chunked': "),
        (("whole",), [1], "key 'whole': "),
        (("schedule",), "foo", "key 'schedule': Input should be 'overlap' or 'none', not 'foo'"),
        (("mode",), 3, "key 'mode': "),
        (("optimizer",), "lion", "one of adamw, adamw-master, sgd, sgd-momentum, not 'lion'"),
        (("gap",), "x", "key 'gap': "),
        (("optimal",), 1, "key 'optimal': "),
        (("planning",), [], "key 'planning': "),
        (("mesh_shape",), [0], "key 'mesh_shape.0': "),
        (("predicted", "step_seconds"), [], "key 'predicted.step_seconds': "),
        (("topology", "levels"), 3, "topology: levels must be"),
        (("schedul",), "overlap", "key 'schedul': "),
    ],
)
def test_a_plan_file_with_a_wrong_key(written, tmp_path, path, wrong, said):
    data = json.loads(written.read_text())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = wrong
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(data))
    with pytest.raises(autotp.AutotpError) as error:
        autotp.Plan.load(file)
    assert "wrong.json" in str(error.value) and said in str(error.value)


def test_a_plan_file_without_a_key(written, tmp_path):
    data = json.loads(written.read_text())
    for key in data:
        file = tmp_path / "short.json"
        file.write_text(json.dumps({other: value for other, value in data.items() if other != key}))
        with pytest.raises(autotp.AutotpError, match=rf"short\.json: key '{key}'"):
            autotp.Plan.load(file)


def test_a_plan_file_that_is_no_text(tmp_path, capsys):
    file = tmp_path / "plan.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(autotp.AutotpError, match="the file is not UTF-8 text"):
        autotp.Plan.load(file)
    with pytest.raises(SystemExit) as ended:
        main(["diff", str(file), str(file)])
    assert ended.value.code == 2
    assert "plan.json: cannot read the plan" in " ".join(capsys.readouterr().err.split())


def test_a_plan_for_another_model():
    x = torch.randn(4, 64)
    plan = autotp.plan(two_layers(), autotp.Topology.flat(2), (x,))
    other = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(autotp.PlanMismatchError, match="another model"):
        autotp.simulate(other, plan, (x,))
    with pytest.raises(autotp.PlanMismatchError, match="another model, or for inputs of other shapes"):
        autotp.simulate(two_layers(), plan, (torch.randn(8, 64),))


def test_a_memory_bound_that_no_plan_meets():
    with pytest.raises(autotp.MemoryBoundError) as error:
        autotp.plan(two_layers(), autotp.Topology.flat(2), (torch.randn(4, 64),), memory=1e4)
    assert error.value.available == 1e4
    assert error.value.needed > 1e4
    for part in ("the smallest found needs", " more\n", "of these: parameters and optimizer state", "4 devices"):
        assert part in str(error.value)
    held = autotp.plan(two_layers(), autotp.Topology.flat(2), (torch.randn(4, 64),), memory=error.value.needed * 1.0001)
    assert held.predicted.memory_bytes <= error.value.needed * 1.0001


@pytest.mark.parametrize("strategy", ["data", "zero3"])
def test_a_batch_that_no_axis_divides(strategy):
    with pytest.raises(autotp.AutotpError) as error:
        autotp.plan(two_layers(), autotp.Topology.flat(4), (torch.randn(2, 64),), strategy=strategy)
    assert "(2, 64)" in str(error.value)
    assert "multiple of 4" in str(error.value)


FACTORY = """
import torch
from torch import nn

def build():
    return nn.Linear(8, 8), (torch.randn(2, 8),)
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "no-such-box", "--devices", "2"], "no-such-box"),
        (["--topology", "dgx-a100", "--devices", "12"], "12"),
        (["--topology", "dgx-a100", "--devices", "4", "--mesh", "3"], "multiply to 4"),
        (["--topology", "dgx-a100", "--devices", "4", "--strategy", "data"], "multiple of 4"),
        (["--topology", "dgx-a100", "--devices", "2", "--memory", "0.1 kB"], "the smallest found needs"),
        (["--topology", "dgx-a100", "--devices", "2", "--strategy", "magic"], "choose one of"),
    ],
)
def test_the_command_line_says_it_in_one_line(arguments, message, tmp_path, capsys):
    (tmp_path / "net.py").write_text(FACTORY)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", f"{tmp_path}/net.py:build", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error.replace("\n", " ")
    assert "Traceback" not in error


def test_the_command_line_says_what_a_job_needs_in_one_block(tmp_path, capsys):
    (tmp_path / "net.py").write_text(FACTORY)
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "plan",
                "--model",
                f"{tmp_path}/net.py:build",
                "--topology",
                "dgx-a100",
                "--devices",
                "2",
                "--memory",
                "0.1 kB",
            ]
        )
    assert ended.value.code == 2
    first, *rest = [line for line in capsys.readouterr().err.splitlines() if "fits" in line or line.startswith("  ")]
    assert first.startswith("error: no plan of strategy 'auto' fits")
    assert [line.split(":")[0] for line in rest] == ["  of these", "  does not fit with"]


CHANGE = Change("4 devices", True, 0.5)


@pytest.mark.parametrize(
    "error",
    [
        autotp.MemoryBoundError("none fits", 2.0, 1.0, {"parameter": 2.0}, [CHANGE]),
        autotp.ConstraintError("none holds", ("a", "b")),
    ],
    ids=str,
)
def test_an_error_is_the_same_on_other_ranks(error):
    """Rank 0 plans and sends its error to the other ranks, which could not unpickle errors with attributes."""
    sent = pickle.loads(pickle.dumps(error))
    assert (type(sent), str(sent), vars(sent)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    ("value", "kind"), [(torch.float32, "dtype"), (slice(1), "slice"), (np.ones(2), "ndarray"), ({1}, "set")]
)
def test_arguments_that_export_does_not_take(value, kind):
    class Model(nn.Linear):
        def forward(self, x, options=None):
            return super().forward(x)

    with pytest.raises(
        autotp.AutotpError, match=rf"argument options\['how'\]\[0\] is a {kind}, and torch.export takes tensors"
    ):
        autotp.plan(Model(4, 4), autotp.Topology.flat(2), (torch.zeros(2, 4), {"how": [value]}))


class Unfinished(nn.Module):
    def __init__(self):
        pass


def _with(name, part):
    model = nn.Sequential(nn.Linear(4, 4))
    model._modules[name] = model if part is None else part
    return model


@pytest.mark.parametrize("model", [Unfinished(), _with("text", "text"), _with(3, nn.Linear(4, 4)), _with("me", None)])
def test_models_whose_parts_are_none(model):
    with pytest.raises(autotp.AutotpError, match="modules.. or parameters.. raised .*are all parts modules with names"):
        autotp.plan(model, autotp.Topology.flat(2), (torch.zeros(2, 4),))


def test_a_config_that_cannot_be_asked_for():
    class Model(nn.Linear):
        def __getattr__(self, name):
            if name == "config":
                raise RuntimeError(name)
            return super().__getattr__(name)

    assert autotp.plan(Model(4, 4), autotp.Topology.flat(2), (torch.zeros(2, 4),)).layouts


@pytest.mark.parametrize(
    "words",
    [
        "plan --model net.py:build --topology two.toml --save net.py",
        "plan --model net.py:build --topology two.toml --save=./two.toml",
        "plan --model net.py:build --topology two.toml --html new.html --save new.html",
        "trace --model net.py:build --plan p.json --output p.json",
        "sweep --model net.py:build --topology two.toml --csv out --plot out",
        "validate two.toml --fit two.toml",
    ],
)
def test_a_file_is_not_replaced_that_is_read_or_written_otherwise(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("net.py", "two.toml", "p.json"):
        Path(name).write_text("mine")
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert stop.value.code == 2
    assert "this file by another option too" in capsys.readouterr().err
    assert all(Path(name).read_text() == "mine" for name in ("net.py", "two.toml", "p.json"))
    assert not Path("new.html").exists()


@pytest.mark.parametrize(
    "forms", [("--code", "--json"), ("--graph", "forward", "--dot", "a.dot"), ("--dot", "a.dot", "--html", "a.html")]
)
def test_a_plan_is_shown_in_one_form(forms, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["inspect", "plan.json", "--model", "net.py:build", *forms])
    assert stop.value.code == 2
    assert "show a plan in different forms: give one of them" in capsys.readouterr().err
