"""Entries and queries: what a caller passes as bytes, what the bytes must be, and what a caller gets."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final

import attrs
import msgspec
import numpy as np
import torch
from torch import Tensor

from kvplug import UnsupportedError
from kvplug.net.wire import TensorMeta, decode, encode, meta_of
from kvplug.net.wire.tensors import as_bits
from kvplug.transport import Entry, NamedExhaustion, WireError

TOKEN_BYTES: Final = 8
"""Token ids are int64, little-endian."""
MAX_LAYERS: Final = 1 << 16


@attrs.frozen
class Query:
    """What an entry is asked for by."""

    ids: bytes | None
    """The token ids under the roi; ``None``: any."""
    extra: bytes
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """How many leading tokens the entry must share. 0: one of the two sequences is a prefix of the other."""

    @classmethod
    def of(cls, tokens: Any, roi: Any, extra: Any, min_tokens: int = 0) -> Query:
        """Raises UnsupportedError, ValueError: see :func:`ids_under` and :func:`extra_bytes`."""
        return cls(None if tokens is None else ids_under(tokens, roi), extra_bytes(extra), min_tokens)

    def __attrs_post_init__(self) -> None:
        if self.ids is None:
            if self.min_tokens:
                raise ValueError("a query for any entry shares no tokens with it")
        elif len(self.ids) % TOKEN_BYTES:
            raise ValueError(f"{len(self.ids)} bytes are not a whole number of 64-bit token ids")

    @property
    def num_tokens(self) -> int:
        return len(self.ids or b"") // TOKEN_BYTES

    def is_met_by(self, ids: bytes, extra: bytes) -> bool:
        """Whether an entry with these ids under its roi answers the query. Ids are compared exactly."""
        if extra != self.extra or not ids:
            return False
        if self.ids is None:
            return True
        shorter = min(len(ids), len(self.ids))
        size = TOKEN_BYTES * self.min_tokens or shorter
        return 0 < size <= shorter and ids[:size] == self.ids[:size]

    def __str__(self) -> str:
        """For messages, without token ids: they are a user's prompt."""
        return "a query for any entry" if self.ids is None else f"a query of {self.num_tokens} tokens"


@attrs.frozen
class Description:
    """An entry except its tensors, as bytes. The store keeps it and sends it before the tensors."""

    tokens: bytes
    """All token ids."""
    roi: bytes
    """One byte per token, 1 if the token is part of the key."""
    extra: bytes
    metadata: bytes
    """The encoded dict of the producer."""
    key: TensorMeta | None
    value: TensorMeta | None
    hidden: TensorMeta | None

    @classmethod
    def of(
        cls, tokens: Any, roi: Any, extra: Any, metadata: dict[str, Any] | None, *parts: Tensor | None
    ) -> Description:
        """``parts`` are key, value and hidden.

        Raises:
            UnsupportedError, CapacityError: a part, or the metadata, cannot be sent.
            ValueError: the parts do not fit together.
        """
        found = token_array(tokens)
        mask = np.ones(found.size, np.bool_) if roi is None else _mask(roi, found.size)
        metas = [None if part is None else meta_of(part) for part in parts]
        return cls(_id_bytes(found), mask.tobytes(), extra_bytes(extra), encode(dict(metadata or {})), *metas)

    def __attrs_post_init__(self) -> None:
        num_tokens = len(self.roi)
        if len(self.tokens) != TOKEN_BYTES * num_tokens:
            raise ValueError(f"an entry has {len(self.tokens)} bytes of tokens and a roi of {num_tokens}")
        if self.roi.translate(None, b"\0\1"):
            raise ValueError("the roi of an entry is not boolean")
        shapes = [part.shape for part in (self.key, self.value) if part is not None]
        if any(shape[1:2] != (num_tokens,) or shape[0] != shapes[0][0] for shape in shapes):
            raise ValueError(
                f"key and value must have the shape [num_layers, {num_tokens} tokens, ...], got"
                f" {' and '.join(str(list(shape)) for shape in shapes)}"
            )
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"an entry has {self.num_layers} layers; at most {MAX_LAYERS} are allowed")

    @property
    def num_layers(self) -> int:
        """Number of layers of key and value; 0 if there is neither."""
        part = self.key or self.value
        return 0 if part is None else part.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that count against a store's budget: tokens, roi and tensors."""
        parts = sum(part.nbytes for part in (self.key, self.value, self.hidden) if part is not None)
        return len(self.tokens) + len(self.roi) + parts

    def ids(self) -> bytes:
        """The token ids under the roi, by which the entry is found."""
        if b"\0" not in self.roi:
            return self.tokens
        ids = np.frombuffer(self.tokens, "<i8")[np.frombuffer(self.roi, np.bool_)]
        return _id_bytes(ids)

    @NamedExhaustion("copying an entry")
    def header(self, entry_id: int) -> Entry.Header:
        """A header in new memory.

        Raises:
            WireError: the metadata is not that of an entry.
            ResourceExhaustedError: there is not enough memory.
        """
        metadata = decode(self.metadata)
        if not isinstance(metadata, dict):
            raise WireError(f"the metadata of an entry must be a dict, not {type(metadata).__name__}")
        return Entry.Header(
            entry_id=entry_id,
            tokens=torch.from_numpy(np.frombuffer(self.tokens, "<i8").astype(np.int64)),
            roi=torch.from_numpy(np.frombuffer(self.roi, np.bool_).copy()),
            num_layers=self.num_layers,
            metadata=metadata,
        )


