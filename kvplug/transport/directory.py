"""Directories: where engines announce themselves, so that others find them without a list of addresses."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import attrs


class Directory(abc.ABC):
    """Keeps small entries under names, each for as long as its lease lasts.

    Law. An entry is seen, as it was announced, by every process that uses the same directory: at the latest
    when the next :meth:`entries` begins. It is gone when its lease has ended (DIR-1 to DIR-3 in the laws).
    The lease is counted by the directory's own clock, so a process that is killed or stopped renews nothing
    and disappears.

    Callers. It is made without a connection: a factory checks the URL and the options, also for ``kvplug
    config check`` (DIR-4). Then one thread of kvplug calls it. Every call ends within the context's
    ``timeout_s``, whatever the service does, connects where needed, and may raise whatever its libraries
    raise: kvplug logs and counts that, keeps what it knows, and calls again later.
    """

    @attrs.frozen(kw_only=True)
    class Context:
        """For the factory of a directory, which returns a ``Directory``."""

        options: Any
        """An instance of the spec's options class, or ``None``."""
        url: str = attrs.field(repr=False)
        """As the config's ``peers`` names it, for example ``redis://10.0.0.7:6379/0``. May hold a
        password."""
        timeout_s: float = 3.0
        """Every call ends within it."""

    @abc.abstractmethod
    def announce(self, name: str, entry: bytes, lease_s: float) -> None:
        """Keep the entry (at most 16 KiB) under the name for ``lease_s`` seconds from now, in place of any
        other.

        Args:
            name: up to 250 printable ASCII characters without white space.
        """

    @abc.abstractmethod
    def withdraw(self, name: str) -> None:
        """Forget the entry, if it is there."""

    @abc.abstractmethod
    def entries(self) -> Mapping[str, bytes]:
        """Every entry whose lease has not ended, by its name."""

    def close(self) -> None:
        """End connections; announced entries stay until their leases end. No call follows. Idempotent."""
        return None
