"""Scores of synthetic images."""
