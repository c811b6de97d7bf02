"""A pipe whose messages are changed before they are received: a peer that lies to what is built on pipes."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import TYPE_CHECKING, Final

from kvplug import KvplugError, TimeoutError
from kvplug.kit import DTYPES
from kvplug.net.wire import TensorMeta, copy_into, decode, empty_like_meta, encode, memory_of, meta_of
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    MessageLimit,
    Pipe,
    TensorMismatchError,
    Timeout,
    Transfer,
)
from kvplug_testing.tampering.falsehood import Falsehood, Falsifier, Message
from kvplug_testing.tampering.lies import INTEGERS, lie

if TYPE_CHECKING:
    from torch import Tensor

_MOST_ELEMENTS: Final = 1 << 16
"""Elements of a tensor in which one is changed."""


class TamperingPipe(Pipe):
    """A pipe around another one that changes what is received. It takes each message without ``out``."""

    def __init__(self, pipe: Pipe, falsehood: Falsehood | None = None) -> None:
        self.pipe = pipe
        self._falsifier = Falsifier(
            pipe, lambda timeout: pipe.recv_tensor(timeout=timeout), falsehood, _changed, pipe.abort
        )
        self._limit = MessageLimit()
        self._turn = threading.Lock()

    @property
    def num_received(self) -> int:
        return self._falsifier.num_received

    @property
    def said(self) -> str:
        """What was changed, in words."""
        return self._falsifier.said

    # -- receiving -------------------------------------------------------------------------------------

    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        deadline = Deadline.after(timeout, 60.0)
        left = deadline.remaining()
        if not self._turn.acquire(timeout=-1 if left is None else min(left, threading.TIMEOUT_MAX)):
            raise TimeoutError("another call receives")
        try:
            self._falsifier.await_message(deadline)
            received = self._delivered(self._falsifier.ready[0], out)
            self._falsifier.ready.popleft()
            return received
        finally:
            self._turn.release()

    def _delivered(self, message: Message, out: Tensor | None) -> Tensor | None:
        if message is None:
            return None
        if out is None:
            self._limit.check(meta_of(message).nbytes, self.peer)
            return message
        if meta_of(out) != meta_of(message):
            raise TensorMismatchError(f"{meta_of(message)} came, and {meta_of(out)} was to be filled")
        copy_into(out, memory_of(message))
        return out

    # -- the rest is the other pipe's --------------------------------------------------------------------

    def limit_messages(self, nbytes: int) -> None:
        self._limit.lower(nbytes)  # not the other one's, whose messages are received without ``out``

    def send_tensor(self, tensor: Tensor | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        return self.pipe.send_tensor(tensor, timeout=timeout)

    @property
    def closed(self) -> bool:
        return self.pipe.closed

    @property
    def peer(self) -> str:
        return self.pipe.peer

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self.pipe.close(timeout)

    def abort(self) -> None:
        self.pipe.abort()


def _changed(message: Message, rng: random.Random) -> tuple[Message, str]:
    """Another message, and what is different, in words."""
    if message is None:
        meta = TensorMeta(rng.choice(tuple(DTYPES)), rng.choice(((), (0,), (1,), (3, 2, 2, 4), (5000,))))
        return _made(meta, b""), f"it becomes {meta}"
    meta, data = meta_of(message), bytes(memory_of(message))
    if meta.dtype == "uint8":
        with contextlib.suppress(KvplugError):  # it may hold something else
            value, words = lie(decode(data), rng)
            said = encode(value)
            return _made(TensorMeta("uint8", (len(said),)), said), words
    shape, size = [*meta.shape], meta.itemsize
    match rng.randrange(6):
        case 0:
            return None, "it becomes None"
        case 1:
            meta = TensorMeta(rng.choice(tuple(DTYPES)), meta.shape)
        case 2 | 3:
            at = rng.randrange(len(shape) + 1)
            shape[at : at + 1] = rng.choice(([], [0], [1, *shape[at : at + 1]]))
            meta = TensorMeta(meta.dtype, tuple(shape))
        case _ if data:
            at = rng.randrange(min(len(data) // size, _MOST_ELEMENTS)) * size
            old = int.from_bytes(data[at : at + size], "little")
            new = rng.choice((*INTEGERS, old + 1, old - 1)) % (1 << 8 * size)
            changed = data[:at] + new.to_bytes(size, "little") + data[at + size :]
            return _made(meta, changed), f"the element {at // size} becomes {new}"
    return _made(meta, data), f"it becomes {meta}"


def _made(meta: TensorMeta, data: bytes) -> Message:
    """A tensor with these bytes, cut or filled up with zeros."""
    tensor = empty_like_meta(meta)
    if meta.nbytes:
        copy_into(tensor, memoryview(data[: meta.nbytes].ljust(meta.nbytes, b"\0")))
    return tensor
