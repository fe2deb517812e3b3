"""Measured runs: read from tables, planned as they were run, and fitted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotp import cli
from autotp.errors import AutotpError
from autotp.validate import accuracy, fit_device, kendall, predicted, rankings, read_runs

RUN = {
    "id": "a", "source": "nobody", "model": "GPT", "layers": 2, "hidden": 256, "ffn": 1024, "heads": 4, "vocab": 512,
    "seq": 128, "gpu_type": "A100-SXM-80GB", "gpus": 8, "interconnect": "8x200 Gbit/s", "dp_fsdp_degree": 8,
    "tp_degree": 1, "pp_degree": 1, "kind": "zero3", "global_batch": 16, "micro_batch": 2, "grad_accum": 1,
    "recompute": "none", "dtype": "bf16 compute, fp32 reduce", "step_seconds": 0.01,
}  # fmt: skip


def write(path: Path, *rows):
    def value(one):
        return json.dumps(one) if isinstance(one, str | bool) else repr(one)

    lines = ["[[runs]]\n" + "".join(f"{key} = {value(one)}\n" for key, one in row.items()) for row in rows]
    path.write_text("\n".join(lines))
    return path


def runs_of(tmp_path, *changes):
    return read_runs(write(tmp_path / "runs.toml", *(RUN | change for change in changes)))


@pytest.mark.slow
def test_a_run_is_planned_as_it_was_run(tmp_path):
    (run, tensor, hybrid, plain), skipped = runs_of(
        tmp_path,
        {},
        {"id": "tp", "dp_fsdp_degree": 2, "tp_degree": 4, "kind": "ddp", "micro_batch": 8, "sequence_parallel": True},
        {"id": "hsdp", "gpus": 16, "dp_fsdp_degree": 16, "kind": "HSDP", "global_batch": 32},
        {"id": "accumulating", "kind": "ddp", "global_batch": 64, "grad_accum": 4, "recompute": "full"},
    )
    assert not skipped
    plan = predicted(run).plan
    assert plan.mesh_shape == (8,) and plan.precision and not plan.recomputed
    weights = [one for one in plan.operators if one.target == "aten.linear.default"]
    assert weights and {one.scheme for one in weights} == {"ZeRO-3"}
    found = predicted(tensor).plan
    assert found.mesh_shape == (2, 4)
    schemes = {one.scheme for one in found.operators if one.target == "aten.linear.default"}
    assert any("1D column" in scheme for scheme in schemes) and not any("ZeRO" in scheme for scheme in schemes)
    assert predicted(hybrid).plan.mesh_shape == (2, 8)
    found = predicted(plain).plan
    assert found.accumulate == 4 and found.recomputed
    assert found.predicted.step_seconds > 3 * predicted(replace(plain, accumulate=1)).plan.predicted.step_seconds


@pytest.mark.slow
def test_megatron_overlaps_nothing_and_compilers_fuse(tmp_path):
    old = {"dtype": "fp16", "kind": "ddp", "grad_accum": 2, "global_batch": 32}
    (old, late, compiled, thunder), _ = runs_of(
        tmp_path,
        old,
        old | {"overlap": "yes"},
        {"torch_compile": "yes"},
        {"compiler": "thunder + nvfuser"},
    )
    assert not old.overlaps and late.overlaps and late.precision == "fp16" and not late.compiled
    assert compiled.compiled and thunder.compiled and compiled.overlaps
    twice, once = predicted(old), predicted(replace(old, accumulate=1)).work.sums
    plan = twice.plan
    assert plan.schedule == "none" and plan.optimizer == "adamw-master" and predicted(late).plan.schedule == "overlap"
    assert predicted(compiled).plan.compile
    assert twice.work.sums.forward.activations == pytest.approx(2 * once.forward.activations)
    assert twice.work.sums.backward.parameters == pytest.approx(once.backward.parameters) != 0.0, (
        "gradients are reduced once"
    )
    assert twice.seconds == pytest.approx(twice.work.sums.seconds(twice.work.hides)), "together, as they are planned"


def test_what_a_step_computes_is_priced_on_other_devices_as_a_plan_is(tmp_path):
    (run,), _ = runs_of(tmp_path, {"recompute": "full", "grad_accum": 2, "global_batch": 32})
    one, own = predicted(run), run.topology.device
    assert one.work.seconds(own, own) == pytest.approx(one.plan.predicted.step_seconds, rel=1e-9)
    slowdown = {"norm": 3.0, "pointwise": 2.0}
    slower = replace(own, efficiency=own.efficiency / 2, half_size=2 * own.half_size, slowdown=slowdown, host=1e-4)
    there = predicted(replace(run, topology=replace(run.topology, device=slower)))
    assert one.work.seconds(slower, own) == pytest.approx(there.plan.predicted.step_seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"pp_degree": 4}, "pipeline of 4 stages"),
        ({"gpu_type": "Z9"}, "gpu_type 'Z9' is unknown"),
        ({"gpu_type": "GH200"}, "gpu_type 'GH200' is unknown"),
        ({"gpu_type": "H100-PCIe"}, "gpu_type 'H100-PCIe' is unknown"),
        ({"layers": ""}, "layers is missing"),
        ({"dtype": ""}, "dtype is missing"),
        ({"step_seconds": "soon"}, "step_seconds is 'soon'"),
        ({"step_seconds": 0}, "step_seconds is 0"),
        ({"tp_degree": 3}, "8 x 3 ways on 8 devices"),
        ({"global_batch": 17}, "a batch of 17"),
        ({"grad_accum": 0, "micro_batch": ""}, "grad_accum"),
        ({"recompute": "some"}, "recompute 'some'"),
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"hidden": 25.5}, "hidden is 25.5"),
        ({"kind": "one transformer layer"}, "no training step"),
        ({"kind": "zreo3"}, "kind 'zreo3' is unknown; the known ones are ddp"),
        ({"attention": "linear"}, "attention 'linear' is unknown"),
        ({"layers": 2000}, "layers is 2000"),
        ({"loss": "fuzed"}, "loss 'fuzed' is unknown"),
        ({"architecture": "gpt", "kv_heads": 1}, "heads, which only the architecture llama groups"),
        ({"tied": "perhaps"}, "tied is 'perhaps'; it must be yes or no"),
        ({"kv_heads": 0, "architecture": "llama"}, "kv_heads is 0"),
    ],
)
def test_what_cannot_be_planned_is_named(tmp_path, change, why):
    runs, skipped = runs_of(tmp_path, change, {"id": "b"})
    assert [run.name for run in runs] == ["b"]
    assert len(skipped) == 1 and skipped[0].name == "a" and why in skipped[0].why


@pytest.mark.parametrize("change", [{"hidden": 250}, {"architecture": "llama", "kv_heads": 3}])
def test_sizes_that_do_not_go_together_are_named(tmp_path, change):
    """Regression: the message was torch.export's, about a model that the user did not write."""
    (run, _), _ = runs_of(tmp_path, {"heads": 4, **change}, {"id": "b"})
    with pytest.raises(AutotpError, match="each has to be a multiple of the next"):
        predicted(run)


