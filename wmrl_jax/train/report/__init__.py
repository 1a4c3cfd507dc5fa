"""The report of a run: one self-contained HTML page, made of the files in the run's folder."""

from wmrl_jax.train.report.build import REPORT_FILE, write_report

__all__ = ["REPORT_FILE", "write_report"]
