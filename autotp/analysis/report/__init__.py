"""A plan as one HTML file that explains itself: needs no network, and nothing beside it.

In come a plan with its priced graph and its schedule. Out goes one file. `content` collects the data as JSON, and `page`
puts it into the page with the files of ``parts/``.
"""

from autotp.analysis.report.content import content
from autotp.analysis.report.page import page, save_report

__all__ = ["content", "page", "save_report"]
