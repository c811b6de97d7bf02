"""The parts of an entry of the lookup buffer "memory": checked, measured, copied, handed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvplug.errors import TimeoutError
from kvplug.net.deadline import Deadline
from kvplug.net.wire.tensors import copy_into, empty_like_meta, memory_of, meta_of
from kvplug.net.wire.values import decode, encode
from kvplug.transport.lookup import Entry, EntryHeader, EntrySink

if TYPE_CHECKING:
    from torch import Tensor


def header_of(
    entry_id: int, ids: Sequence[int], mask: Sequence[bool], num_layers: int, metadata: dict[str, Any]
) -> EntryHeader:
    """Everything in it is its own: nothing is shared with who gave it."""
    import torch

    return EntryHeader(
        entry_id=entry_id,
        tokens=torch.tensor(ids, dtype=torch.int64),
        roi=torch.tensor(mask, dtype=torch.bool),
        num_layers=num_layers,
        metadata=decode(encode(metadata)),  # refuses what could not travel
    )


def num_layers_of(num_tokens: int, key: Tensor | None, value: Tensor | None) -> int:
    """The first dimension of key and value; 0 where there is neither.

    Raises:
        ValueError: the shapes do not belong together.
    """
    shapes = [tuple(part.shape) for part in (key, value) if part is not None]
    if any(len(shape) < 2 or shape[1] != num_tokens for shape in shapes):
        raise ValueError(f"key and value have the shape [num_layers, {num_tokens} tokens, ...], not {shapes}")
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"key has {shapes[0][0]} layers and value {shapes[1][0]}")
    return shapes[0][0] if shapes else 0


def nbytes_of(num_tokens: int, *parts: Tensor | None) -> int:
    """Bytes of the parts, of the token ids and of the roi."""
    return 9 * num_tokens + sum(meta_of(part).nbytes for part in parts if part is not None)


def copied(tensor: Tensor | None) -> Tensor | None:
    """Of the same shape, dtype and bits, contiguous, and sharing nothing."""
    if tensor is None:
        return None
    copy = empty_like_meta(meta_of(tensor))
    copy_into(copy, memory_of(tensor))
    return copy


def hand_over(entry: Entry, sink: EntrySink | None, deadline: Deadline) -> Entry:
    """A copy of an entry for who reads it; to a sink layer by layer, and the rest is returned.

    Raises:
        TimeoutError: the sink was too slow.
        Exception: the sink's own.
    """
    header = attrs.evolve(
        entry.header,
        tokens=copied(entry.tokens),
        roi=copied(entry.roi),
        metadata=decode(encode(entry.header.metadata)),
    )
    key, value, hidden = copied(entry.key), copied(entry.value), copied(entry.hidden)
    if sink is not None:
        sink.begin(header)
        for index in range(header.num_layers):
            if deadline.expired:
                raise TimeoutError(f"the sink took {index} of {header.num_layers} layers in time")
            sink.layer(index, None if key is None else key[index], None if value is None else value[index])
        key = value = None
    return Entry(header=header, tokens=header.tokens, roi=header.roi, key=key, value=value, hidden=hidden)
