"""The handle that readers attach with, and a reader as the writer sees it."""

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
    """What a reader needs to attach: plain values, to be carried by whatever carries values."""

    @attrs.frozen(kw_only=True)
    class Reader:
        """One reader, as the writer sees it."""

        rank: int
        """Its rank among the readers of the handle."""
        process: str
        """``"pid 12"``, with the host where it is another one; "has not come yet" before it has attached."""
        lag: int
        """Messages that it has not received yet."""
        gone: str = ""
        """Why it was evicted ("has left", "its process ended"); empty while it is attached or expected."""
        died: bool = False
        """Whether it was evicted because it died, and not because it left."""

        def __str__(self) -> str:
            behind = "" if self.gone else f", {self.lag} message{'' if self.lag == 1 else 's'} behind"
            return f"reader rank {self.rank} ({self.process}{f'; {self.gone}' if self.gone else ''}){behind}"

    transport: str
    """Name of the queue that made it; another one refuses it."""
    reader_ranks: tuple[int, ...] = attrs.field(converter=_ranks)
    """The ranks that may attach, each once."""
    local_reader_ranks: tuple[int, ...] = attrs.field(converter=_ranks)
    """The ranks that are reached through shared memory."""
    data: Mapping[str, Any] = attrs.field(converter=_unchanging)
    """The transport's own: names, addresses, tokens. Do not log it."""

    def __repr__(self) -> str:
        return f"<QueueHandle of a queue {self.transport!r} for readers {listed(self.reader_ranks)}>"

    def as_plain(self) -> dict[str, Any]:
        """For :func:`kvplug.net.wire.encode`, JSON, a group."""
        return dict(to_plain(self))

    @classmethod
    def from_plain(cls, plain: Any) -> QueueHandle:
        """The inverse of :meth:`as_plain`.

        Raises:
            WireError: a field of the handle is missing or wrong; names it.
        """
        return from_plain(plain, cls, "queue handle")

    def check(self, transport: str, rank: int) -> None:
        """For transports, before they attach.

        Raises:
            WireError: it is another transport's.
            ConfigError: ``rank`` is not one of its readers.
        """
        if self.transport != transport:
            raise WireError(f"a handle of the queue {self.transport!r} was given to the queue {transport!r}")
        if rank not in self.reader_ranks:
            raise ConfigError(
                f"rank {rank} is no reader of this queue; its readers are {listed(self.reader_ranks)}"
            )


def listed(ranks: Iterable[int]) -> str:
    """Ranks, for messages."""
    return ", ".join(map(str, ranks)) or "none"
