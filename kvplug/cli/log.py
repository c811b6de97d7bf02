"""The log of the program ``kvplug``, on stderr."""

from __future__ import annotations

import logging

from kvplug.net.peer_text import printable


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def show_warnings() -> None:
    """Show warnings and errors, as Python does where nothing else is set, but printable."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableFormatter())


def show_log(level: str, form: str) -> None:
    """Show the log from this level on, unless something else has set up a log."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
