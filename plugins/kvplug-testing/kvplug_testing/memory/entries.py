"""Checks, measures and copies the keys and parts of entries of the lookup buffer "memory"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from kvplug import TimeoutError, UnsupportedError
from kvplug.net.wire import copy_into, decode, empty_like_meta, encode, memory_of, meta_of
from kvplug.transport import Deadline, Entry, EntryHeader, EntrySink, NamedExhaustion

if TYPE_CHECKING:
    from torch import Tensor

Key = tuple[int, ...]
"""The token ids under the roi."""


def checked_tokens(tokens: Any, roi: Any) -> tuple[Tensor, Tensor]:
    """Copies of the token ids (int64) and of the roi (bool; ``None`` is every token).

    Raises:
        UnsupportedError: they are not 64-bit integers and booleans.
        ValueError: they do not have one dimension or the same length.
    """
    import torch

    ids = _row(tokens, torch.int64, "token ids")
    mask = torch.ones_like(ids, dtype=torch.bool) if roi is None else _row(roi, torch.bool, "a roi")
    if mask.shape != ids.shape:
        raise ValueError(f"a roi of {len(mask)} does not fit {len(ids)} tokens")
    return ids, mask


def _row(given: Any, dtype: Any, what: str) -> Tensor:
    import torch

    plain = given.tolist() if hasattr(given, "tolist") else list(given)
    try:
        row = torch.tensor(plain) if plain else torch.tensor([], dtype=dtype)
    except (RuntimeError, TypeError, ValueError) as e:
        raise UnsupportedError(f"{what} must be {dtype}: {e}") from e
    if row.ndim != 1:
        raise ValueError(f"{what} must have one dimension, not {row.ndim}")
    if row.dtype != dtype:
        raise UnsupportedError(f"{what} must be {dtype}, not {row.dtype}")
    return row


def key_under(tokens: Any, roi: Any) -> Key:
    """The tokens under the roi. Raises like :func:`checked_tokens`."""
    ids, mask = checked_tokens(tokens, roi)
    return tuple(ids[mask].tolist())


def extra_bytes(extra: Any) -> bytes:
    """The part of the key besides the tokens.

    Raises:
        UnsupportedError: it is not bytes-like (``bytes`` of an int would be that many zeros).
    """
    try:
        return bytes(memoryview(extra))
    except TypeError as e:
        raise UnsupportedError(f"extra must be bytes, not {type(extra).__name__}") from e


def num_layers_of(num_tokens: int, key: Tensor | None, value: Tensor | None) -> int:
    """The first dimension of key and value; 0 if there are none.

    Raises:
        ValueError: the shapes do not match.
    """
    shapes = [tuple(part.shape) for part in (key, value) if part is not None]
    if any(len(shape) < 2 or shape[1] != num_tokens for shape in shapes):
        raise ValueError(f"key and value have the shape [num_layers, {num_tokens} tokens, ...], not {shapes}")
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"key has {shapes[0][0]} layers and value {shapes[1][0]}")
    return shapes[0][0] if shapes else 0


def nbytes_of(num_tokens: int, *parts: Tensor | None) -> int:
    """Total bytes of the parts, the token ids and the roi."""
    return 9 * num_tokens + sum(meta_of(part).nbytes for part in parts if part is not None)


@NamedExhaustion("copying an entry")
def copy_of(entry: Entry) -> Entry:
    """A copy that shares no memory with this entry."""
    header = entry.header
    copy = EntryHeader(
        entry_id=header.entry_id,
        tokens=header.tokens.clone(),
        roi=header.roi.clone(),
        num_layers=header.num_layers,
        metadata=decode(encode(header.metadata)),  # refuses values that cannot be encoded
    )
    parts = {name: _copied(getattr(entry, name)) for name in ("key", "value", "hidden")}
    return Entry(header=copy, tokens=copy.tokens, roi=copy.roi, **parts)


def _copied(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    copy = empty_like_meta(meta_of(tensor))
    copy_into(copy, memory_of(tensor))
    return copy


def give_layers(entry: Entry, sink: EntrySink, deadline: Deadline) -> Entry:
    """Pass key and value to a sink layer by layer, and return the rest.

    Raises:
        TimeoutError: the sink was too slow.
        Exception: raised by the sink.
    """
    sink.begin(entry.header)
    for index in range(entry.header.num_layers):
        if deadline.expired:
            raise TimeoutError(f"the sink took {index} of {entry.header.num_layers} layers in time")
        key, value = (None if part is None else part[index] for part in (entry.key, entry.value))
        sink.layer(index, key, value)
    return attrs.evolve(entry, key=None, value=None)
