"""``python -m kvplug.cli``, where the program is not on the path."""

from kvplug.cli.main import main

if __name__ == "__main__":
    main()
