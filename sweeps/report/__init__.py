"""The morning report: one static page, JSON beside it, and an exit code."""

from sweeps.report.build import Report, ReportPaths, make_report, write_report

__all__ = ["Report", "ReportPaths", "make_report", "write_report"]
