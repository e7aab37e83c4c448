"""The command line: flags and help; no work."""
