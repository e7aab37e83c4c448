"""`flower-superlink` of a simulation: from its first moment it ends with its launcher.

Nothing of a simulation would look for the launcher before its ServerApp, seconds later.
"""

from fedgs.process import watch_launcher

if __name__ == "__main__":
    watch_launcher()
    from flwr.superlink.cli import flower_superlink

    flower_superlink()
