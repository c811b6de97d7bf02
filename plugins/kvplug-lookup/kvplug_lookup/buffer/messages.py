"""What the two ends say to each other on the signal pipe, and the order of tensors on the data pipe.

Each message is one uint8 tensor: the wire encoding of ``[name, field, field, ...]``. The reaching end
numbers its calls; every answer names the call it belongs to, so that calls overtake each other.

    match   Match ─► Matched
    take    Take ─► Coming, tensors on the data pipe ─► Done ─► Granted
    read    Read ─► Coming, tensors on the data pipe ─► Done

``Cancel`` ends a call from the reaching end at any time; ``Failed`` from the other. Tensors that were
announced by ``Coming`` arrive all, or are cut short by ``None``, which no entry contains. ``End`` is
the end signal of either role.

What a message says is checked here as far as it can be without knowing the call: types, and that the parts
of an entry belong together. Nothing is allocated for what it announces.
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
"""Of a message on the signal pipe, as the wire format bounds a value."""
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
    """Seconds from now on, after which the caller is no longer there."""


@attrs.frozen
class Read:
    call: int = attrs.field(validator=_number)
    key: bytes = attrs.field(validator=instance_of(bytes))
    extra: bytes = attrs.field(validator=instance_of(bytes))
    min_tokens: int = attrs.field(validator=_number)
    timeout: float | None = attrs.field(validator=_seconds)


@attrs.frozen
class Done:
    """The caller has it all."""

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
    """Whether the taken entry is the caller's. If not, it took too long and the entry is back."""

    call: int = attrs.field(validator=_number)
    is_yours: bool = attrs.field(validator=instance_of(bool))


@attrs.frozen
class Failed:
    call: int = attrs.field(validator=_number)
    error: str = attrs.field(validator=instance_of(str))
    """Name of its class."""
    text: str = attrs.field(validator=instance_of(str))
    resource: str = attrs.field(default="", validator=instance_of(str))
    """What the store's process has no more of."""


def part_of(tensor: Tensor | None) -> TensorMeta | None:
    """Dtype and shape of key, value or hidden.

    Raises:
        UnsupportedError: it cannot be sent.
    """
    return None if tensor is None else meta_of(tensor)


def _part(plain: Any) -> TensorMeta | None:
    return plain if plain is None or isinstance(plain, TensorMeta) else TensorMeta(*plain)


@attrs.frozen
class Coming:
    """An entry's tensors follow on the data pipe, those of calls answered before it first."""

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
            raise WireError("an entry came whose tokens and roi differ in length")
        if self.roi.translate(None, b"\0\1"):
            raise WireError("an entry came whose roi is not made of booleans")
        layered = [part.shape[:2] for part in (self.key, self.value) if part is not None]
        if any(shape[1:] != (num_tokens,) or shape != layered[0] for shape in layered):
            raise WireError(f"an entry of {num_tokens} tokens came whose key and value have {layered}")
        if self.num_layers > _MAX_LAYERS:
            raise WireError(f"an entry of {self.num_layers} layers came")

    @property
    def num_layers(self) -> int:
        part = self.key or self.value
        return 0 if part is None else part.shape[0]

    @property
    def num_tensors(self) -> int:
        """How many follow on the data pipe."""
        return self._per_layer * self.num_layers + (self.hidden is not None)

    @property
    def _per_layer(self) -> int:
        return (self.key is not None) + (self.value is not None)

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
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
        """The tokens under the roi, by which the entry is found."""
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
    """Nothing more comes from the end that says so."""


Message = Match | Take | Read | Done | Cancel | Matched | Granted | Failed | Coming | End

_BY_NAME: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Match, Take, Read, Done, Cancel, Matched, Granted, Failed, Coming, End)
}


@NamedExhaustion("encoding a message")
def pack(message: Message) -> Tensor:
    """The tensor that carries it.

    Raises:
        UnsupportedError, CapacityError: it cannot be encoded (an entry's metadata, or too large).
        ResourceExhaustedError: not enough memory.
    """
    fields = [getattr(message, field.name) for field in attrs.fields(type(message))]
    plain = [[f.dtype, list(f.shape)] if isinstance(f, TensorMeta) else f for f in fields]
    return torch.frombuffer(bytearray(encode([type(message).__name__, *plain])), dtype=torch.uint8)


@NamedExhaustion("decoding a message")
def unpack(tensor: Tensor | None) -> Message:
    """What the tensor carries.

    Raises:
        WireError: it is no message of these.
        ResourceExhaustedError: not enough memory.
    """
    if tensor is None or tensor.dtype is not torch.uint8 or tensor.dim() != 1:
        raise WireError("a message on the signal pipe must be a row of bytes")
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
    """Hold the lock that keeps the messages of several threads apart.

    Raises:
        TimeoutError: another thread's message did not get through in time.
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
    """Of its own, writable memory.

    Raises:
        WireError: not a whole number of ids.
    """
    if len(data) % 8:
        raise WireError(f"{len(data)} bytes are no 64-bit token ids")
    key: TokenArray = np.frombuffer(data, "<i8").astype(np.int64)
    return key


def layers_of(key: Tensor | None, value: Tensor | None) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Key and value layer by layer."""
    part = key if key is not None else value
    for layer in range(0 if part is None else part.shape[0]):
        yield None if key is None else key[layer], None if value is None else value[layer]


def stream_of(key: Tensor | None, value: Tensor | None, hidden: Tensor | None) -> Iterator[Tensor]:
    """The tensors of an entry in the order of the data pipe."""
    for layer in layers_of(key, value):
        yield from (part for part in layer if part is not None)
    if hidden is not None:
        yield hidden
