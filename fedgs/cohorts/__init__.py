"""Which clients take part in a run: files, selection by a classifier."""
