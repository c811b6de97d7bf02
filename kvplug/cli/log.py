"""The log of the command line: where it goes, and its formats."""

from __future__ import annotations

import datetime
import logging
from typing import Any, Final

from kvplug.errors import ConfigError
from kvplug.net.peer_text import printable

_LEVELS: Final = ("debug", "info", "warning", "error")
_STANDARD: Final = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class PrintableFormatter(logging.Formatter):
    """Prints lines of text that are safe for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class JsonFormatter(logging.Formatter):
    """Prints one JSON object a line, in ASCII: time (RFC 3339), level, logger, message, the record's fields,
    and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        import json

        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": printable(record.getMessage()),
        }
        line |= {key: value for key, value in vars(record).items() if key not in {*_STANDARD, *line}}
        if record.exc_info:
            line["exception"] = printable(self.formatException(record.exc_info))
        return json.dumps(line, default=str)


def start_log(given: str) -> None:
    """Show the log as ``KVPLUG_LOG`` specifies: a level, ``json``, or both with a comma between them."""
    words = {word.strip() for word in given.lower().split(",")} - {""}
    levels = words - {"json"}
    if levels - {*_LEVELS} or len(levels) > 1:
        allowed = f"one of {', '.join(_LEVELS)}, json, or a level and json, as in debug,json"
        raise ConfigError(f"KVPLUG_LOG: {given!r} was given; allowed is {allowed}")
    if words:
        text = PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        show_log((*levels, "info")[0].upper(), JsonFormatter() if "json" in words else text)
    elif logging.lastResort is not None:  # Python shows warnings and errors by default
        logging.lastResort.setFormatter(PrintableFormatter())


def show_log(level: str, formatter: logging.Formatter) -> None:
    """Write log records of at least this level to stderr, unless logging is set up already."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler])
