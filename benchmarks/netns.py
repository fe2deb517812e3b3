"""Network namespaces, bridges and rate-limited links, from which `benchmarks.cluster` builds clusters.

The namespaces of a cluster are named ``autotp-<pid>-<serial>-<role>``: the pid identifies the process that created them, so
that `clean` can distinguish leftovers from clusters in use, and the serial number allows several clusters per process.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from costmodel.topology import Topology

__all__ = [
    "ClusterError",
    "Layout",
    "clean",
    "commands",
    "kill",
    "layout",
    "limits",
    "namespaces",
    "remove",
    "require_host",
    "shell",
]

#: Levels with these names are the memory of one machine rather than a network.
ONE_NODE = ("loopback", "shared memory")
#: Jumbo frames, as in cluster networks: headers take 0.7 % of the rate, and few packets need few timers.
MTU = 9000
#: The size of each queue in bytes, above TCP's largest window (4 MB), so that several senders to one node lose no packets.
QUEUE = 16 * 2**20

_FRAME = MTU + 14
_HEADERS = 128
#: Seconds by which the kernel may send a packet late without reducing the rate; adds to the burst.
_LATENESS = 0.5e-3
_NAME = re.compile(r"autotp-\d+-\d+-\w+")
_REGISTRY = Path("/run/netns")
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


class ClusterError(Exception):
    """Raised if an emulated cluster cannot be created, or a run in it failed."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The namespaces and the rate that emulate a topology on one machine.

    Attributes:
        nodes: The number of network namespaces.
        ranks: The number of processes in each.
        rate: The rate of a node's uplink in each direction in bit/s; None for no limit.
    """

    nodes: int
    ranks: int
    rate: int | None

    @property
    def burst(self) -> int:
        """The bytes that an idle link sends at once: one frame, and the bytes that compensate for a late timer."""
        return _FRAME + round((self.rate or 0) / 8 * _LATENESS)

    @property
    def packet(self) -> int:
        """The size of the largest packet that a node passes to its link, in bytes; it fits into the burst."""
        return min(2**16, self.burst - _HEADERS)

    @property
    def interface(self) -> str:
        """The interface over which the ranks communicate."""
        return "eth0" if self.nodes > 1 else "lo"

    def address(self, node: int) -> str:
        """The address of a node inside the namespaces."""
        return f"10.77.{(node + 1) // 256}.{(node + 1) % 256}" if self.nodes > 1 else "127.0.0.1"


def layout(topology: Topology) -> Layout:
    """Nodes, ranks and rate for a topology of one or two levels.

    Raises:
        ClusterError: There are more levels, or a node's uplink is not a single shared link.
    """
    levels = topology.levels
    if len(levels) > 2:
        raise ClusterError(
            f"topology {topology.name!r} has {len(levels)} levels; an emulated cluster has one (every device a node) "
            "or two (ranks of a node, nodes)"
        )
    if len(levels) == 1 and levels[0].name in ONE_NODE:
        return Layout(nodes=1, ranks=levels[0].size, rate=None)
    ranks = levels[0].size if len(levels) == 2 else 1
    outer = levels[-1]
    if outer.size == 1:
        return Layout(1, ranks, None)
    several = outer.links > 1 or outer.direct or outer.point_to_point is not None or outer.matrix is not None
    if several or (ranks > 1 and not outer.shared):
        raise ClusterError(
            f"topology {topology.name!r}: level {outer.name!r} has several links, a matrix or an uplink that is not "
            "shared; an emulated cluster has one link for each node, which its ranks share"
        )
    return Layout(outer.size, ranks, round(outer.bandwidth * 8))


def commands(plan: Layout, prefix: str) -> list[list[str]]:
    """The ``ip`` and ``tc`` commands that create namespaces ``<prefix>-0``, ``<prefix>-1``, ... and ``<prefix>-bridge``."""
    bridge = f"{prefix}-bridge"
    lines = []
    if plan.nodes > 1:
        lines += [f"ip netns add {bridge}", f"ip -n {bridge} link add name br0 mtu {MTU} type bridge"]
        lines += [f"ip -n {bridge} link set dev br0 up"]
    for node in range(plan.nodes):
        name = f"{prefix}-{node}"
        lines += [f"ip netns add {name}", f"ip -n {name} link set dev lo up"]
        if plan.nodes > 1:
            lines += _uplink(plan, name, bridge, node)
    return [line.split() for line in lines]


def _uplink(plan: Layout, name: str, bridge: str, node: int) -> list[str]:
    port = f"port{node}"
    return [
        # Both ends are created in their namespaces, so the root namespace never has an interface.
        f"ip -n {bridge} link add name {port} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {name}",
        *_limited(plan, name, bridge, node, "add"),
        f"ip -n {name} address add {plan.address(node)}/16 dev eth0",
        f"ip -n {bridge} link set dev {port} master br0 up",
        f"ip -n {name} link set dev eth0 up",
    ]


def limits(plan: Layout, prefix: str) -> list[list[str]]:
    """The commands that set the links of an existing cluster to the rate of ``plan``."""
    uplinks = (_limited(plan, f"{prefix}-{node}", f"{prefix}-bridge", node, "replace") for node in range(plan.nodes))
    return [line.split() for lines in uplinks for line in lines]


def _limited(plan: Layout, name: str, bridge: str, node: int, how: str) -> list[str]:
    limit = f"root tbf rate {plan.rate}bit burst {plan.burst}b limit {QUEUE}b"
    return [
        f"tc -n {bridge} qdisc {how} dev port{node} {limit}",
        f"tc -n {name} qdisc {how} dev eth0 {limit}",
        # Large packets stay unsegmented, as with a network card's segmentation offload: each fits into the queue's burst.
        f"ip -n {name} link set dev eth0 gso_max_size {plan.packet}",
    ]


def require_host() -> None:
    """Checks that this process may create namespaces.

    Raises:
        ClusterError: The process is not root or lacks a capability, or iproute2 is not installed.
    """
    if os.geteuid() != 0:
        raise ClusterError("an emulated cluster is made of network namespaces: run it as root, for example by sudo")
    missing = [name for name, bit in _CAPABILITIES.items() if not _effective_capabilities() >> bit & 1]
    if missing:
        raise ClusterError(f"an emulated cluster is made of network namespaces: root lacks {' and '.join(missing)} here")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise ClusterError(f"the command {program!r} is missing: install the package iproute2")


def _effective_capabilities() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)


def shell(command: Sequence[str]) -> str:
    """Runs a command and returns its stdout.

    Raises:
        ClusterError: The command failed; the message has its stderr.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def undisturbed() -> Iterator[None]:
    """Blocks SIGINT, SIGTERM and SIGHUP until the end of the block, also in commands that are run inside."""
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def namespaces(prefix: str = "autotp-") -> list[str]:
    """The namespaces of emulated clusters whose names begin with ``prefix``, sorted."""
    with suppress(FileNotFoundError):
        return sorted(name for name in os.listdir(_REGISTRY) if name.startswith(prefix) and _NAME.fullmatch(name))
    return []


