"""What differs between two cohorts."""
