"""An emulated cluster on one Linux machine: torchrun runs in network namespaces that are joined by rate-limited links.

    python -m benchmarks.cluster TOPOLOGY.toml [--timeout S] -- script.py arguments...
    python -m benchmarks.cluster --clean

Every node of the topology is a network namespace, connected to the others by a bridge. Its uplink has the bandwidth of the
outermost level, in each direction (token buckets at both ends of the link). Ranks of one node communicate over the loopback
interface of their namespace, without a limit: the bandwidth of an inner level is not emulated. With one level, every device
is a node, unless the level is named ``loopback`` or ``shared memory``, which makes one node without limits.

Latencies are not emulated (this requires the kernel's netem, which many kernels lack): a message has the latency of the
machine's own network stack. All nodes share the machine's cores: rates beyond a few Gbit/s in total are not reached, and
with more ranks than cores, a message may wait milliseconds until its receiver runs. Collectives then begin and end at
different times on different ranks, so time them from the first start to the last end. An idle link sends its burst at once,
9 kB and half a millisecond's worth: a message arrives too early by this much. Requires root and Debian's package
iproute2; libjemalloc2 makes times more stable (`benchmarks.allocator`).
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import IO, Any

from benchmarks.allocator import keeping_memory
from benchmarks.netns import (
    ClusterError,
    clean,
    commands,
    kill,
    layout,
    limits,
    namespaces,
    remove,
    require_host,
    shell,
    undisturbed,
)
from costmodel.topology import Topology, TopologyError

__all__ = ["Cluster", "ClusterError", "NodeError", "RunTimeout", "clean", "main"]

_SERIALS = itertools.count()
_FIRST_PORT = 29500
#: The number of characters of stderr to report; torchrun's own report, after the script's, has some 2000.
_TAIL = 6000
#: Seconds to wait for further failures after the first one, so that all are reported.
_GRACE = 0.5


@dataclass(frozen=True, slots=True)
class _Node:
    """A running torchrun and its output files; None if it writes to the stdout and stderr of this process."""

    number: int
    process: subprocess.Popen[bytes]
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    @property
    def code(self) -> int | None:
        return self.process.poll()


class NodeError(ClusterError):
    """Raised if torchrun failed on a node.

    Attributes:
        node: The number of the node that failed first.
        returncode: The exit code of torchrun on this node.
    """

    def __init__(self, failed: Sequence[_Node]) -> None:
        super().__init__("\n".join(f"node {node.number} failed with exit code {node.code}{_end(node)}" for node in failed))
        self.node, self.returncode = failed[0].number, failed[0].process.returncode


class RunTimeout(ClusterError):
    """Raised if a run did not end in time."""


class Cluster:
    """An emulated cluster; a context manager that creates it, and always removes it at the end.

    Inside, SIGTERM and SIGHUP without another handler raise SystemExit, so that the cluster is removed.

    Attributes:
        layout: Its nodes, ranks and rate.
        prefix: The prefix of the names of its namespaces.

    Raises:
        ClusterError: The topology cannot be emulated; on entry, this machine or user cannot create a cluster.
    """

    def __init__(self, topology: Topology) -> None:
        self.layout = layout(topology)
        self.prefix = f"autotp-{os.getpid()}-{next(_SERIALS)}"
        self._handlers: dict[int, Any] = {}
        self._ports = itertools.count(_FIRST_PORT)

    def __enter__(self) -> Cluster:
        require_host()
        atexit.register(self.close)
        try:
            self._handle_signals()
            for command in commands(self.layout, self.prefix):
                shell(command)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kills all processes in the cluster and removes it; further calls do nothing."""
        with undisturbed():
            try:
                remove(namespaces(f"{self.prefix}-"))
            finally:
                atexit.unregister(self.close)
                while self._handlers:
                    signal.signal(*self._handlers.popitem())

    def limit(self, rate: float) -> None:
        """Sets the rate of every uplink in bit/s, also during a run.

        Raises:
            ClusterError: There are no uplinks, or the kernel refused.
        """
        if self.layout.rate is None:
            raise ClusterError("one node has no uplink to limit")
        self.layout = replace(self.layout, rate=round(rate))
        for command in limits(self.layout, self.prefix):
            shell(command)

    def run(
        self, arguments: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float, show: bool = False
    ) -> list[str]:
        """Runs a script by torchrun on all nodes; ranks are numbered node by node.

        Args:
            arguments: The script and its arguments; options of torchrun may precede them.
            env: Environment variables in addition to those of this process.
            timeout: Seconds until all processes are killed.
            show: Whether node 0 writes to this process's stdout and stderr; otherwise, its output is kept.

        Returns:
            The stdout of each node; empty for node 0 if it was shown.

        Raises:
            NodeError: A node failed; the others were killed.
            RunTimeout: Not all nodes ended in time; all were killed.
        """
        with ExitStack() as stack:
            nodes: list[_Node] = []
            stack.callback(self._stop, nodes)
            port = next(self._ports)
            variables = self._variables(env or {})
            for number in range(self.layout.nodes):
                shown = show and number == 0
                files = [None if shown else stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
                enter = ["ip", "netns", "exec", f"{self.prefix}-{number}", *self._pinned(number)]
                command = [*enter, *self._torchrun(number, port), *arguments]
                process = subprocess.Popen(
                    command,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=files[0],
                    stderr=files[1],
                    # Only this process receives an interrupt from the terminal; it then stops the nodes.
                    start_new_session=True,
                )
                nodes.append(_Node(number, process, *files))
            _wait(nodes, timeout)
            return [_text(node.stdout) for node in nodes]

    def _pinned(self, number: int) -> list[str]:
        """The command prefix that pins a node to its own cores, if possible, so that nodes do not slow each other down."""
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // self.layout.nodes)
        first = number * share % len(cores)
        return ["taskset", "--cpu-list", ",".join(map(str, cores[first : first + share]))]

    def _torchrun(self, node: int, port: int) -> list[str]:
        options = {
            "nnodes": self.layout.nodes,
            "nproc-per-node": self.layout.ranks,
            "node-rank": node,
            # Dynamic rendezvous backends number the nodes by their order of arrival.
            "rdzv-backend": "static",
            "master-addr": self.layout.address(0),
            "master-port": port,
        }
        return [sys.executable, "-m", "torch.distributed.run", *(f"--{name}={value}" for name, value in options.items())]

    def _variables(self, env: Mapping[str, str]) -> dict[str, str]:
        # Names cannot be resolved inside the namespaces, and c10d would warn at every connection.
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        quiet |= keeping_memory()
        fixed = {"GLOO_SOCKET_IFNAME": self.layout.interface, "OMP_NUM_THREADS": "1"}
        return quiet | os.environ | fixed | dict(env)

    def _stop(self, nodes: Sequence[_Node]) -> None:
        with undisturbed():
            for node in nodes:
                # A process that has not entered its namespace yet would not be killed by namespace.
                node.process.kill()
            for number in range(self.layout.nodes):
                kill(f"{self.prefix}-{number}")
            for node in nodes:
                node.process.wait()

    def _handle_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, _exit)


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _wait(nodes: Sequence[_Node], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while running := [node for node in nodes if node.code is None]:
        if any(node.code for node in nodes):
            break
        if time.monotonic() > deadline:
            numbers = ", ".join(str(node.number) for node in running)
            raise RunTimeout(f"not ended after {timeout:g} s: node {numbers}{_end(running[0])}")
        time.sleep(0.02)
    failed = [node for node in nodes if node.code]
    if failed:
        # A lost connection makes other nodes fail, too, in random order: report all failures.
        time.sleep(_GRACE)
        raise NodeError(failed + [node for node in nodes if node.code and node not in failed])


def _end(node: _Node) -> str:
    text = _text(node.stderr)
    return f"; the end of node {node.number}'s stderr:\n{text[-_TAIL:]}" if text else ""


def _text(file: IO[bytes] | None) -> str:
    if file is None:
        return ""
    # The writing process shares the file's offset, which reading must not move.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster",
        usage="%(prog)s TOPOLOGY.toml [--timeout S] -- script.py arguments... | %(prog)s --clean",
        description="Runs a script by torchrun in an emulated cluster; shows what node 0 writes.",
    )
    parser.add_argument("topology", nargs="?", help="a topology's file, or the name of a preset")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds until everything is killed (600)")
    parser.add_argument("--clean", action="store_true", help="remove what ended processes left behind")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, the exit code of the node that failed, 2 if there is no cluster, 124 on a time-out."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    parser = _parser()
    options, arguments = parser.parse_args(words[:at]), words[at + 1 :]
    if not options.clean and not (options.topology and arguments):
        parser.error("give a topology and, after --, a script")
    try:
        if options.clean:
            print("\n".join(f"removed {name}" for name in clean()) or "nothing to remove")
            return 0
        with Cluster(Topology.load(options.topology)) as cluster:
            cluster.run(arguments, timeout=options.timeout, show=True)
    except (ClusterError, TopologyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.returncode if isinstance(error, NodeError) else 124 if isinstance(error, RunTimeout) else 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
