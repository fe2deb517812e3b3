"""Traces of schedules, predicted and measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from overlapping import prepared

import autotp
from autotp.cli import main
from autotp.durations import work_of
from autotp.pricing import Prices
from autotp.tracing import predicted
from benchmarks.models import trained
from passes.primitives import crop, pad

MODEL = """
from benchmarks.models import trained

def build():
    return trained("gpt")
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    (folder / "model.py").write_text(MODEL)
    model, args = trained("gpt")
    topology = autotp.Topology.flat(2, bandwidth="100 MB/s", latency="50 us")
    plan = autotp.plan(model, topology, args, strategy="megatron-1d", mesh=(2,), chunks={"batch": 2})
    plan.save(folder / "plan.json")
    return folder, model, args, plan


def test_predicted_lanes_do_one_thing_at_a_time(planned):
    _, model, args, plan = planned
    events = predicted(model, plan, args)
    for lane in {event["lane"] for event in events}:
        mine = sorted((e["begin"], e["begin"] + e["seconds"]) for e in events if e["lane"] == lane)
        assert all(end <= begin + 1e-12 for (_, end), (begin, _) in zip(mine, mine[1:], strict=False)), lane
    moving = [e for e in events if e["lane"] != "compute"]
    assert {e["part"] for e in moving} == {"forward", "backward"}
    together = sum(
        max(0.0, min(m["begin"] + m["seconds"], c["begin"] + c["seconds"]) - max(m["begin"], c["begin"]))
        for m in moving
        for c in events
        if c["lane"] == "compute"
    )
    assert together > 0.2 * sum(c["seconds"] for c in events if c["lane"] == "compute"), "chunks hide something"


def test_nothing_is_spent_where_nothing_is_cropped():
    graphs, plan = prepared("zero3", (2,))
    found, prices = graphs((0,)), Prices(plan.topology, plan.mesh_shape)
    nodes = [n for graph in (found.forward, found.backward) for n in graph.nodes]
    crops = [n for n in nodes if n.meta.get("traced", n).target in (crop, pad)]
    assert crops and all(n.meta["val"].shape == n.meta["traced"].args[0].meta["val"].shape for n in crops)
    assert all(work_of(n, prices).seconds == 0 for n in crops)
    assert sum(work_of(n, prices).seconds for n in nodes) > 0


def test_the_command_predicts_alone(planned, capsys):
    folder, *_ = planned
    words = ["trace", "--model", f"{folder}/model.py:build", "--plan", f"{folder}/plan.json"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--output", str(folder / "predicted.json")])
    assert not ended.value.code
    assert "no measured ranks" in capsys.readouterr().out
    found = json.loads((folder / "predicted.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in found if e["name"] == "thread_name"]
    assert names == ["compute", "axes 0"]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in found if e["ph"] == "X")


def test_a_missing_folder_is_told(planned, capsys):
    folder, *_ = planned
    with pytest.raises(SystemExit):
        main(["trace", "--model", "m.py:b", "--plan", f"{folder}/plan.json", "--output", str(folder / "no" / "t.json")])
    assert "there is no directory" in capsys.readouterr().err


@pytest.mark.distributed
def test_every_rank_is_a_process_of_the_trace(planned):
    folder, *_ = planned
    here = Path(__file__).parent.parent
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(here), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "autotp"]
    command += ["trace", "--model", f"{folder}/model.py:build", "--plan", f"{folder}/plan.json"]
    command += ["--output", f"{folder}/measured.json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    events = json.loads((folder / "measured.json").read_text())["traceEvents"]
    labels = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(labels) == {"predicted", "rank 0", "rank 1"}
    order = {}
    for label, pid in labels.items():
        mine = [e for e in events if e["ph"] == "X" and e["pid"] == pid and e["tid"] == 1]
        order[label] = [e["name"] for e in mine]
        assert mine and all(e["dur"] > 0 for e in mine), label
    assert order["rank 0"] == order["rank 1"], "ranks launch in one order"
