"""Measuring speed and memory on this machine."""