def entry_of(
    header: Entry.Header, key: Tensor | None = None, value: Tensor | None = None, hidden: Tensor | None = None
) -> Entry:
    return Entry(header=header, tokens=header.tokens, roi=header.roi, key=key, value=value, hidden=hidden)


def layers_of(
    key: Iterable[Tensor] | None, value: Iterable[Tensor] | None
) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Yield key and value layer by layer."""
    if key is not None and value is not None:
        yield from zip(key, value, strict=True)
    elif key is not None:
        yield from ((layer, None) for layer in key)
    elif value is not None:
        yield from ((None, layer) for layer in value)


def tensors_of(
    key: Iterable[Tensor] | None, value: Iterable[Tensor] | None, hidden: Tensor | None
) -> Iterator[Tensor]:
    """Yield the tensors of an entry in the order of the data pipe."""
    for layer in layers_of(key, value):
        yield from (part for part in layer if part is not None)
    if hidden is not None:
        yield hidden


# -- what callers pass -----------------------------------------------------------------------------


def ids_under(tokens: Any, roi: Any) -> bytes:
    """The key of an entry or a query: its token ids under the roi.

    Raises:
        UnsupportedError: the ids are not integers of 64 bits, or the roi is not boolean.
        ValueError: the ids are not one-dimensional, or the roi is not as long.
    """
    found = token_array(tokens)
    return _id_bytes(found if roi is None else found[_mask(roi, found.size)])


def extra_bytes(extra: Any) -> bytes:
    """Convert ``extra``, the part of the key besides the tokens, to bytes.

    Raises:
        UnsupportedError: it is not bytes. (``bytes`` of an int would be zeros.)
    """
    try:
        return bytes(memoryview(extra))
    except TypeError as e:
        raise UnsupportedError(f"extra must be bytes, not {type(extra).__name__}") from e


def token_array(tokens: Any) -> np.ndarray[Any, Any]:
    """Convert a sequence of ints, an integer array or a tensor to a 1-d integer array of token ids.

    May share memory. Nothing is rounded: floats and bools are refused.

    Raises:
        UnsupportedError: the ids are not integers of 64 bits.
        ValueError: the ids are not one-dimensional.
    """
    if isinstance(tokens, Tensor):
        if tokens.is_floating_point() or tokens.is_complex():
            raise UnsupportedError(f"token ids must be integers, got a tensor of {tokens.dtype}")
        tokens = tokens.numpy(force=True)
    try:
        found = np.asarray(tokens)
    except (ValueError, OverflowError) as e:
        raise UnsupportedError(f"token ids must be a sequence of integers: {e}") from e
    if found.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional, got shape {found.shape}")
    if found.size == 0 and found is not tokens:  # numpy takes an empty list for floats
        return np.empty(0, np.int64)
    if found.dtype.kind not in "iu" or (found.dtype == np.uint64 and found.max(initial=0) > sys.maxsize):
        raise UnsupportedError(f"token ids must be 64-bit integers, got {found.dtype}")
    return found


def _id_bytes(ids: np.ndarray[Any, Any]) -> bytes:
    data: bytes = ids.astype("<i8", copy=False).tobytes()
    return data


def _mask(roi: Any, num_tokens: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Convert a region of interest to a bool array.

    Raises:
        UnsupportedError: the roi is not boolean.
        ValueError: the roi is not as long as the tokens.
    """
    mask = roi.numpy(force=True) if isinstance(roi, Tensor) else np.asarray(roi)
    if mask.size and mask.dtype != np.bool_:
        raise UnsupportedError(f"a roi must be boolean, not {mask.dtype}")
    if mask.shape != (num_tokens,):
        raise ValueError(f"a roi of shape {mask.shape} does not fit {num_tokens} tokens")
    return mask.astype(np.bool_, copy=False)


@NamedExhaustion("copying an entry")
def copy_of(part: Tensor | None, device: torch.device) -> Tensor | None:
    """Copy a part to ``device``, contiguous and bit by bit.

    Raises:
        ResourceExhaustedError: there is not enough memory.
    """
    if part is None:
        return None
    source = part.detach().resolve_conj().resolve_neg()
    copy = torch.empty(source.shape, dtype=source.dtype, device=device)
    as_bits(copy).copy_(as_bits(source))  # some dtypes have no kernels to copy them
    return copy
