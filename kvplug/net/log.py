"""Log lines with stable fields."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from typing import Final

from kvplug.net.peer_text import peer_texts

FIELDS: Final[Mapping[str, str]] = {
    "address": "the address of the listener",
    "peer": "the other process, such as `pid 4711 on node-3`; empty if it is not known",
    "engine_id": "the `engine_id` of the peer's configuration",
    "purpose": "what the connection is for, such as `store`; empty for a pipe between two programs",
    "transports": 'the chosen transport for each kind of device, such as `{"cpu": "shm"}`',
    "transport": "the name of a transport",
    "store": "the name of a store",
    "op": "`get` or `put`",
    "gb_per_s": "the measured rate in 10^9 bytes per second",
    "expected_gb_per_s": "the expected rate in 10^9 bytes per second",
    "reason": "why, in the fixed words of a refusal (`credentials`, `other user`, `busy` …) or of a metric",
    "error": "why, in words",
}
"""The fields of all events, with their meanings."""
_PLAIN: Final = (str, int, float, dict)


class LogEvent(enum.Enum):
    """The log lines that programs may count and alert on: the level, what happened, and the fields.

    The fields are attributes of the log record, as ``extra=`` makes them, so that any formatter can print
    them. Texts in them are made printable, since peers send some of them.
    """

    LISTENING = "INFO", "kvplug listens for peers, or for health probes", "address"
    PEER_CONNECTED = "INFO", "a peer has proved itself to a listener", "address", "peer"
    AGREED = (
        *("INFO", "two ends have agreed on a transport for each kind of device; logged at both ends"),
        *("peer", "engine_id", "purpose", "transports"),
    )
    PEER_LEFT = "INFO", "a program has left a store that `kvplug store serve` serves", "peer", "store"
    STORE_ANSWERS = "INFO", "a store that had failed answers again", "store"
    DIRECTORY_ANSWERS = "INFO", "the directory of engines answers again"
    SLOW_PIPE = (
        *("WARNING", "a pipe carries far less than it should; once for each path"),
        *("peer", "engine_id", "transport", "gb_per_s", "expected_gb_per_s"),
    )
    SLOW_STORE = (
        *("WARNING", "a store gives or takes pages far more slowly than before; once for each direction"),
        *("store", "op", "gb_per_s", "expected_gb_per_s"),
    )
    NO_TRANSPORT = "WARNING", "no pipe works here, so every peer will be refused", "error"
    CONNECTION_FAILED = (
        *("WARNING", "a connection was not served; repetitions are DEBUG"),
        *("address", "peer", "error"),
    )
    CONNECTION_REFUSED = (
        *("WARNING", "a client did not prove itself; repetitions of a reason are DEBUG"),
        *("address", "reason", "error"),
    )
    WRONG_PAGE = "WARNING", "a store returned a page that is not the one that was put", "store", "reason"
    TRANSPORT_BROKEN = "WARNING", "a transport does not load, and `auto` skips it", "transport", "error"
    MEMORY_SHORT = "WARNING", "the budgets of the configuration do not fit into the free memory", "error"
    STORE_FAILED = "WARNING", "a store failed, and will be tried again", "store", "error"
    STORE_ERROR = "WARNING", "a call of a store failed; repetitions are DEBUG", "store", "error"
    DIRECTORY_FAILED = "WARNING", "the directory of engines does not answer", "error"

    def __init__(self, level: str, meaning: str, *fields: str) -> None:
        self.level = level
        self.meaning = meaning
        self.fields = fields

    def log(
        self,
        logger: logging.Logger,
        message: str,
        *,
        level: int | None = None,
        exc_info: BaseException | None = None,
        **fields: object,
    ) -> None:
        """Log the message with this event's fields, and with the field ``event``: its name in lower case.

        Args:
            level: another level than the event's.
            fields: plain values; other values are logged as text.
        """
        plain = {name: value if isinstance(value, _PLAIN) else str(value) for name, value in fields.items()}
        extra = {"event": self.name.lower(), **peer_texts(plain)}
        number = logging.getLevelNamesMapping()[self.level] if level is None else level
        logger.log(number, "%s", message, extra=extra, exc_info=exc_info, stacklevel=2)
