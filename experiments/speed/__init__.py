"""Speed and memory of this machine: `fedgs bench`."""
