"""Compiles the regions of a pair of scheduled graphs, equal ones only once."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import fx, nn

from autotp.runtime.agreement import Agreement
from autotp.runtime.compiled import Disjoint
from autotp.runtime.inductor.compiler import compiled, unavailable
from passes.graph import TRACING
from passes.overlap.outline import key_of

__all__ = ["Region", "Regions"]

_log = logging.getLogger("autotp.compile")


class Region(nn.Module):
    """Runs a region: maps a list of operands, which it empties, to the results, each in memory of its own.

    Args:
        graph: of the region; maps operands to a tuple of results.
        run: the compiled function; None until the region is compiled.
    """

    def __init__(self, graph: fx.Graph, run: Callable[[list[Any]], Sequence[Any]] | None = None) -> None:
        super().__init__()
        self.graph, self.run = graph, run
        self.shared: Sequence[int] | None = None  # results that share memory with other tensors; known after the first run

    def forward(self, operands: list[Any]) -> Sequence[Any]:
        """The region's results."""
        assert self.run is not None, "not compiled yet"
        if self.shared is None:
            taken = Disjoint(operands)
            results = self.run(operands)
            self.shared = [i for i, result in enumerate(results) if taken.own(result) is not result]
        else:
            results = self.run(operands)
        if not self.shared:
            return results
        return [result.clone() if i in self.shared else result for i, result in enumerate(results)]


class Regions:
    """Makes one module for all equal regions of some graphs, and compiles these modules.

    Attributes:
        different: key of a region -> the module of all regions with this key.
    """

    def __init__(self) -> None:
        self.different: dict[str, Region] = {}

    def __call__(self, graph: fx.Graph) -> Region:
        """The module that runs a region's graph; shared by equal graphs."""
        return self.different.setdefault(key_of(graph), Region(graph))

    def compile(self, device: torch.device, agreement: Agreement) -> bool:
        """Compiles all modules. Returns whether all processes succeeded; else, logs why a process failed.

        Args:
            device: on which the modules run.
            agreement: of the processes. Replicas must be rounded equally on all devices, so no process runs compiled
                regions if another cannot compile them.
        """
        problem = unavailable(device)
        if not any(agreement.gathered(problem)):
            problem = self._compile()
        for rank, reason in enumerate(agreement.gathered(problem)):
            if reason:
                _log.warning("rank %d failed to compile, and all ranks run operators one by one: %s", rank, reason)
                return False
        return True

    def _compile(self) -> str:
        """Compiles all modules. Returns why one could not be compiled; empty if all are."""
        names = {hashlib.sha256(key.encode()).hexdigest()[:16]: region for key, region in self.different.items()}
        # Processes of one machine begin with different regions, and find those that others compiled in torch's cache.
        begin = int(os.environ.get("LOCAL_RANK", 0)) * len(names) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        order = [*names][begin:] + [*names][:begin]
        started = time.monotonic()
        for number, name in enumerate(order, 1):
            region = names[name]
            try:
                with TRACING, ThreadPoolExecutor(1) as apart:  # the caller's hooks and modes are thread-local
                    region.run = apart.submit(compiled, region.graph, name).result()
            except Exception as error:  # noqa: BLE001 - whatever a compiler raises, the graph runs without it
                return f"{type(error).__name__}: {error}"
            operators = sum(node.op == "call_function" for node in region.graph.nodes)
            _log.info(
                "%d of %d regions, of %d operators: %.1f s", number, len(order), operators, time.monotonic() - started
            )
        return ""
