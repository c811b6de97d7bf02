"""The handle with which readers attach, and the writer's view of a reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from kvplug.errors import ConfigError, WireError
from kvplug.net.wire import from_plain, to_plain


def _unchanging(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(value))


def _ranks(value: Iterable[int]) -> tuple[int, ...]:
    return tuple(value)


@attrs.frozen(kw_only=True)
class QueueHandle:
    """The plain values that a reader needs to attach. Anything that carries values can carry them."""

    @attrs.frozen(kw_only=True)
    class Reader:
        """The writer's view of one reader."""

        rank: int
        """Its rank among the readers of the handle."""
        process: str
        """``"pid 12"``, with the host if it is another one; "has not come yet" before the reader attaches."""
        lag: int
        """How many messages the reader has not received yet."""
        gone: str = ""
        """Why the reader was evicted ("has left", "its process ended"); empty while it is attached or
        expected."""
        died: bool = False
        """Whether the reader was evicted because it died, rather than because it left."""

        def __str__(self) -> str:
            behind = "" if self.gone else f", {self.lag} message{'' if self.lag == 1 else 's'} behind"
            return f"reader rank {self.rank} ({self.process}{f'; {self.gone}' if self.gone else ''}){behind}"

    transport: str
    """The name of the transport that made the handle. Other transports refuse it."""
    reader_ranks: tuple[int, ...] = attrs.field(converter=_ranks)
    """The ranks that may attach, each once."""
    local_reader_ranks: tuple[int, ...] = attrs.field(converter=_ranks)
    """The ranks that are reached through shared memory."""
    data: Mapping[str, Any] = attrs.field(converter=_unchanging)
    """The transport's own values, such as names, addresses and tokens. Do not log them."""

    def __repr__(self) -> str:
        return f"<QueueHandle of a queue {self.transport!r} for readers {listed(self.reader_ranks)}>"

    def as_plain(self) -> dict[str, Any]:
        """Return the handle as plain values, for :func:`kvplug.net.wire.encode`, JSON or a group."""
        return dict(to_plain(self))

    @classmethod
    def from_plain(cls, plain: Any) -> QueueHandle:
        """Return the handle that :meth:`as_plain` made ``plain`` of.

        Raises:
            WireError: a field of the handle is missing or wrong; the error names it.
        """
        return from_plain(plain, cls, "queue handle")

    def check(self, transport: str, rank: int) -> None:
        """Check that reader ``rank`` may attach with the handle. For transports.

        Raises:
            WireError: the handle belongs to another transport.
            ConfigError: ``rank`` is not a reader of the queue.
        """
        if self.transport != transport:
            raise WireError(f"a handle of the queue {self.transport!r} was given to the queue {transport!r}")
        if rank not in self.reader_ranks:
            raise ConfigError(
                f"rank {rank} is not a reader of this queue; its readers are {listed(self.reader_ranks)}"
            )


def listed(ranks: Iterable[int]) -> str:
    """Format ranks for messages."""
    return ", ".join(map(str, ranks)) or "none"
