"""The report: one page about a run."""
