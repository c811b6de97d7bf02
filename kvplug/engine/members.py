"""The engines that a directory lists for a deployment."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping

import attrs

from kvplug.net.deadline import Deadline


@attrs.frozen(kw_only=True)
class Engine:
    """An engine whose workers have all announced themselves."""

    engine_id: str
    """The config's ``engine_id``, which is unique."""
    epochs: tuple[str, ...]
    """The epochs of the workers' processes, by rank. They change when the engine restarts."""
    contacts: Mapping[int, str] = attrs.field(repr=False)
    """Where each worker listens, by rank, for ``Peers.connect(peer=...)``. Connecting fails if another engine
    listens there, or if this engine has restarted. Opaque."""
    role: str
    """``producer``, ``consumer`` or ``both``."""
    model: str
    """A fingerprint, equal for engines with interchangeable KV."""


Listener = Callable[[tuple[Engine, ...], bool], None]


class Members(abc.ABC):
    """This process's access to the directory that the config's ``peers`` names."""

    model: str
    """The fingerprint of this engine's own model."""

    @abc.abstractmethod
    def announce(self, contact: str) -> None:
        """Announce that this worker listens at ``contact``, and renew the announcement until :meth:`close`.

        Raises:
            ConfigError: other hosts can reach the directory but not the contact.
        """

    @abc.abstractmethod
    def follow(self, listener: Listener) -> None:
        """Call ``listener(engines, is_stale)`` with all other engines after each change, in a background
        thread. ``is_stale`` means that the directory has not answered for longer than a lease, so that
        ``engines`` are the last known ones. Such calls repeat until the directory answers; then a call with
        ``is_stale`` false follows."""

    @abc.abstractmethod
    def wait_until_known(self, deadline: Deadline) -> None:
        """Wait for the first answer of the directory.

        Raises:
            TimeoutError: the directory did not answer in time; the message gives the cause.
            ClosedError: :meth:`close` was called.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Withdraw the announcement, and end the thread. Waits at most a second. Idempotent."""
