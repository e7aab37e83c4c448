"""Metrics: each receives and returns arrays and knows no run folder."""
