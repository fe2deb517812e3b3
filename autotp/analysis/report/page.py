"""The HTML page of a report, assembled from its parts."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from autotp.analysis.report.content import encode
from autotp.errors import AutotpError
from costmodel.text.files import write_atomically

__all__ = ["page", "save_report"]

#: In the order of their dependencies.
SCRIPTS = ("base", "list", "detail", "modules", "graph", "operators", "machine", "timeline", "costs", "memory", "main")


def page(contents: Mapping[str, Any]) -> str:
    """The HTML of a report.

    Args:
        contents: as `autotp.analysis.report.content` returns them.
    """
    parts = resources.files("autotp.analysis.report") / "parts"
    script = "\n".join((parts / f"{name}.js").read_text() for name in SCRIPTS)
    template = (parts / "page.html").read_text()
    given = {
        "title": html.escape(str(contents.get("title") or "autotp plan")),
        "style": (parts / "style.css").read_text(),
        "data": encode(contents),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: given[place[1]], template)


def save_report(path: str | os.PathLike, contents: Mapping[str, Any]) -> None:
    """Writes a report as an HTML file, atomically.

    Raises:
        AutotpError: the file cannot be written.
    """
    try:
        write_atomically(path, page(contents))
    except OSError as error:
        raise AutotpError(f"{path}: the report cannot be written ({error.strerror})") from error
