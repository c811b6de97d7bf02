"""Runs the program as ``python -m kvplug.cli`` if ``kvplug`` is not on the PATH."""

from kvplug.cli.main import main

if __name__ == "__main__":
    main()
