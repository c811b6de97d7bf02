"""Pages with known bytes, requests for them, and the comparison of what came."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import attrs

from kvplug.engine import ChainMemo
from kvplug.kit import Part, foreign_key, opaque_format, token_identities
from kvplug.transport import (
    MissReason,
    PageBuffers,
    PageFormat,
    PageMemory,
    PageRequest,
    PageRows,
    PageSeal,
    Series,
)
from kvplug_testing import waits

KIB, MIB = 1 << 10, 1 << 20
FILL = 0xA5
"""What memory is filled with before pages are got into it."""


def kv_format(
    num_layers: int = 2, *, num_heads: int = 2, head_size: int = 8, dtype: str = "float16"
) -> PageFormat:
    """The format of keys and values. The default has pages of 512 bytes."""
    key = Part(name="key", dtype=dtype, shape=(4, num_heads, head_size), head_axis=1)
    return PageFormat(page_tokens=4, num_layers=num_layers, parts=(key, attrs.evolve(key, name="value")))


def sized_format(nbytes: int) -> PageFormat:
    """The format of opaque pages that are so many bytes long."""
    return opaque_format(nbytes)


def randbytes(seed: object, nbytes: int) -> bytes:
    """Bytes that are the same in every process."""
    return random.Random(repr(seed)).randbytes(nbytes)


@attrs.frozen(kw_only=True)
class Batch:
    """Pages of one series: keys, identities and bytes."""

    series: Series
    keys: tuple[bytes, ...]
    identities: tuple[bytes, ...]
    contents: tuple[bytes, ...] = attrs.field(repr=False)

    @property
    def form(self) -> PageFormat:
        return self.series.format

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, part: slice | Sequence[int]) -> Batch:
        """Some of the pages: a slice, or their numbers."""
        numbers = range(len(self))[part] if isinstance(part, slice) else part
        return attrs.evolve(
            self,
            keys=tuple(self.keys[at] for at in numbers),
            identities=tuple(self.identities[at] for at in numbers),
            contents=tuple(self.contents[at] for at in numbers),
        )

    def with_bits_of(self, seed: object) -> Batch:
        """The same pages with other bytes: what another writer computes for the same tokens."""
        contents = tuple(randbytes((seed, key), self.form.nbytes) for key in self.keys)
        return attrs.evolve(self, contents=contents)

    # -- requests ------------------------------------------------------------------------------

    def filled(self, memory: PageBuffers | None = None) -> PageRequest:
        """A request to put these pages, from ``memory`` or from new memory."""
        memory = memory or PageBuffers.empty(self.form, len(self))
        for index, content in enumerate(self.contents):
            memory.rows().row(index)[:] = content
        return self.request(memory)

    def empty(self) -> PageRequest:
        """A request to get these pages into new memory, which is filled with :data:`FILL`."""
        memory = PageBuffers.empty(self.form, len(self))
        memory.rows().buffer[:] = bytes([FILL]) * (len(self) * self.form.nbytes)
        return self.request(memory)

    def request(self, memory: PageMemory) -> PageRequest:
        return PageRequest(series=self.series, keys=self.keys, identities=self.identities, memory=memory)

    # -- what came -----------------------------------------------------------------------------

    def unlike(self, pages: PageRequest, results: Sequence[MissReason | None]) -> str:
        """How the pages that were got differ from these; empty if they do not. Misses do not count."""
        rows = pages.memory.rows()
        assert rows is not None
        for index, (content, reason) in enumerate(zip(self.contents, results, strict=True)):
            if reason is None and rows.row(index) != content:
                return f"page {index} of {len(self)} has other bytes than were put"
        return ""

    def page(self, index: int, seal: PageSeal) -> bytes:
        """Header and bytes of a page, as a store keeps them."""
        content = self.contents[index]
        return seal.header(self.series, self.identities[index], memoryview(content)) + content


def batch(
    count: int,
    form: PageFormat | None = None,
    *,
    seal: PageSeal,
    namespace: bytes | None = None,
    shard: bytes = b"",
) -> Batch:
    """The pages of one prompt.

    Args:
        seal: of the store.
        namespace: default: a new one, so that no other test has these keys.
    """
    form = form or kv_format()
    series = Series(form, shard, seal.id)
    namespace = uuid.uuid4().bytes if namespace is None else namespace
    if form.page_tokens:
        root, length = ChainMemo.root(namespace), form.page_tokens
        token_ids = range(count * length)
        chains = ChainMemo().chains_of(root, token_ids, length)
        keys = series.keys_of(chains)
        identities = token_identities(root, chains, token_ids, length)
    else:
        identities = [f"page {index}".encode() for index in range(count)]
        keys = [foreign_key(namespace + series.id, identity) for identity in identities]
    nothing = (b"",) * count
    pages = Batch(series=series, keys=tuple(keys), identities=tuple(identities), contents=nothing)
    return pages.with_bits_of("the writer")


def found(request: PageRequest) -> list[bytes]:
    """The bytes in the memory of a request, whose pages lie in rows, by page."""
    rows = request.memory.rows()
    assert rows is not None
    return [bytes(rows.row(index)) for index in range(len(rows))]


def strided(form: PageFormat, count: int, gap: int) -> PageBuffers:
    """Memory whose rows lie backwards, with ``gap`` bytes before each, all :data:`FILL`."""
    step = form.nbytes + gap
    buffer = memoryview(bytearray([FILL]) * (count * step))
    offsets = [gap + index * step for index in reversed(range(count))]
    return PageBuffers(form, PageRows(buffer, offsets, form.nbytes))


def outside(memory: PageBuffers) -> bytes:
    """The bytes of the memory that belong to no page."""
    rows = memory.rows()
    left = bytearray(rows.buffer)
    for offset in sorted(rows.offsets, reverse=True):
        del left[offset : offset + rows.nbytes]
    return bytes(left)


# -- memory whose copies can be held up ------------------------------------------------------------


HOLDS_UP_S = 60.0
"""How long a copy is held up at most."""


class HeldMemory(PageMemory):
    """Pages whose copies can be held up: a copy of page ``at`` waits until :attr:`go_on` is set.

    At the end of a ``with`` block it goes on.
    """

    def __init__(self, pages: PageMemory, at: int = 0) -> None:
        """``pages``: memory whose pages lie in rows."""
        assert isinstance(pages, PageBuffers)
        self.format: PageFormat = pages.format
        self.inner = pages
        self._at = at
        self.began, self.go_on = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()

    def wait_begun(self) -> None:
        """Wait until the copy is held up."""
        assert self.began.wait(waits.patience_s), "the copy of a page does not begin"

    def __len__(self) -> int:
        return len(self.inner)

    def places(self) -> Any:
        return self.inner.places()

    @contextmanager
    def hold(self, pages: range) -> Iterator[None]:
        if self._at in pages:
            self.began.set()
            self.go_on.wait(HOLDS_UP_S)
        yield


def held_request(pages: Batch, at: int = 0, *, filled: bool = False) -> tuple[PageRequest, HeldMemory]:
    """A request whose copy of one page is held up."""
    request = pages.filled() if filled else pages.empty()
    memory = HeldMemory(request.memory, at)
    return attrs.evolve(request, memory=memory), memory
