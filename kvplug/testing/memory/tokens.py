"""Token ids as plain ints, and entries found by them: a tree with one node for each token.

A look-up takes one step for each token of the query, however many entries there are.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator
from typing import Any

from kvplug.errors import UnsupportedError

Key = tuple[int, ...]
"""The token ids that count, those under the roi."""

_BOOLS = ("bool", "bool_")
"""What Python's and numpy's are called; numpy's by its version."""


def token_ids(tokens: Any) -> Key:
    """A sequence of ints, a 1-d integer tensor or a 1-d integer array, as Python's own ints.

    Raises:
        UnsupportedError: they are not integers of 64 bits.
        ValueError: they have not one dimension.
    """
    plain = _plain(tokens, "token ids")
    try:
        ids = tuple(operator.index(each) for each in plain)
    except TypeError as e:
        raise UnsupportedError(f"token ids must be integers: {e}") from e
    if any(isinstance(each, bool) for each in plain) or any(not -(1 << 63) <= each < 1 << 63 for each in ids):
        raise UnsupportedError("token ids must be integers of 64 bits")
    return ids


def roi_mask(roi: Any, num_tokens: int) -> tuple[bool, ...]:
    """A region of interest as bools; ``None`` is every token.

    Raises:
        UnsupportedError: it is not made of booleans.
        ValueError: it is not as long as the tokens.
    """
    if roi is None:
        return (True,) * num_tokens
    plain = _plain(roi, "a roi")
    if not all(type(each).__name__ in _BOOLS for each in plain):
        raise UnsupportedError("a roi is made of booleans")
    mask = tuple(map(bool, plain))
    if len(mask) != num_tokens:
        raise ValueError(f"a roi of {len(mask)} does not fit {num_tokens} tokens")
    return mask


def key_under(tokens: Any, roi: Any) -> Key:
    """The tokens that count."""
    ids = token_ids(tokens)
    return tuple(each for each, counts in zip(ids, roi_mask(roi, len(ids)), strict=True) if counts)


def extra_bytes(extra: Any) -> bytes:
    """What besides the tokens is the key.

    Raises:
        UnsupportedError: not bytes (an int would become so many zeros).
    """
    try:
        return bytes(memoryview(extra))
    except TypeError as e:
        raise UnsupportedError(f"extra must be bytes, not {type(extra).__name__}") from e


def _plain(given: Any, what: str) -> list[Any]:
    plain = given.tolist() if hasattr(given, "tolist") else list(given)
    if not isinstance(plain, list) or any(isinstance(each, list | tuple) for each in plain):
        raise ValueError(f"{what} must have one dimension")
    return plain


class TokenTree:
    """Entry ids by their tokens; a smaller id is an older entry.

    An entry that is *kept* (being read) can be found by its prefix, and cannot be taken.
    """

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, entry_id: int, key: Key) -> None:
        nodes = [self._root]
        for token in key:
            nodes.append(nodes[-1].children.setdefault(token, _Node()))
        for node in nodes:
            bisect.insort(node.held, entry_id)
        self.free(entry_id, key)

    def remove(self, entry_id: int, key: Key) -> None:
        self.keep(entry_id, key)
        for node in self._path(key):
            _take_out(node.held, entry_id)
        node = self._root
        for token in key:
            if not node.children[token].held:
                del node.children[token]
                return
            node = node.children[token]

    def keep(self, entry_id: int, key: Key) -> None:
        """Nobody may take it. Idempotent."""
        for node in self._path(key):
            _take_out(node.free, entry_id)
        _take_out(node.ending, entry_id)

    def free(self, entry_id: int, key: Key) -> None:
        """Whoever comes may take it. Idempotent."""
        self.keep(entry_id, key)
        for node in self._path(key):
            bisect.insort(node.free, entry_id)
        bisect.insort(node.ending, entry_id)

    def oldest(self) -> int | None:
        """The oldest that may be taken."""
        return self._root.free[0] if self._root.free else None

    def oldest_match(self, query: Key) -> int | None:
        """The oldest that may be taken, and is a prefix of the query or has the query as its prefix."""
        *above, last = path = list(self._path(query))
        matching = [node.ending[0] for node in above if node.ending]
        if 0 < len(query) < len(path):
            matching += last.free[:1]
        else:
            matching += last.ending[:1]
        return min(matching, default=None)

    def longest(self, query: Key) -> tuple[int, int | None]:
        """How many leading tokens of the query an entry has too, and the oldest of those that have."""
        *above, last = self._path(query)
        found = (last.free or last.held)[:1]
        return len(above), (found[0] if found else None)

    def _path(self, query: Key) -> Iterator[_Node]:
        """The root, and a node for each token of the query, as far as any entry goes along."""
        node: _Node | None = self._root
        tokens = iter(query)
        while node is not None:
            yield node
            token = next(tokens, None)
            node = None if token is None else node.children.get(token)


class _Node:
    """A prefix: who begins with it."""

    __slots__ = ("children", "ending", "free", "held")

    def __init__(self) -> None:
        self.children: dict[int, _Node] = {}
        self.held: list[int] = []
        """Ids of the entries that begin with this prefix, oldest first."""
        self.free: list[int] = []
        """Those of them that may be taken."""
        self.ending: list[int] = []
        """Those of these that end here."""


def _take_out(ids: list[int], entry_id: int) -> None:
    at = bisect.bisect_left(ids, entry_id)
    if at < len(ids) and ids[at] == entry_id:
        del ids[at]
