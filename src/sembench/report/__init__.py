"""A result as a page for people: HTML with plots, and Markdown. It reads a result and counts nothing again."""

from __future__ import annotations

from sembench.report.markdown import markdown_page
from sembench.report.page import html_page
from sembench.report.view import View, view_of

__all__ = ["View", "html_page", "markdown_page", "view_of"]
