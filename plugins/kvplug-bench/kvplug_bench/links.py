"""The interface of a candidate's ends. ``Tensor`` is ``torch.Tensor``, of float16."""

from __future__ import annotations

import abc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from torch import Tensor

RENDEZVOUS_TIMEOUT_S = 120.0
"""How long the ends of a candidate wait for each other."""


class UnavailableError(Exception):
    """A candidate cannot be measured here. The message says why."""


@attrs.frozen(kw_only=True)
class Rendezvous:
    """Connects the ends of one candidate before measuring."""

    rank: int
    """0 is the first end, the writer of a queue."""
    size: int
    folder: str
    """An empty folder for sockets and files that need a path."""
    send: Callable[[Any], None]
    """Send a plain value to all other ends."""
    recv: Callable[[], Any]
    """The next value that another end has sent."""
    device: str = "cpu"
    """The device of this end's tensors."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


class Link(abc.ABC):
    """One of two connected ends. Made with a :class:`Rendezvous`.

    Raises:
        UnavailableError, ImportError: it cannot work here; the candidate is skipped with this reason.
    """

    @abc.abstractmethod
    def send(self, tensor: Tensor) -> None:
        """Return when the next tensor can be sent; ``tensor`` is not changed before the other end has
        answered.
        """

    @abc.abstractmethod
    def receive(self, out: Tensor) -> None:
        """Fill ``out`` with the next message."""

    @abc.abstractmethod
    def receive_new(self, like: Tensor) -> Tensor:
        """The next message, of the same size as ``like``, in memory that the caller may keep."""

    @abc.abstractmethod
    def close(self) -> None: ...


class Broadcast(abc.ABC):
    """The writer's or one reader's end. Made with a :class:`Rendezvous`, after which all ends are ready.

    Raises:
        UnavailableError, ImportError: it cannot work here; the candidate is skipped with this reason.
    """

    @abc.abstractmethod
    def send(self, tensor: Tensor) -> None:
        """Send to every reader; ``tensor`` is not changed before all of them have answered."""

    @abc.abstractmethod
    def receive(self, like: Tensor) -> Tensor:
        """The next tensor, of the same size as ``like``, in memory that the caller may keep."""

    @abc.abstractmethod
    def send_value(self, value: bytes) -> None:
        """Send a small value to every reader."""

    @abc.abstractmethod
    def receive_value(self, nbytes: int) -> None:
        """The next small value."""

    @abc.abstractmethod
    def close(self) -> None: ...


class InPlaceBroadcast(Broadcast):
    """A broadcast whose readers can read a tensor without copying it, as the op "looked" requires."""

    @abc.abstractmethod
    def send_in_place(self, tensor: Tensor) -> None:
        """Send a tensor so that readers can use :meth:`view_in_place`."""

    @abc.abstractmethod
    def view_in_place(self, like: Tensor) -> AbstractContextManager[Tensor]:
        """The next tensor in the transport's own memory, valid inside the block."""
