"""Graphs between passes, for those who want to see them: the logger ``autotp.passes`` at level DEBUG."""

from __future__ import annotations

import logging

from torch import fx

__all__ = ["dump"]

_log = logging.getLogger("autotp.passes")


def dump(stage: str, graph: fx.Graph) -> None:
    """Logs a graph as Python code, with what was done last; costs nothing while nobody listens."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s: %d nodes\n%s", stage, len(graph.nodes), graph.python_code("self").src)