def kill(name: str) -> None:
    """Kills every process in a namespace. A process group is not enough: torchrun's workers have their own sessions.

    Raises:
        ClusterError: Some processes did not end within 5 seconds.
    """
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        pids = shell(["ip", "netns", "pids", name]).split()
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    raise ClusterError(f"processes in namespace {name} do not end: {', '.join(pids)}")


def remove(names: Sequence[str]) -> None:
    """Kills the processes in namespaces and deletes the namespaces; continues after failures and reports them at the end.

    Raises:
        ClusterError: A process could not be killed, or a namespace could not be deleted.
    """
    errors = []
    for name in names:
        for step in (kill, lambda name: shell(["ip", "netns", "delete", name])):
            try:
                step(name)
            except (ClusterError, subprocess.TimeoutExpired) as error:
                errors.append(str(error))
    if errors:
        raise ClusterError("; ".join(errors))


def clean() -> list[str]:
    """Removes the namespaces of processes that no longer exist, and kills the processes in them.

    Returns:
        The names of the namespaces that were removed.

    Raises:
        ClusterError: This process may not remove namespaces, or a namespace could not be removed.
    """
    require_host()
    leftovers = [name for name in namespaces() if not Path("/proc", name.split("-")[1]).exists()]
    remove(leftovers)
    return leftovers
