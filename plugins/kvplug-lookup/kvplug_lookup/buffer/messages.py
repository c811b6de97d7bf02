"""The messages on the signal pipe, and how they are sent.

Each message is one uint8 tensor: the wire encoding of its name and its fields. The reaching end numbers its
calls. Every message names its call, so calls can overtake each other.

    match   Match ─► Matched
    take    Find ─► Found ─► Send ─► tensors on the data pipe ─► Done ─► Granted
    read    Find ─► Found ─► Send ─► tensors on the data pipe ─► Done

A reaching end asks for the tensors of one entry at a time. All that ``Found`` describes then arrive, or
``None``, which no entry contains, cuts them short. The store may end a call at any time with ``Failed``. The
reaching end ends each ``Find`` with ``Done`` or, at any time, ``Cancel``. Either end sends ``End`` when it
closes.

This module checks what it can without knowing the call: types, and that the parts of an entry fit together.
It allocates nothing for the described tensors.
"""

from __future__ import annotations

import logging
import threading
from typing import Annotated, Any, Final

import attrs
import msgspec
import torch
from torch import Tensor

from kvplug import (
    CapacityError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    TransportError,
    UnsupportedError,
)
from kvplug.engine import EntryGoneError
from kvplug.net.wire import decode, encode, from_plain, memory_of, to_plain
from kvplug.transport import Deadline, NamedExhaustion, Pipe, WireError, peer_text
from kvplug_lookup.buffer.entry import Description, Query

_log = logging.getLogger(__name__)

MAX_SIGNAL_BYTES: Final = 16 << 20
"""Limit for a message on the signal pipe; the wire format's limit for a value."""

_ERRORS: Final[dict[str, type[KvplugError]]] = {
    error.__name__: error
    for error in (EntryGoneError, TimeoutError, UnsupportedError, CapacityError, WireError)
} | {"ClosedError": PeerGoneError}
"""The errors that a ``Failed`` may raise at the reaching end."""

_Number = Annotated[int, msgspec.Meta(ge=0, lt=(1 << 63) - 1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


@attrs.frozen
class Match:
    call: _Number
    query: Query


@attrs.frozen
class Find:
    call: _Number
    query: Query
    """Reads if it has ``min_tokens``, otherwise takes."""
    timeout: _Seconds | None
    """Seconds from now until the caller gives up."""


@attrs.frozen
class Send:
    """The caller is ready to receive the tensors of the entry that it was told of."""

    call: _Number


@attrs.frozen
class Done:
    """The caller has received everything."""

    call: _Number


@attrs.frozen
class Cancel:
    call: _Number


@attrs.frozen
class Matched:
    call: _Number
    num_tokens: _Number


@attrs.frozen
class Found:
    call: _Number
    entry_id: _Number
    entry: Description


@attrs.frozen
class Granted:
    """Whether the caller gets the taken entry. If not, it was too late and the entry is back in the store."""

    call: _Number
    is_yours: bool


@attrs.frozen
class Failed:
    call: _Number
    error: str
    """Name of the error's class."""
    text: str
    resource: str = ""
    """The resource that the store's process ran out of."""

    @classmethod
    def of(cls, call: int, error: KvplugError) -> Failed:
        lacks = error.resource if isinstance(error, ResourceExhaustedError) else ""
        return cls(call, type(error).__name__, str(error), lacks)

    def to_error(self, what: str, peer: str) -> KvplugError:
        """The error that a call for ``what`` raises at the reaching end."""
        text = f"{what}: {peer_text(self.text)}"
        if self.resource:
            text = f"the lookup store at {peer}: {text}"
            return ResourceExhaustedError(text, resource=peer_text(self.resource))
        return _ERRORS.get(self.error, TransportError)(text)


@attrs.frozen
class End:
    """The sender sends nothing more."""


Request = Match | Find | Send | Done | Cancel
Answer = Matched | Found | Granted | Failed
Message = Request | Answer | End
_BY_NAME: Final[dict[Any, type[Any]]] = {
    kind.__name__: kind for kind in (Match, Find, Send, Done, Cancel, Matched, Found, Granted, Failed, End)
}


@NamedExhaustion("encoding a message")
def pack(message: Message) -> Tensor:
    """Encode a message as a tensor.

    Raises:
        CapacityError: it is too large.
        ResourceExhaustedError: not enough memory.
    """
    data = encode([type(message).__name__, to_plain(message)])
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@NamedExhaustion("decoding a message")
def unpack(tensor: Tensor | None) -> Message:
    """Decode a message.

    Raises:
        WireError: the tensor holds no valid message.
        ResourceExhaustedError: not enough memory.
    """
    if tensor is None or tensor.dtype is not torch.uint8 or tensor.dim() != 1:
        raise WireError("a message on the signal pipe must be a one-dimensional uint8 tensor")
    match decode(memory_of(tensor)):
        case [str(name), dict(fields)] if name in _BY_NAME:
            cls = _BY_NAME[name]
            return from_plain(fields, cls, f"the message {cls.__name__}")  # type: ignore[no-any-return]
        case _:
            raise WireError("an unknown message on the signal pipe")


class PipePair:
    """The pipes to the other end. Any thread may send messages on the signal pipe; one receives them."""

    def __init__(self, signal: Pipe, data: Pipe) -> None:
        signal.limit_messages(MAX_SIGNAL_BYTES)
        data.limit_messages(0)  # tensors are received only into memory that is given
        self.signal = signal
        self.data = data
        self._sending = threading.Lock()

    @property
    def peer(self) -> str:
        return self.signal.peer

    def send(self, message: Message, deadline: Deadline) -> None:
        """Raises what :func:`pack` and ``send_tensor`` raise. After a ``TimeoutError`` nothing was sent."""
        tensor = pack(message)
        remaining = deadline.remaining()
        if not self._sending.acquire(timeout=-1 if remaining is None else remaining):
            raise TimeoutError("the signal pipe has no room for another message")
        try:
            self.signal.send_tensor(tensor, timeout=deadline.remaining())
        finally:
            self._sending.release()

    def receive(self, deadline: Deadline) -> Message:
        """Raises what :func:`unpack` and ``recv_tensor`` raise."""
        return unpack(self.signal.recv_tensor(timeout=deadline.remaining()))

    def close(self, deadline: Deadline) -> None:
        """Send the end signal, and close both pipes."""
        try:
            self.send(End(), deadline)
        except KvplugError as e:
            _log.debug("could not send the end signal to %s: %s", self.peer, e)
        self.signal.close(deadline.remaining())
        self.data.close(deadline.remaining())

    def abort(self) -> None:
        self.signal.abort()
        self.data.abort()
