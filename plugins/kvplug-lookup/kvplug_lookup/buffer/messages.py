"""The messages on the signal pipe, and the order of tensors on the data pipe.

Each message is one uint8 tensor: the wire encoding of ``[name, field, field, ...]``. The reaching end
numbers its calls. Every answer names its call, so calls can overtake each other.

    match   Match ─► Matched
    take    Take ─► Coming, tensors on the data pipe ─► Done ─► Granted
    read    Read ─► Coming, tensors on the data pipe ─► Done

The reaching end may end a call at any time with ``Cancel``, the store with ``Failed``. All tensors that
``Coming`` announced arrive, or ``None``, which no entry contains, cuts them short. Either end sends ``End``
when it closes.

This module checks what it can without knowing the call: types, and that the parts of an entry fit together.
It allocates nothing for announced tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import attrs
import numpy as np
import torch
from attrs.validators import and_, ge, instance_of, lt, optional
from torch import Tensor

from kvplug import KvplugError, TimeoutError
from kvplug.net.wire import TensorMeta, decode, encode, memory_of
from kvplug.net.wire.tensors import meta_of
from kvplug.transport import Deadline, Entry, NamedExhaustion, WireError, peer_text
from kvplug_lookup.buffer.index import TokenArray

MAX_SIGNAL_BYTES: Final = 16 << 20
"""Limit for a message on the signal pipe; the wire format's limit for a value."""
_MAX_LAYERS: Final = 1 << 16

_number = and_(instance_of(int), ge(0))
_entry_id = and_(_number, lt((1 << 63) - 1))
_seconds = optional(and_(instance_of((int, float)), ge(0)))
_key = optional(instance_of(bytes))


@attrs.frozen
class Match:
    call: int = attrs.field(validator=_number)
    key: bytes = attrs.field(validator=instance_of(bytes))
    """Tokens under the roi, int64, little-endian."""
    extra: bytes = attrs.field(validator=instance_of(bytes))


@attrs.frozen
class Take:
    call: int = attrs.field(validator=_number)
    key: bytes | None = attrs.field(validator=_key)
    extra: bytes = attrs.field(validator=instance_of(bytes))
    timeout: float | None = attrs.field(validator=_seconds)
    """Seconds from now until the caller gives up."""


@attrs.frozen
class Read:
    call: int = attrs.field(validator=_number)
    key: bytes = attrs.field(validator=instance_of(bytes))
    extra: bytes = attrs.field(validator=instance_of(bytes))
    min_tokens: int = attrs.field(validator=_number)
    timeout: float | None = attrs.field(validator=_seconds)


@attrs.frozen
class Done:
    """The caller has received everything."""

    call: int = attrs.field(validator=_number)


@attrs.frozen
class Cancel:
    call: int = attrs.field(validator=_number)


@attrs.frozen
class Matched:
    call: int = attrs.field(validator=_number)
    num_tokens: int = attrs.field(validator=_number)


@attrs.frozen
class Granted:
    """Whether the caller gets the taken entry. If not, it was too late and the entry is back in the store."""

    call: int = attrs.field(validator=_number)
    is_yours: bool = attrs.field(validator=instance_of(bool))


@attrs.frozen
class Failed:
    call: int = attrs.field(validator=_number)
    error: str = attrs.field(validator=instance_of(str))
    """Name of the error's class."""
    text: str = attrs.field(validator=instance_of(str))
    resource: str = attrs.field(default="", validator=instance_of(str))
    """The resource that the store's process ran out of."""


def part_of(tensor: Tensor | None) -> TensorMeta | None:
    """Dtype and shape of key, value or hidden.

    Raises:
        UnsupportedError: the tensor cannot be sent.
    """
    return None if tensor is None else meta_of(tensor)


def _part(plain: Any) -> TensorMeta | None:
    return plain if plain is None or isinstance(plain, TensorMeta) else TensorMeta(*plain)


