"""A plan as one HTML file that explains itself: needs no network, and nothing beside it."""

from autotp.report.content import content
from autotp.report.page import page, save_report

__all__ = ["content", "page", "save_report"]
