"""`python -m fedgs`: the same as the console script."""

from fedgs.app.cli.main import main

if __name__ == "__main__":
    main()
