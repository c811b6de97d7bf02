"""The format of a page: which bytes it consists of, and in which order.

A page holds the KV of consecutive tokens of one worker's shard, with the layers of all KV cache groups. Its
bytes are layer after layer; a layer is part after part (keys, values, or what the model has instead); each
part is one dense tensor."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any, Final

import attrs

from kvplug.errors import LayoutError
from kvplug.net.wire import from_plain, to_plain
from kvplug.net.wire.tensors import DTYPES

VERSION: Final = 1
"""Of the order of a page's bytes. It is part of the key, so pages of another version are misses."""
DIGEST_BYTES: Final = 16
MAX_PARTS: Final = 64


def _shape(given: Any) -> tuple[int, ...]:
    return tuple(given)


@attrs.frozen(kw_only=True)
class Part:
    """One tensor of each layer of a page.

    Raises:
        LayoutError: a size is not positive, or an axis is none of the shape's.
    """

    name: str
    """"key", "value", "latent", "block" or another word; different for each part of a format."""
    dtype: str
    """torch's name, without ``torch.``."""
    shape: tuple[int, ...] = attrs.field(converter=_shape)
    """Of one layer of one page, for example ``(page_tokens, num_kv_heads, head_size)``."""
    token_axis: int | None = 0
    """The axis of the tokens; ``None``: the order inside is an attention kernel's own."""
    head_axis: int | None = None
    """The axis of the heads; ``None``: there is none, or the order inside is a kernel's own."""

    def __attrs_post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise LayoutError(f"{self.dtype!r} is no dtype of a page's part; these are: {', '.join(DTYPES)}")
        if not self.shape or not all(type(size) is int and size > 0 for size in self.shape):
            raise LayoutError(f"part {self.name!r} of a page: its shape is {self.shape!r}")
        for axis in (self.token_axis, self.head_axis):
            if axis is not None and not 0 <= axis < len(self.shape):
                raise LayoutError(f"part {self.name!r} of a page: {self.shape!r} has no axis {axis}")

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of one layer of one page."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


def _parts(given: Any) -> tuple[Part, ...]:
    return tuple(given)


@attrs.frozen(kw_only=True)
class PageFormat:
    """The format of pages. Two engines share pages only if their formats are equal.

    >>> key = Part(name="key", dtype="float16", shape=(16, 8, 64), head_axis=1)
    >>> form = PageFormat(page_tokens=16, num_layers=4, parts=(key, attrs.evolve(key, name="value")))
    >>> form.layer_nbytes, form.nbytes
    (32768, 131072)

    Raises:
        LayoutError: no part, a name twice, or a size that is not positive.
    """

    page_tokens: int
    """Tokens in a page; 0 for pages that hold something else (opaque bytes under a foreign key)."""
    num_layers: int
    """Layers in a page."""
    parts: tuple[Part, ...] = attrs.field(converter=_parts)
    """The tensors of each layer, in the order of their bytes."""
    block_format: str = ""
    """The attention kernel whose own order the parts have; empty: the axes say all."""
    version: int = VERSION
    """Of the format itself; pages of another one are misses."""

    def __attrs_post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if not 0 < len(names) <= MAX_PARTS or len(set(names)) != len(names):
            raise LayoutError(f"a page has 1 to {MAX_PARTS} parts, each with its own name; got {names}")
        if type(self.num_layers) is not int or self.num_layers < 1 or self.page_tokens < 0:
            raise LayoutError(f"a page of {self.page_tokens} tokens and {self.num_layers} layers")

    @functools.cached_property
    def layer_nbytes(self) -> int:
        """Bytes of one layer of one page."""
        return sum(part.nbytes for part in self.parts)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of one page, without its header."""
        return self.num_layers * self.layer_nbytes

    @functools.cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First byte and number of bytes of each part in a layer."""
        ends = [0]
        for part in self.parts:
            ends.append(ends[-1] + part.nbytes)
        return tuple((ends[i], part.nbytes) for i, part in enumerate(self.parts))

    @functools.cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal exactly for equal formats."""
        text = json.dumps(self.to_plain(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"kvplug format").digest()

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for the wire."""
        return dict(to_plain(self))

    @classmethod
    def from_plain(cls, plain: Any) -> PageFormat:
        """The format that :meth:`to_plain` described. Keys of a newer version are passed over.

        Raises:
            LayoutError: a field of the format is missing or wrong; names it.
        """
        return from_plain(plain, cls, "format of pages", LayoutError)

    def differences(self, theirs: PageFormat) -> tuple[str, ...]:
        """The fields that differ, one sentence each; empty if the formats are equal.

        >>> key = Part(name="key", dtype="float16", shape=(16, 8, 64))
        >>> ours = PageFormat(page_tokens=16, num_layers=4, parts=(key,))
        >>> ours.differences(attrs.evolve(ours, num_layers=5))
        ('num_layers: ours 4, theirs 5',)
        """
        names = [field.name for field in attrs.fields(PageFormat) if field.name != "parts"]
        pairs = ((name, getattr(self, name), getattr(theirs, name)) for name in names)
        found = [f"{name}: ours {ours!r}, theirs {other!r}" for name, ours, other in pairs if ours != other]
        if self.parts != theirs.parts:
            found.append(f"parts: ours {_listed(self.parts)}, theirs {_listed(theirs.parts)}")
        return tuple(found)


def opaque_format(nbytes: int) -> PageFormat:
    """The format of pages that are ``nbytes`` opaque bytes each: for engines with keys of their own.

    >>> opaque_format(4096).nbytes
    4096
    """
    return PageFormat(
        page_tokens=0,
        num_layers=1,
        parts=(Part(name="bytes", dtype="uint8", shape=(nbytes,), token_axis=None),),
    )


def pieces_format(sizes: Sequence[int]) -> PageFormat:
    """The format of pages that consist of opaque pieces with these lengths in bytes, one after the other.

    >>> pieces_format([8, 2]).nbytes
    10
    >>> many = pieces_format([8, 2] * 100)
    >>> many.num_layers, len(many.parts)
    (4, 50)

    Raises:
        LayoutError: there is no piece, or more than 64 without a pattern that repeats and covers all.
    """
    sizes = tuple(sizes)
    if len(sizes) == 1:
        return opaque_format(*sizes)
    for num_layers in range(1, len(sizes) + 1):
        step = len(sizes) // num_layers
        if len(sizes) % num_layers == 0 and step <= MAX_PARTS and sizes == sizes[:step] * num_layers:
            parts = (
                Part(name=f"piece{index}", dtype="uint8", shape=(nbytes,), token_axis=None)
                for index, nbytes in enumerate(sizes[:step])
            )
            return PageFormat(page_tokens=0, num_layers=num_layers, parts=tuple(parts))
    raise LayoutError(
        f"pages of {len(sizes)} pieces: allowed are 1 to {MAX_PARTS}, or more whose lengths repeat"
    )


def _listed(parts: tuple[Part, ...]) -> str:
    return ", ".join(f"{part.name} {part.dtype}{list(part.shape)}" for part in parts)
