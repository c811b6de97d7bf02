"""The engines of a deployment, as a directory knows them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping

import attrs

from kvplug.net.deadline import Deadline


@attrs.frozen(kw_only=True)
class Engine:
    """One engine, all of whose workers have announced themselves."""

    engine_id: str
    """The config's ``engine_id``; no two engines have the same."""
    epochs: tuple[str, ...]
    """Of the workers' processes, by rank. They change when the engine is started again."""
    contacts: Mapping[int, str] = attrs.field(repr=False)
    """Where each worker listens, by rank: for ``Peers.connect(peer=...)``, which refuses another engine that
    answers there, and this one after a restart. Opaque."""
    role: str
    """``producer``, ``consumer`` or ``both``."""
    model: str
    """A fingerprint: engines whose KV means the same have equal ones."""


Listener = Callable[[tuple[Engine, ...], bool], None]


class Members(abc.ABC):
    """This process's access to the directory that the config's ``peers`` names."""

    model: str
    """The fingerprint of this engine's own model."""

    @abc.abstractmethod
    def announce(self, contact: str) -> None:
        """Announce that this worker listens at ``contact``, and renew that until :meth:`close`.

        Raises:
            ConfigError: other hosts reach the directory and cannot reach the contact.
        """

    @abc.abstractmethod
    def follow(self, listener: Listener) -> None:
        """Have the other engines reported, in a thread of the directory's: ``listener(engines, is_stale)``
        after each change, each with all of them. With ``is_stale`` the directory has not answered for longer
        than a lease, ``engines`` are those that it knew last, and the call is repeated until it answers; then
        it reports all of them again."""

    @abc.abstractmethod
    def wait_until_known(self, deadline: Deadline) -> None:
        """Wait for the first answer of the directory.

        Raises:
            TimeoutError: there was none; says why.
            ClosedError: it was closed.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Withdraw what was announced, and end the thread. Does not wait longer than a second. Idempotent."""
