"""Traces of schedules, predicted and measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from overlapping import prepared

import autotp
from autotp.analysis.trace import events_of, predicted
from autotp.cli import main
from autotp.costs.prices import Prices
from autotp.runtime.durations import task_of
from autotp.runtime.recording import Event
from benchmarks.models import trained
from passes.graph import note_of
from passes.overlap.primitives import crop, pad

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


@pytest.mark.slow
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


def test_a_track_does_one_thing_at_a_time():
    """What is launched while its group is busy waits, even if it ends before what was launched earlier."""
    spans = [("compute", 0.0, 1.0), ("axes 0", 1.0, 3.0), ("axes 0", 1.5, 3.5), ("axes 1", 2.0, 2.5), ("axes 0", 1.2, 4.0)]
    spans += [("axes 0", 5.0, 9.0), ("axes 0", 6.0, 7.0), ("compute", 1.0, 10.0)]
    events = [
        Event(name=f"n{i}", operator="op", part="forward", lane=lane, begin=0.1 + begin, seconds=end - begin)
        for i, (lane, begin, end) in enumerate(spans)
    ]
    shown = [e for e in events_of("rank 0", 1, events, 0.1) if e["ph"] == "X"]
    one_at_a_time(shown)
    ends = [round((e["ts"] + e["dur"]) / 1e6, 6) for e in shown]
    assert ends == [end for _, _, end in spans], "what was measured to the end"
    queued = [e["args"].get("queued_us") for e in shown]
    assert queued == [None, 0, 1.5e6, 0, 2.3e6, 2e6, 0, None]


def one_at_a_time(shown):
    """Checks that the events of each track do not overlap, in whole nanoseconds as Perfetto counts."""
    for track in {e["tid"] for e in shown}:
        spans = sorted((round(1e3 * e["ts"]), round(1e3 * (e["ts"] + e["dur"]))) for e in shown if e["tid"] == track)
        assert all(begin <= end for begin, end in spans)
        assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False)), track


def test_nothing_is_spent_where_nothing_is_cropped():
    graphs, plan = prepared("zero3", (2,))
    found, prices = graphs((0,)), Prices(plan.topology, plan.mesh_shape)
    nodes = [n for graph in (found.forward, found.backward) for n in graph.nodes]
    crops = [n for n in nodes if (note_of(n).traced or n).target in (crop, pad)]
    assert crops and all(n.meta["val"].shape == note_of(n).traced.args[0].meta["val"].shape for n in crops)
    assert all(task_of(n, prices).seconds == 0 for n in crops)
    assert sum(task_of(n, prices).seconds for n in nodes) > 0


@pytest.mark.slow
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
    one_at_a_time([e for e in found if e["ph"] == "X"])


def test_a_missing_folder_is_reported(planned, capsys):
    folder, *_ = planned
    with pytest.raises(SystemExit):
        main(["trace", "--model", "m.py:b", "--plan", f"{folder}/plan.json", "--output", str(folder / "no" / "t.json")])
    assert "there is no directory" in capsys.readouterr().err


@pytest.mark.exact
@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["train", "inference"])
def test_every_rank_is_a_process_of_the_trace(planned, mode):
    folder, model, args, plan = planned
    if mode == "inference":
        plan = autotp.plan(model, plan.topology, args, strategy="zero3", mesh=(2,), mode=mode)
    plan.save(folder / f"{mode}.json")
    here = Path(__file__).parents[3]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(here), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "autotp"]
    command += ["trace", "--model", f"{folder}/model.py:build", "--plan", f"{folder}/{mode}.json"]
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
        assert mine and sum(e["dur"] for e in mine) > 0, label
        one_at_a_time([e for e in events if e["ph"] == "X" and e["pid"] == pid])
        parts = {e["cat"] for e in events if e["ph"] == "X" and e["pid"] == pid}
        assert parts == {"forward", "backward"} if mode == "train" else {"forward"}, label
    assert order["rank 0"] == order["rank 1"], "ranks launch in one order"
