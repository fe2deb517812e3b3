"""Logging by Python's ``logging``, under ``autotp.*``, configured by the environment variable ``AUTOTP_LOGS``.

``AUTOTP_LOGS=plan,+passes`` works like ``TORCH_LOGS``: a name alone sets the level INFO, with ``+`` DEBUG, with ``-``
ERROR. Names: ``plan`` (the plan; with ``+``, every mesh and its bound), ``passes`` (with ``+``, the code of the graph
between any two passes), ``schedule`` (what is overlapped; what cannot be, and why) and ``compile`` (what is compiled).
Messages of ``autotp.watch`` about waiting ranks are warnings, which are shown in any case. Programs that configure logging
themselves use the loggers of these names, and leave the variable unset.
"""

from __future__ import annotations

import logging
import os

__all__ = ["NAMES", "switch_on"]

NAMES = ("plan", "passes", "schedule", "compile")
_LEVELS = {"+": logging.DEBUG, "-": logging.ERROR}
_log = logging.getLogger("autotp")


def switch_on(text: str | None = None) -> None:
    """Sets the levels of autotp's loggers and has them write to stderr; does nothing if ``text`` names none.

    Args:
        text: a value of ``AUTOTP_LOGS``; None: that of the environment.
    """
    words = (os.environ.get("AUTOTP_LOGS", "") if text is None else text).split(",")
    wanted = [word.strip() for word in words if word.strip()]
    if not wanted:
        return
    if not _log.handlers:
        handler = logging.StreamHandler()
        rank = os.environ.get("RANK")
        place = f"[rank {rank}] " if rank is not None else ""
        handler.setFormatter(logging.Formatter(f"{place}%(name)s %(levelname)s: %(message)s"))
        _log.addHandler(handler)
        _log.propagate = False
    for word in wanted:
        name = word.lstrip("+-")
        if name not in NAMES:
            _log.warning("AUTOTP_LOGS: %r is unknown; choose of %s, with + or - before", word, ", ".join(NAMES))
            continue
        logging.getLogger(f"autotp.{name}").setLevel(_LEVELS.get(word[0], logging.INFO))
