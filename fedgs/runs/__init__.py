"""The run folder: write, resume, verify, sample."""
