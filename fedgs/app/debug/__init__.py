"""Finding a bug by comparing the generators of two cohorts."""
