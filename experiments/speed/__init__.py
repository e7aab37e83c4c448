"""Speed of this machine: `fedgs bench`."""
