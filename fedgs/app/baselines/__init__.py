"""What `fedgs baseline` does, and other commands with a run of it."""
