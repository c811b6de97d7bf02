"""Keys of pages. A key has 32 bytes, and identifies everything that a page's KV is computed from.

The *chain* of a page is a hash over the model, the request's extra bytes, and every token up to the page's
end: it hashes the previous page's chain and the page's own tokens. So equal prefixes have equal chains, and
the chains of a prompt are computed once for any number of workers.

The *series* of a worker's pages is (page format, shard). A page's key is its chain XOR the mask of the
series. The mask is a hash, so keys of different series differ. A process that knows the series can recover
the chain from the key, so an index of keys can be searched for chains.

Engines that have keys of their own instead of tokens use :func:`foreign_key`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs

from kvplug.errors import LayoutError
from kvplug.net.wire.token_ids import TOKEN_BYTES, pack_tokens
from kvplug.transport.store.format import PageFormat

KEY_BYTES: Final = 32
"""Bytes of a chain and of a key."""
_RUN: Final = 16
"""Pages in one entry of the memo; several, since each entry costs a dozen cold cache lines."""

# blake2b has a field for the purpose of a hash, so that hashes for different purposes never collide.
_hash = functools.partial(hashlib.blake2b, digest_size=KEY_BYTES)
_ROOT: Final = b"kvplug root"
_PAGE: Final = b"kvplug page"
_MASK: Final = b"kvplug mask"
_FOREIGN: Final = b"kvplug foreign"


def _hash_in(namespace: bytes, name: bytes, purpose: bytes) -> bytes:
    """Return the hash of a name in a namespace. The namespace's length is hashed too, so that moving bytes
    from one of them to the other changes the hash."""
    hashed = _hash(len(namespace).to_bytes(8, "little"), person=purpose)
    hashed.update(namespace)
    hashed.update(name)
    return hashed.digest()


class ChainMemo:
    """Computes chains, and remembers recent ones, so that repeated pages are not hashed again.

    It remembers runs of up to 16 pages. The previous chain and all tokens of a run identify it, so that runs
    cannot be confused. Not thread-safe.

    Args:
        max_pages: when the memo has this many pages, it forgets the older half. A page of 16 tokens takes
            about 200 bytes.
    """

    def __init__(self, max_pages: int = 1 << 16) -> None:
        self._half = max(1, max_pages // 2)
        self._young: dict[bytes, tuple[bytes, ...]] = {}
        self._old: dict[bytes, tuple[bytes, ...]] = {}
        self._num_young = 0

    def __len__(self) -> int:
        """Return how many pages the memo remembers."""
        return sum(map(len, self._young.values())) + sum(map(len, self._old.values()))

    @staticmethod
    def root(namespace: bytes, extra: bytes = b"") -> bytes:
        """Return the chain before the first page.

        Args:
            namespace: all that determines the KV besides tokens and ``extra``: the model, its weights,
                static scales.
            extra: opaque bytes that the engine adds for this request: adapter, media, cache salt.
        """
        return _hash_in(namespace, extra, _ROOT)

    @staticmethod
    def next_chain(parent: bytes, packed_tokens: bytes) -> bytes:
        """Return the chain of a page of these tokens (int32, little-endian) after the chain ``parent``."""
        return _hash(parent + packed_tokens, person=_PAGE).digest()

    def chains_of(
        self,
        root: bytes,
        token_ids: Iterable[int],
        page_tokens: int,
        known: Sequence[bytes] = (),
    ) -> list[bytes]:
        """Return the chains of all whole pages of a sequence of tokens.

        >>> memo, root = ChainMemo(), ChainMemo.root(b"model")
        >>> short, long = memo.chains_of(root, range(4), 2), memo.chains_of(root, range(7), 2)
        >>> len(short), len(long), short == long[:2]
        (2, 3, True)

        Args:
            root: the chain from :meth:`root`.
            token_ids: integers of 32 bits, or a buffer of them (an array, a numpy array).
            known: chains of the sequence's first pages, which are not computed again.
        """
        packed = pack_tokens(token_ids)
        step = page_tokens * TOKEN_BYTES
        found = list(known)
        parent = found[-1] if found else root
        self._extend(found, parent, packed[len(found) * step :], step)
        return found

    def _extend(self, chains: list[bytes], parent: bytes, packed_tokens: bytes, step: int) -> None:
        """Append the chains of all whole pages of ``step`` bytes after the chain ``parent``."""
        whole = len(packed_tokens) // step * step
        for begin in range(0, whole, _RUN * step):
            run = parent + packed_tokens[begin : min(begin + _RUN * step, whole)]
            found = self._young.get(run)
            if found is None:
                found = self._old.get(run) or _hashes(run, step)
                self._remember(run, found)
            chains += found
            parent = found[-1]

    def _remember(self, run: bytes, found: tuple[bytes, ...]) -> None:
        self._young[run] = found
        self._num_young += len(found)
        if self._num_young >= self._half:
            self._old, self._young, self._num_young = self._young, {}, 0


def _hashes(run: bytes, step: int) -> tuple[bytes, ...]:
    """Return the chains of the pages of a run, which begins with the previous chain."""
    begun = _hash(person=_PAGE).copy  # copying a hash object is faster than creating one
    chain, found = run[:KEY_BYTES], []
    for begin in range(KEY_BYTES, len(run), step):
        hashed = begun()
        hashed.update(chain + run[begin : begin + step])
        chain = hashed.digest()
        found.append(chain)
    return tuple(found)


@attrs.frozen
class Series:
    """The pages of one format and one shard of the heads and layers.

    >>> from kvplug.transport.store.format import opaque_format
    >>> series, chain = Series(opaque_format(64), b"rank 0 of 2"), ChainMemo.root(b"model")
    >>> series.key_of(series.key_of(chain)) == chain
    True
    """

    format: PageFormat
    """The format of the pages."""
    shard: bytes = b""
    """Which part of the model this worker holds; equal for workers whose pages are interchangeable."""
    seal: bytes = b""
    """:attr:`PageSeal.id` of the store, so that pages with other protection are misses."""
    _mask: int = attrs.field(init=False, eq=False, repr=False)
    id: bytes = attrs.field(init=False, eq=False)
    """16 bytes that identify the series."""

    def __attrs_post_init__(self) -> None:
        hashed = _hash(self.format.digest, person=_MASK)
        hashed.update(len(self.shard).to_bytes(8, "little") + self.shard)
        hashed.update(self.seal)
        digest = hashed.digest()
        object.__setattr__(self, "_mask", int.from_bytes(digest, "little"))
        object.__setattr__(self, "id", hashlib.blake2b(digest, digest_size=16, person=_MASK).digest())

    def key_of(self, chain: bytes) -> bytes:
        """Return the key of the page with this chain, or the chain of the page with this key."""
        return (int.from_bytes(chain, "little") ^ self._mask).to_bytes(KEY_BYTES, "little")

    def keys_of(self, chains: Iterable[bytes]) -> list[bytes]:
        """Return the keys of several chains."""
        mask = self._mask
        return [(int.from_bytes(each, "little") ^ mask).to_bytes(KEY_BYTES, "little") for each in chains]


def foreign_key(namespace: bytes, key: bytes) -> bytes:
    """Return the key of a page that an engine identifies by ``key``.

    ``namespace``: everything that determines the KV and is not in ``key``: the engine, model, revision,
    salt, adapter, dtype.
    """
    return _hash_in(namespace, key, _FOREIGN)


# -- identities --------------------------------------------------------------------------------


def token_identities(
    root: bytes, chains: Sequence[bytes], token_ids: Any, page_tokens: int, first: int = 0
) -> list[bytes]:
    """Return the identities of a sequence's pages from page ``first`` on, one for each chain.

    Args:
        chains: the chains of the sequence's pages, from its first page on.
        token_ids: the sequence's tokens, from its first token on.

    Raises:
        LayoutError: the pages have more tokens than were given.
    """
    packed = pack_tokens(itertools.islice(token_ids, len(chains) * page_tokens))
    step = page_tokens * TOKEN_BYTES
    if len(packed) < len(chains) * step:
        raise LayoutError(
            f"{len(chains)} pages of {page_tokens} tokens need more than {len(packed) // TOKEN_BYTES} tokens"
        )
    parents = [root, *chains]
    return [parents[at] + packed[at * step : (at + 1) * step] for at in range(first, len(chains))]
