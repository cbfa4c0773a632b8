"""Renders a result for people: HTML with plots, and Markdown. It reads a result and talks to nobody."""

from __future__ import annotations

from sembench.report.page import build_load_report, build_report
from sembench.report.view import ReportView, build_view

__all__ = ["ReportView", "build_load_report", "build_report", "build_view"]
