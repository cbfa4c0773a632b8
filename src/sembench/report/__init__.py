"""Renders a result for people: HTML with plots, and Markdown. It reads a result and talks to nobody."""

from __future__ import annotations

from sembench.report.page import render_html, render_load_html, render_load_markdown, render_markdown
from sembench.report.view import ReportView, build_view

__all__ = ["ReportView", "build_view", "render_html", "render_load_html", "render_load_markdown", "render_markdown"]