@attrs.frozen
class Coming:
    """An entry's tensors follow on the data pipe, after the tensors of calls answered before."""

    call: int = attrs.field(validator=_number)
    entry_id: int = attrs.field(validator=_entry_id)
    extra: bytes = attrs.field(validator=instance_of(bytes))
    tokens: bytes = attrs.field(validator=instance_of(bytes))
    roi: bytes = attrs.field(validator=instance_of(bytes))
    metadata: dict[str, Any] = attrs.field(validator=instance_of(dict))
    key: TensorMeta | None = attrs.field(converter=_part)
    value: TensorMeta | None = attrs.field(converter=_part)
    hidden: TensorMeta | None = attrs.field(converter=_part)

    def __attrs_post_init__(self) -> None:
        num_tokens = len(self.roi)
        if len(self.tokens) != 8 * num_tokens:
            raise WireError("got an entry whose tokens and roi differ in length")
        if self.roi.translate(None, b"\0\1"):
            raise WireError("got an entry whose roi is not boolean")
        layered = [part.shape[:2] for part in (self.key, self.value) if part is not None]
        if any(shape[1:] != (num_tokens,) or shape != layered[0] for shape in layered):
            raise WireError(
                f"got an entry of {num_tokens} tokens whose key and value have the shapes {layered}"
            )
        if self.num_layers > _MAX_LAYERS:
            raise WireError(f"got an entry of {self.num_layers} layers; at most {_MAX_LAYERS} are allowed")

    @property
    def num_layers(self) -> int:
        part = self.key or self.value
        return 0 if part is None else part.shape[0]

    @property
    def num_tensors(self) -> int:
        """Number of tensors that follow on the data pipe."""
        return self._per_layer * self.num_layers + (self.hidden is not None)

    @property
    def _per_layer(self) -> int:
        return (self.key is not None) + (self.value is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.nbytes for part in (self.key, self.value, self.hidden) if part is not None)

    def tensor(self, index: int) -> tuple[str, TensorMeta]:
        """The name ("key", "value", "hidden") and meta of the tensor with this number on the data pipe."""
        if index < self._per_layer * self.num_layers:
            layered = [(name, part) for name, part in (("key", self.key), ("value", self.value)) if part]
            name, part = layered[index % self._per_layer]
            return name, TensorMeta(part.dtype, part.shape[1:])
        assert self.hidden is not None
        return "hidden", self.hidden

    @property
    def key_tokens(self) -> TokenArray:
        """The tokens under the roi: the entry's key."""
        tokens: TokenArray = key_from_bytes(self.tokens)[np.frombuffer(self.roi, np.bool_)]
        return tokens

    def header(self) -> Entry.Header:
        return Entry.Header(
            entry_id=self.entry_id,
            tokens=torch.from_numpy(key_from_bytes(self.tokens)),
            roi=torch.from_numpy(np.frombuffer(self.roi, np.bool_).copy()),
            num_layers=self.num_layers,
            metadata=self.metadata,
        )


@attrs.frozen
class End:
    """The sender sends nothing more."""


Message = Match | Take | Read | Done | Cancel | Matched | Granted | Failed | Coming | End

_BY_NAME: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Match, Take, Read, Done, Cancel, Matched, Granted, Failed, Coming, End)
}


@NamedExhaustion("encoding a message")
def pack(message: Message) -> Tensor:
    """Encode a message as a tensor.

    Raises:
        UnsupportedError, CapacityError: it cannot be encoded (an entry's metadata), or is too large.
        ResourceExhaustedError: not enough memory.
    """
    fields = [getattr(message, field.name) for field in attrs.fields(type(message))]
    plain = [[f.dtype, list(f.shape)] if isinstance(f, TensorMeta) else f for f in fields]
    return torch.frombuffer(bytearray(encode([type(message).__name__, *plain])), dtype=torch.uint8)


@NamedExhaustion("decoding a message")
def unpack(tensor: Tensor | None) -> Message:
    """Decode a message.

    Raises:
        WireError: the tensor holds no valid message.
        ResourceExhaustedError: not enough memory.
    """
    if tensor is None or tensor.dtype is not torch.uint8 or tensor.dim() != 1:
        raise WireError("a message on the signal pipe must be a one-dimensional uint8 tensor")
    plain = decode(memory_of(tensor))
    try:
        name, *fields = plain
        return _BY_NAME[name](*fields)  # type: ignore[no-any-return]
    except WireError:
        raise
    except (KvplugError, TypeError, ValueError, KeyError) as e:
        why = peer_text(f"{type(e).__name__}: {e}")
        raise WireError(f"an unknown or malformed message on the signal pipe: {why}") from e


@contextmanager
def deadline_lock(lock: threading.Lock, deadline: Deadline) -> Iterator[None]:
    """Hold the lock that serialises the messages of several threads.

    Raises:
        TimeoutError: another thread's message was not sent in time.
    """
    remaining = deadline.remaining()
    if not lock.acquire(timeout=-1 if remaining is None else min(remaining, threading.TIMEOUT_MAX)):
        raise TimeoutError("the signal pipe has no room for another message")
    try:
        yield
    finally:
        lock.release()


def key_to_bytes(key: TokenArray) -> bytes:
    data: bytes = key.astype("<i8", copy=False).tobytes()
    return data


def key_from_bytes(data: bytes) -> TokenArray:
    """Decode token ids into new, writable memory.

    Raises:
        WireError: the data is not a whole number of ids.
    """
    if len(data) % 8:
        raise WireError(f"{len(data)} bytes are not a whole number of 64-bit token ids")
    key: TokenArray = np.frombuffer(data, "<i8").astype(np.int64)
    return key


def layers_of(key: Tensor | None, value: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Yield key and value layer by layer."""
    part = key if key is not None else value
    for layer in range(0 if part is None else part.shape[0]):
        yield None if key is None else key[layer], None if value is None else value[layer]


def stream_of(key: Tensor | None, value: Tensor | None, hidden: Tensor | None) -> Iterator[Tensor]:
    """Yield the tensors of an entry in the order of the data pipe."""
    for layer in layers_of(key, value):
        yield from (part for part in layer if part is not None)
    if hidden is not None:
        yield hidden
