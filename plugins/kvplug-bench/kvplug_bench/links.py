"""The ends that are measured: what each candidate implements. ``Tensor`` is ``torch.Tensor``, of float16."""

from __future__ import annotations

import abc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from torch import Tensor

MEETING_S = 120.0
"""How long the ends of a candidate wait for each other."""


class UnavailableError(Exception):
    """A candidate cannot be measured here, and why."""


@attrs.frozen(kw_only=True)
class Meeting:
    """How the ends of one candidate find each other."""

    rank: int
    """0 is the first end, the writer of a queue."""
    size: int
    folder: str
    """An empty one, for sockets and files that have to have a name."""
    tell: Callable[[Any], None]
    """Give a plain value to all others."""
    told: Callable[[], Any]
    """The next value that another end has told."""
    device: str = "cpu"
    """Where this end's tensors lie."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


class Link(abc.ABC):
    """One of two ends, each of which sends to the other. Made with a :class:`Meeting`.

    Raises:
        UnavailableError, ImportError: it cannot work here; it is left out, and said why.
    """

    @abc.abstractmethod
    def send(self, tensor: Tensor) -> None:
        """Return when the next can be sent; ``tensor`` is not touched before the other end has answered."""

    @abc.abstractmethod
    def receive(self, out: Tensor) -> None:
        """Fill ``out`` with the next message."""

    @abc.abstractmethod
    def receive_new(self, like: Tensor) -> Tensor:
        """The next message, of the same size as ``like``, in memory that the caller may keep."""

    @abc.abstractmethod
    def close(self) -> None: ...


class Broadcast(abc.ABC):
    """The end of the writer, or of one reader. Made with a :class:`Meeting`, and ready at all ends then.

    Raises:
        UnavailableError, ImportError: it cannot work here; it is left out, and said why.
    """

    @abc.abstractmethod
    def send(self, tensor: Tensor) -> None:
        """To every reader; ``tensor`` is not touched before they have answered."""

    @abc.abstractmethod
    def receive(self, like: Tensor) -> Tensor:
        """The next tensor, of the same size as ``like``, to be kept."""

    @abc.abstractmethod
    def send_value(self, value: bytes) -> None:
        """A small value, to every reader."""

    @abc.abstractmethod
    def receive_value(self, nbytes: int) -> None:
        """The next small value."""

    @abc.abstractmethod
    def close(self) -> None: ...


class Lending(Broadcast):
    """One whose readers can look at a tensor where it lies: what the op "looked" wants."""

    @abc.abstractmethod
    def lend(self, tensor: Tensor) -> None:
        """Send a tensor so that readers can :meth:`look` at it."""

    @abc.abstractmethod
    def look(self, like: Tensor) -> AbstractContextManager[Tensor]:
        """The next tensor where it lies, while the block lasts."""
