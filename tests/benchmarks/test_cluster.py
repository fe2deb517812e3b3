"""The emulated cluster: the layout of a topology, and namespaces that are really created, used and removed."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import cluster as module
from benchmarks import netns
from benchmarks.cluster import Cluster, ClusterError, NodeError, RunTimeout, main
from benchmarks.phases import asking
from costmodel.machine.device import Device
from costmodel.topology import Level, Topology

ROOT = Path(__file__).resolve().parents[2]
MEGABYTES = 8

PROGRAM = f"""
import os, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full(({MEGABYTES} * 250_000,), dist.get_rank() + 1.0)
dist.all_reduce(torch.ones(1000))
dist.barrier()
begun = time.perf_counter()
dist.all_reduce(x)
took = time.perf_counter() - begun
print("result", dist.get_rank(), os.environ["GROUP_RANK"], x.unique().item(), took, flush=True)
dist.destroy_process_group()
"""

TOPOLOGY = """
name = "two nodes"
device = { name = "core", memory = "1 GB", memory_bandwidth = "1 GB/s", launch = "1 us", flops = { float32 = "1 GFLOP/s" } }
levels = [{ name = "ethernet", size = 2, bandwidth = "25 MB/s", latency = "50 us" }]
"""


def topology(*levels):
    device = Device.from_dict({
        "name": "core", "memory": 1e9, "memory_bandwidth": 1e9, "launch": 1e-6, "flops": {"float32": 1e9}
    })  # fmt: skip
    return Topology("test", device, tuple(Level(name, size, bandwidth, 5e-5) for name, size, bandwidth in levels))


TWO_NODES = (("ethernet", 2, 25e6),)


@pytest.fixture(scope="session")
def host():
    """Skips if namespaces, bridges or token buckets are not available."""
    name = f"autotp-{os.getpid()}-999999-probe"
    try:
        netns.require_host()
        netns.shell(["ip", "netns", "add", name])
        try:
            netns.shell(f"ip -n {name} link add name br0 type bridge".split())
            netns.shell(f"ip -n {name} link add name a0 type veth peer name a1".split())
            netns.shell(f"tc -n {name} qdisc add dev a0 root tbf rate 1000000bit burst 9000b limit 90000b".split())
        finally:
            netns.remove([name])
    except ClusterError as error:
        pytest.skip(f"no emulated cluster here: {error}")


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def script(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("levels", "nodes", "ranks", "rate"),
    [
        ((("ethernet", 3, 25e6),), 3, 1, 200_000_000),
        ((("numa", 2, 1e9), ("ethernet", 4, 12.5e6)), 4, 2, 100_000_000),
        ((("loopback", 4, 1e9),), 1, 4, None),
        ((("shared memory", 4, 1e9),), 1, 4, None),
        ((("numa", 2, 1e9), ("ethernet", 1, 12.5e6)), 1, 2, None),
    ],
)
def test_layout(levels, nodes, ranks, rate):
    assert netns.layout(topology(*levels)) == netns.Layout(nodes, ranks, rate)


def test_three_levels_are_refused():
    with pytest.raises(ClusterError, match=r"has 3 levels; an emulated cluster has one .* or two"):
        Cluster(topology(("a", 2, 1e9), ("b", 2, 1e9), ("c", 2, 1e9)))


@pytest.mark.parametrize(
    "change", [{"links": 2}, {"point_to_point": 1e6}, {"shared": False}, {"matrix": ((0, 1e9), (1e9, 0))}]
)
def test_uplinks_that_are_not_one_shared_link_are_refused(change):
    whole = topology(("numa", 2, 1e9), ("ethernet", 2, 25e6))
    levels = (whole.levels[0], dataclasses.replace(whole.levels[1], **change))
    with pytest.raises(ClusterError, match="one link for each node, which its ranks share"):
        Cluster(dataclasses.replace(whole, levels=levels))


def test_commands():
    lines = [" ".join(words) for words in netns.commands(netns.layout(topology(*TWO_NODES)), "x")]
    tbf = "root tbf rate 200000000bit burst 21514b limit 16777216b"
    for node in (0, 1):
        assert f"ip -n x-bridge link add name port{node} mtu 9000 type veth peer name eth0 mtu 9000 netns x-{node}" in lines
        assert f"tc -n x-bridge qdisc add dev port{node} {tbf}" in lines
        assert f"tc -n x-{node} qdisc add dev eth0 {tbf}" in lines
        assert f"ip -n x-{node} address add 10.77.0.{node + 1}/16 dev eth0" in lines
    assert not [line for line in lines if " -n " not in line and "netns add" not in line]


def test_one_node_has_no_network():
    lines = [" ".join(words) for words in netns.commands(netns.layout(topology(("loopback", 4, 1e9))), "x")]
    assert lines == ["ip netns add x-0", "ip -n x-0 link set dev lo up"]


def test_addresses_of_many_nodes_differ():
    layout = netns.layout(topology(("ethernet", 1000, 1e9)))
    assert len({layout.address(node) for node in range(1000)}) == 1000
    assert layout.address(999) == "10.77.3.232"


def test_without_root(monkeypatch, capsys, tmp_path):
    path = tmp_path / "topology.toml"
    path.write_text(TOPOLOGY)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main([str(path), "--", "script.py"]) == 2
    assert capsys.readouterr().err == (
        "error: an emulated cluster is made of network namespaces: run it as root, for example by sudo\n"
    )
    assert main(["--clean"]) == 2


def test_without_capabilities(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns, "_effective_capabilities", lambda: 1 << 21)
    with pytest.raises(ClusterError, match="root lacks CAP_NET_ADMIN here"):
        netns.require_host()


def test_without_iproute2(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(netns, "_effective_capabilities", lambda: -1)
    monkeypatch.setattr(netns.shutil, "which", lambda name: None if name == "tc" else f"/sbin/{name}")
    with pytest.raises(ClusterError, match="'tc' is missing: install the package iproute2"):
        netns.require_host()


@pytest.mark.exact
@pytest.mark.distributed
def test_all_reduce_keeps_to_the_rate(host, program):
    with Cluster(topology(*TWO_NODES)) as cluster:
        outputs = cluster.run([str(program)], timeout=60)
    assert not netns.namespaces(cluster.prefix)
    for node, output in enumerate(outputs):
        _, rank, group, value, seconds = next(line for line in output.splitlines() if line.startswith("result")).split()
        assert (int(rank), int(group), float(value)) == (node, node, 3.0)
        # With two ranks, each sends as many bytes as it has.
        assert 0.5 < MEGABYTES * 8e6 / float(seconds) / 200e6 < 1.1


@pytest.mark.exact
@pytest.mark.distributed
def test_a_job_answers_requests_while_its_links_change(host, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / "answers.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from pathlib import Path\n"
        "from benchmarks.phases import answered\n"
        "dist.init_process_group('gloo')\n"
        "held = torch.zeros(1)\n"
        "def answer(asked):\n"
        "    held.add_(asked['number'] + dist.get_rank())\n"
        "    dist.all_reduce(held)\n"
        "    if asked['number'] == 7:\n"
        "        raise ValueError('seven')\n"
        "    return {'held': held.item()}\n"
        "answered(Path(sys.argv[1]), answer)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    (tmp_path / "asked").mkdir()
    (tmp_path / "failing").mkdir()
    with Cluster(topology(*TWO_NODES)) as cluster:
        with asking(cluster, [str(script)], tmp_path / "asked", 60) as ask:
            assert ask(number=1) == {"held": 3.0}
            cluster.limit(80e6)
            for role, device in (("bridge", "port0"), ("1", "eth0")):
                shown = netns.shell(["tc", "-n", f"{cluster.prefix}-{role}", "qdisc", "show", "dev", device])
                assert "tbf" in shown and "rate 80Mbit" in shown
            assert ask(number=2) == {"held": 11.0}, "what it held is there still"
        with (
            pytest.raises(NodeError, match="seven"),
            asking(cluster, [str(script)], tmp_path / "failing", 60) as ask,
        ):
            ask(number=7)
    with Cluster(topology(("loopback", 2, 1e9))) as one, pytest.raises(ClusterError, match="no uplink"):
        one.limit(1e6)


@pytest.mark.exact
@pytest.mark.distributed
def test_failure_ends_the_other_node_and_cleans_up(host, tmp_path):
    text = "import os, time\nif os.environ['RANK'] == '1':\n    raise RuntimeError('broken on purpose')\ntime.sleep(100)"
    begun = time.monotonic()
    with pytest.raises(NodeError, match="broken on purpose") as caught, Cluster(topology(*TWO_NODES)) as cluster:
        cluster.run([script(tmp_path, text)], timeout=60)
    assert (caught.value.node, caught.value.returncode) == (1, 1)
    assert time.monotonic() - begun < 30
    assert not netns.namespaces(cluster.prefix)


@pytest.mark.exact
def test_time_out_kills_and_the_cluster_can_be_used_again(host, tmp_path, monkeypatch):
    sleeper = (
        "import os, sys, time\nprint('alive', file=sys.stderr, flush=True)\ntime.sleep(float(sys.argv[1]))\nprint('done')"
    )
    # torchrun itself takes seconds to start, and is not tested here.
    monkeypatch.setattr(Cluster, "_torchrun", lambda self, node, port: [sys.executable])
    with Cluster(topology(*TWO_NODES)) as cluster:
        with pytest.raises(RunTimeout, match=r"not ended after 3 s: node 0, 1(.|\n)*alive"):
            cluster.run([script(tmp_path, sleeper), "100"], timeout=3)
        assert not netns.shell(["ip", "netns", "pids", f"{cluster.prefix}-0"])
        assert cluster.run([script(tmp_path, sleeper), "0"], timeout=20) == ["done\n", "done\n"]


def test_two_clusters_at_once_and_errors_clean_up(host):
    with pytest.raises(ZeroDivisionError), Cluster(topology(*TWO_NODES)) as one, Cluster(topology(*TWO_NODES)) as two:
        assert len(netns.namespaces(one.prefix)) == len(netns.namespaces(two.prefix)) == 3
        1 / 0  # noqa: B018
    assert not netns.namespaces(one.prefix) + netns.namespaces(two.prefix)


def test_a_cluster_that_cannot_be_made_leaves_nothing(host, monkeypatch):
    wrong = [["ip", "netns", "add", "PREFIX-0"], ["ip", "no-such-thing"]]
    monkeypatch.setattr(module, "commands", lambda plan, prefix: [[w.replace("PREFIX", prefix) for w in c] for c in wrong])
    cluster = Cluster(topology(*TWO_NODES))
    with pytest.raises(ClusterError, match="no-such-thing"):
        cluster.__enter__()
    assert not netns.namespaces(cluster.prefix)


@pytest.mark.parametrize(("number", "left"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, 3)])
def test_signals(host, tmp_path, number, left):
    (tmp_path / "topology.toml").write_text(TOPOLOGY)
    text = (
        "from benchmarks.cluster import Cluster, Topology\nimport signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in a shell's background processes
        "with Cluster(Topology.load(sys.argv[1])):\n    print('made', flush=True)\n    time.sleep(100)"
    )
    command = [sys.executable, script(tmp_path, text), str(tmp_path / "topology.toml")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.read(4) == b"made"
        process.send_signal(number)
        assert process.wait(timeout=20) != 0
    prefix = f"autotp-{process.pid}-"
    assert len(netns.namespaces(prefix)) == left
    if left:
        assert main(["--clean"]) == 0
    assert not netns.namespaces(prefix)
