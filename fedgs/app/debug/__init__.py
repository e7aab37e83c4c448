"""Finding a bug by comparing groups of clients, or nodes."""
