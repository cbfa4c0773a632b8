"""A result as a page that a person would rather look at than read: HTML with plots, and Markdown."""

from __future__ import annotations

from sembench.report.markdown import markdown_page
from sembench.report.page import html_page
from sembench.report.view import View, view_of

__all__ = ["View", "html_page", "markdown_page", "view_of"]
