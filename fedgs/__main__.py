"""`python -m fedgs`: the same as the console script."""

from experiments.cli import main

if __name__ == "__main__":
    main()
