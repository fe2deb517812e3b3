"""Logging: Python's own, under ``autotp.*``, switched on by the environment variable ``AUTOTP_LOGS``.

``AUTOTP_LOGS=plan,+passes`` works like ``TORCH_LOGS``: a name alone logs what is worth knowing, with ``+`` everything, with
``-`` errors only. Names: ``plan`` (what was planned; with ``+``, every mesh and its bound), ``passes`` (with ``+``, every
graph between two passes, as code), ``schedule`` (what was overlapped; what could not be, and why) and ``compile`` (what was
compiled, as it goes). What ``autotp.watch`` says of ranks that wait is a warning, which is seen anyhow. Programs that set
up logs themselves use the loggers of these names, and leave the variable out.
"""

from __future__ import annotations

import logging
import os

__all__ = ["NAMES", "switch_on"]

NAMES = ("plan", "passes", "schedule", "compile")
_LEVELS = {"+": logging.DEBUG, "-": logging.ERROR}
_log = logging.getLogger("autotp")


def switch_on(text: str | None = None) -> None:
    """Sets the levels of autotp's loggers, and lets them write to stderr.

    Args:
        text: as the variable; None: what the variable says.
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
