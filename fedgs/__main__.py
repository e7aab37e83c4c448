"""`python -m fedgs`: the same as the console script."""

from experiments.cli.main import main

if __name__ == "__main__":
    main()
