"""Directories, in which engines announce themselves so that others find them without a list of addresses."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import attrs


class Directory(abc.ABC):
    """Keeps small entries under names, each for as long as its lease lasts.

    Law. Every later call of :meth:`entries`, in any process that uses the same directory, returns an entry as
    it was announced, until its lease ends (DIR-1 to DIR-3 in the laws). The lease runs on the directory's own
    clock, so the entries of a killed or stopped process disappear.

    Callers. The factory does not connect: it only checks the URL and the options, and ``kvplug config check``
    calls it too (DIR-4). Then one thread of kvplug calls the directory. Every call connects if needed, ends
    within the context's ``timeout_s`` whatever the service does, and may raise any error of its libraries:
    kvplug logs and counts the error, keeps the entries that it knows, and calls again later.
    """

    @attrs.frozen(kw_only=True)
    class Context:
        """For the factory of a directory, which returns a ``Directory``."""

        options: Any
        """An instance of the spec's options class, or ``None``."""
        url: str = attrs.field(repr=False)
        """The URL in the config's ``peers``, for example ``redis://10.0.0.7:6379/0``. May contain a
        password."""
        timeout_s: float = 3.0
        """The limit in seconds for every call."""

    @abc.abstractmethod
    def announce(self, name: str, entry: bytes, lease_s: float) -> None:
        """Keep the entry (at most 16 KiB) under the name for ``lease_s`` seconds from now, replacing any
        earlier entry.

        Args:
            name: Up to 250 printable ASCII characters without white space.
        """

    @abc.abstractmethod
    def withdraw(self, name: str) -> None:
        """Forget the entry, if it exists."""

    @abc.abstractmethod
    def entries(self) -> Mapping[str, bytes]:
        """Return every entry whose lease has not ended, by name."""

    def close(self) -> None:
        """End all connections. Announced entries stay until their leases end. Idempotent. No other method is
        called afterwards."""
        return None