def test_csv_is_read_as_toml_is(tmp_path):
    columns = [key for key in RUN if key not in ("kind", "micro_batch", "grad_accum")]
    file = tmp_path / "runs.csv"
    file.write_text(
        ",".join([*columns, "notes"])
        + "\n"
        + ",".join(f'"{RUN[key]}"' for key in columns)
        + ',"kind=zero3; micro_batch=2; grad_accum=1; note=a, b"\n'
    )
    assert read_runs(file) == runs_of(tmp_path, {})
    file.write_text("")
    with pytest.raises(AutotpError, match="has no runs"):
        read_runs(file)
    with pytest.raises(AutotpError, match="cannot be read"):
        read_runs(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("NVSwitch + 8x200 Gbit/s HDR InfiniBand per node", 200e9),
        ("NVSwitch + RDMA 400 Gbit/s per GPU", 400e9),
        ("NVLink hybrid cube mesh + one 100 Gbit/s EDR InfiniBand per node", 12.5e9),
        ("NVSwitch + EFA 400 GB/s per node", 400e9),
        ("not stated", 200e9),
    ],
)
def test_the_network_is_the_runs_own(tmp_path, text, rate):
    (run,), _ = runs_of(tmp_path, {"interconnect": text, "gpus": 16, "dp_fsdp_degree": 16, "global_batch": 32})
    assert run.topology.levels[-1].bandwidth == pytest.approx(rate)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("A100-SXM-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("A100-PCIE-80GB", "A100-PCIE-80GB"),
        ("H100-SXM-80GB", "H100-SXM5-80GB"),
        ("H100-SXM-96GB HBM2e 2.4TB/s 500W", "H100-96GB-HBM2e"),
        ("H200", "H200-SXM-141GB"),
        ("V100-SXM2-16GB", "V100-SXM2-32GB"),
    ],
)
def test_devices_are_known_by_their_names(tmp_path, name, device):
    (run,), _ = runs_of(tmp_path, {"gpu_type": name, "gpus": 16, "dp_fsdp_degree": 16, "global_batch": 32, "nodes_of": 4})
    assert run.device == device
    if len(run.topology.levels) == 2:
        assert [level.size for level in run.topology.levels] == [4, 4]


