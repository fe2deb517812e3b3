"""Network namespaces, bridges and rate-limited links: what `benchmarks.cluster` is built from.

A cluster's namespaces are named ``autotp-<pid>-<serial>-<role>``: the pid identifies their process, so that `clean` can
distinguish leftovers from clusters in use, and the serial number allows several clusters per process.
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

#: Levels of these names are one machine's memory rather than a network.
ONE_NODE = ("loopback", "shared memory")
#: Jumbo frames, as cluster networks have them: headers take 0.7 % of the rate, and few packets cost few timers.
MTU = 9000
#: Bytes that each queue holds. Above TCP's largest window (4 MB), so that several senders to one node lose nothing.
QUEUE = 16 * 2**20

_FRAME = MTU + 14
_HEADERS = 128
#: Seconds by which the kernel may be late to send a packet without the rate suffering; adds to the burst.
_LATENESS = 0.5e-3
_NAME = re.compile(r"autotp-\d+-\d+-\w+")
_REGISTRY = Path("/run/netns")
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


class ClusterError(Exception):
    """The emulated cluster cannot be made, or what ran in it failed."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a topology comes to on one machine.

    Attributes:
        nodes: network namespaces.
        ranks: processes in each.
        rate: bit/s of a node's uplink in each direction; None where nothing is limited.
    """

    nodes: int
    ranks: int
    rate: int | None

    @property
    def burst(self) -> int:
        """Bytes that a link that was idle sends at once: one frame and what the timer's lateness needs."""
        return _FRAME + round((self.rate or 0) / 8 * _LATENESS)

    @property
    def packet(self) -> int:
        """Bytes of the largest packet that a node hands to its link, which the link takes whole."""
        return min(2**16, self.burst - _HEADERS)

    @property
    def interface(self) -> str:
        """The interface over which the ranks talk."""
        return "eth0" if self.nodes > 1 else "lo"

    def address(self, node: int) -> str:
        """The address of a node inside the namespaces."""
        return f"10.77.{(node + 1) // 256}.{(node + 1) % 256}" if self.nodes > 1 else "127.0.0.1"


def layout(topology: Topology) -> Layout:
    """Nodes, ranks and rate for a topology of one or two levels.

    Raises:
        ClusterError: there are more levels, or a node's uplink is more than one shared link.
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
    """The ``ip`` and ``tc`` commands that make namespaces ``<prefix>-0``, ``<prefix>-1``, ... and ``<prefix>-bridge``."""
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
        # Both ends are born in their namespaces: the root namespace never sees an interface.
        f"ip -n {bridge} link add name {port} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {name}",
        *_limited(plan, name, bridge, node, "add"),
        f"ip -n {name} address add {plan.address(node)}/16 dev eth0",
        f"ip -n {bridge} link set dev {port} master br0 up",
        f"ip -n {name} link set dev eth0 up",
    ]


def limits(plan: Layout, prefix: str) -> list[list[str]]:
    """The commands that give the links of a cluster that is there the rate of ``plan``."""
    uplinks = (_limited(plan, f"{prefix}-{node}", f"{prefix}-bridge", node, "replace") for node in range(plan.nodes))
    return [line.split() for lines in uplinks for line in lines]


def _limited(plan: Layout, name: str, bridge: str, node: int, how: str) -> list[str]:
    limit = f"root tbf rate {plan.rate}bit burst {plan.burst}b limit {QUEUE}b"
    return [
        f"tc -n {bridge} qdisc {how} dev port{node} {limit}",
        f"tc -n {name} qdisc {how} dev eth0 {limit}",
        # Large packets stay whole, as network cards see to: what passes a queue is at most its burst, and need not be cut.
        f"ip -n {name} link set dev eth0 gso_max_size {plan.packet}",
    ]


def require_host() -> None:
    """Checks that this process may make namespaces.

    Raises:
        ClusterError: it is not root, lacks a capability, or iproute2 is not installed.
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
    """Runs a command and returns what it printed.

    Raises:
        ClusterError: it failed; the message holds its stderr.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def undisturbed() -> Iterator[None]:
    """Puts interrupts off until the end of the block; the commands that it runs do not feel them either."""
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def namespaces(prefix: str = "autotp-") -> list[str]:
    """The namespaces of emulated clusters whose names begin so, sorted."""
    with suppress(FileNotFoundError):
        return sorted(name for name in os.listdir(_REGISTRY) if name.startswith(prefix) and _NAME.fullmatch(name))
    return []


def kill(name: str) -> None:
    """Kills every process in a namespace. Torchrun's workers have sessions of their own, so no process group has all."""
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
    """Kills the processes in the namespaces and deletes these; continues after failures and reports them at the end.

    Raises:
        ClusterError: something could not be killed or deleted.
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
    """Removes the namespaces of processes that no longer exist, and what still runs in them.

    Returns:
        The names of the namespaces that were removed.

    Raises:
        ClusterError: this process may not remove namespaces, or one could not be removed.
    """
    require_host()
    leftovers = [name for name in namespaces() if not Path("/proc", name.split("-")[1]).exists()]
    remove(leftovers)
    return leftovers
