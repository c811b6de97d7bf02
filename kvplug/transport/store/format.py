"""The format of a page: its bytes and their order.

A page holds the KV of consecutive tokens in one worker's shard, for the layers of all KV cache groups. The
layers follow one another. Each layer consists of parts (keys, values, or what the model has instead), and
each part is one dense tensor."""

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
"""Version of the order of a page's bytes. It is part of the key, so pages of other versions are misses."""
DIGEST_BYTES: Final = 16
MAX_PARTS: Final = 64


def _shape(given: Any) -> tuple[int, ...]:
    return tuple(given)


@attrs.frozen(kw_only=True)
class Part:
    """One tensor of each layer of a page.

    Raises:
        LayoutError: the dtype is unknown, a size is not positive, or the shape lacks an axis.
    """

    name: str
    """"key", "value", "latent", "block" or another word; different for each part of a format."""
    dtype: str
    """torch's name, without ``torch.``."""
    shape: tuple[int, ...] = attrs.field(converter=_shape)
    """The shape in one layer of one page, such as ``(page_tokens, num_kv_heads, head_size)``."""
    token_axis: int | None = 0
    """The axis of the tokens, or ``None`` if an attention kernel defines the order inside the part."""
    head_axis: int | None = None
    """The axis of the heads, or ``None`` if the part has no heads or a kernel defines its order."""

    def __attrs_post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise LayoutError(f"a page's part cannot have the dtype {self.dtype!r}, only {', '.join(DTYPES)}")
        if not self.shape or not all(type(size) is int and size > 0 for size in self.shape):
            raise LayoutError(f"part {self.name!r} of a page has an invalid shape: {self.shape!r}")
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
        LayoutError: there are no parts or too many, a name occurs twice, or a size is not positive.
    """

    page_tokens: int
    """Tokens in a page; 0 for pages of opaque bytes under a foreign key."""
    num_layers: int
    """Layers in a page."""
    parts: tuple[Part, ...] = attrs.field(converter=_parts)
    """The tensors of each layer, in the order of their bytes."""
    block_format: str = ""
    """The attention kernel that defines the order inside the parts; empty if the axes describe it fully."""
    version: int = VERSION
    """The version of the format. Pages of another version are misses."""

    def __attrs_post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if not 0 < len(names) <= MAX_PARTS or len(set(names)) != len(names):
            raise LayoutError(f"a page has 1 to {MAX_PARTS} parts, each with its own name; got {names}")
        if type(self.num_layers) is not int or self.num_layers < 1 or self.page_tokens < 0:
            raise LayoutError(f"a page cannot have {self.page_tokens} tokens and {self.num_layers} layers")

    @functools.cached_property
    def layer_nbytes(self) -> int:
        """Bytes of one layer of one page."""
        return sum(part.nbytes for part in self.parts)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of one page without its header."""
        return self.num_layers * self.layer_nbytes

    @functools.cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The first byte and the number of bytes of each part in a layer."""
        ends = [0]
        for part in self.parts:
            ends.append(ends[-1] + part.nbytes)
        return tuple((ends[i], part.nbytes) for i, part in enumerate(self.parts))

    @functools.cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal if and only if the formats are equal."""
        text = json.dumps(self.to_plain(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"kvplug format").digest()

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for the wire."""
        return dict(to_plain(self))

    @classmethod
    def from_plain(cls, plain: Any) -> PageFormat:
        """Return the format that :meth:`to_plain` described. Ignores keys of a newer version.

        Raises:
            LayoutError: a field of the format is missing or wrong; the message names it.
        """
        return from_plain(plain, cls, "format of pages", LayoutError)

    def differences(self, theirs: PageFormat) -> tuple[str, ...]:
        """Return one sentence for each field that differs; empty if the formats are equal.

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
    """Return the format of pages of ``nbytes`` opaque bytes, for engines with keys of their own.

    >>> opaque_format(4096).nbytes
    4096
    """
    return PageFormat(
        page_tokens=0,
        num_layers=1,
        parts=(Part(name="bytes", dtype="uint8", shape=(nbytes,), token_axis=None),),
    )


def pieces_format(sizes: Sequence[int]) -> PageFormat:
    """Return the format of pages of consecutive opaque pieces with these lengths in bytes.

    >>> pieces_format([8, 2]).nbytes
    10
    >>> many = pieces_format([8, 2] * 100)
    >>> many.num_layers, len(many.parts)
    (4, 50)

    Raises:
        LayoutError: there are no pieces, or more than 64 whose lengths do not repeat in a pattern.
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
        f"a page cannot have {len(sizes)} pieces: 1 to {MAX_PARTS}, or more if their lengths repeat"
    )


def _listed(parts: tuple[Part, ...]) -> str:
    return ", ".join(f"{part.name} {part.dtype}{list(part.shape)}" for part in parts)