@pytest.mark.exact
def test_a_fit_finds_the_device_that_made_the_figures(tmp_path):
    sizes = [(256, 64), (512, 128), (1024, 512), (2048, 1024), (4096, 512), (512, 2048), (1024, 256), (2048, 256)]
    runs, _ = runs_of(
        tmp_path,
        *({"id": str(n), "hidden": h, "ffn": 4 * h, "heads": h // 64, "seq": s} for n, (h, s) in enumerate(sizes)),
    )
    memory = dict.fromkeys(("norm", "softmax", "pointwise", "gather", "copy"), 1.5)
    found = [predicted(run) for run in runs]
    own = found[0].run.topology.device
    true = replace(own, efficiency=0.6, half_size=150.0, slowdown=memory | {"attention": 3.0})
    measured = [replace(one, run=replace(one.run, seconds=one.work.seconds(true, own))) for one in found]
    fit = fit_device(measured)
    assert fit.fitted.largest < 0.01 and fit.held_out is not None and fit.held_out.largest < 0.02
    assert fit.device.efficiency == pytest.approx(0.6, rel=0.05)
    with pytest.raises(AutotpError, match="too few"):
        fit_device(measured[:4])


def test_statistics():
    found = accuracy([1.1, 0.8, 1.0])
    assert (found.runs, found.largest) == (3, pytest.approx(0.2))
    assert found.mean == pytest.approx(0.1) and found.median == pytest.approx(0.1)
    assert kendall([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)


@pytest.mark.exact
def test_degrees_alone_are_ranked(tmp_path):
    degrees = [(8, 1), (4, 2), (2, 4)]
    changes = [
        {"id": f"{d}x{t}", "dp_fsdp_degree": d, "tp_degree": t, "kind": "ddp", "micro_batch": 16 // d} for d, t in degrees
    ]
    again = changes[0] | {"id": "again", "step_seconds": 0.03}
    runs, _ = runs_of(tmp_path, *changes, {"id": "other", "seq": 64}, again)
    (group,) = rankings([predicted(run) for run in runs])
    assert [one.run.name for one in group.predictions] == ["8x1", "again", "4x2", "2x4"]
    assert group.fastest.name == "4x2", "8x1 took 0.02 s on average"


@pytest.mark.slow
def test_the_command_prints_fits_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    sizes = [256, 512, 1024, 2048, 512, 1024]
    rows = [
        RUN
        | {"id": f"r{n}", "hidden": h, "ffn": 4 * h, "heads": h // 64, "seq": 64 * (1 + n), "step_seconds": 0.01 * (1 + n)}
        for n, h in enumerate(sizes)
    ]
    file = write(tmp_path / "runs.toml", *rows, RUN | {"id": "pipe", "pp_degree": 2})
    out, picture = tmp_path / "fitted.toml", tmp_path / "plot.svg"
    with pytest.raises(SystemExit) as stop:
        cli.main(["validate", str(file), "--runs", "--fit", str(out), "--plot", str(picture)])
    assert not stop.value.code
    said = " ".join(capsys.readouterr().out.split())
    assert "nobody, A100-SXM4-80GB" in said and "1 runs skipped" in said and "pipe: a pipeline of 2 stages" in said
    assert "efficiency" in out.read_text() and "<svg" in picture.read_text()
    with pytest.raises(SystemExit) as stop:
        cli.main(["validate", str(file), "--only", "r1", "--json"])
    assert not stop.value.code
    printed = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in printed["runs"]] == ["r1"] and not printed["skipped"]
    with pytest.raises(SystemExit) as stop:
        cli.main(["validate", str(file), "--only", "nothing"])
    assert stop.value.code == 2 and "no run to plan" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        cli.main(["validate", str(write(tmp_path / "pipes.toml", RUN | {"id": "pipe", "pp_degree": 2}))])
    assert stop.value.code == 2 and "the first: pipe: a pipeline of 2 stages" in capsys.readouterr().err


@pytest.mark.slow
def test_a_fit_that_says_nothing_of_the_device_is_refused(tmp_path, capsys):
    rows = [RUN | {"id": f"r{n}", "seq": 64 * (1 + n), "step_seconds": 1e6} for n in range(7)]
    with pytest.raises(SystemExit) as stop:
        cli.main(["validate", str(write(tmp_path / "runs.toml", *rows)), "--fit", str(tmp_path / "fitted.toml")])
    assert stop.value.code == 2 and not (tmp_path / "fitted.toml").exists()
    assert "no A100-SXM4-80GB takes as long as these runs" in capsys.readouterr().err


def test_keys_that_are_nearly_known_are_named(tmp_path):
    runs, skipped = runs_of(
        tmp_path, {"id": "typo", "grad_acum": 4}, {"id": "more", "weather": "fine", "recompute_from": "log"}
    )
    assert [run.name for run in runs] == ["more"]
    assert [one.why for one in skipped] == ["key 'grad_acum' is unknown; is it grad_accum?"]


def test_the_shipped_table_is_read():
    runs, skipped = read_runs(Path(__file__).parents[3] / "benchmarks" / "published.toml")
    assert len(runs) > 190 and len(runs) + len(skipped) == 223
    assert all(run.source and run.topology.devices == run.data * run.tensor for run in runs)


@pytest.mark.exact
def test_published_runs_are_predicted_well():
    """Runs to which no figure was fitted: another cluster, another program, another kind of H100."""
    runs, _ = read_runs(Path(__file__).parents[3] / "benchmarks" / "published.toml")
    chosen = [run for run in runs if run.name in ("titan-8b-8g-fsdp-compile", "titan-8b-64g-tp8-async-bf16")]
    assert len(chosen) == 2
    for run in chosen:
        assert predicted(run).ratio == pytest.approx(1.0, abs=0.08), run.name
