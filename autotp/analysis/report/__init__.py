"""A plan as one self-contained HTML file that needs no network.

Input: a plan with its priced graph and its schedule. Output: one file. `content` collects the data as JSON, and `page`
assembles the page from it and the files in ``parts/``.
"""

from autotp.analysis.report.content import content
from autotp.analysis.report.page import page, save_report

__all__ = ["content", "page", "save_report"]
