"""Runs the program as ``python -m kvplug.cli``, for when it is not on the path."""

from kvplug.cli.main import main

if __name__ == "__main__":
    main()
