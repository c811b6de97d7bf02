"""An exact index of a store's entries by their tokens: a radix tree, without torch.

It knows entry ids and tokens, but no tensors. It has no lock: its owner has one.

There is one tree per ``extra``. An edge carries a run of tokens; a node lies where keys diverge or end. A
look-up passes one node for each place where *some* held key diverges from the query, and its cost grows with
the length of the query. Each node tracks the oldest free entry below it with a heap of ``(oldest id below a
child, the child's first token)``. A heap element is stale if its id differs from its child's. Stale elements
are dropped when they reach the top, or all at once when they outnumber the children.

A *suspended* entry (one that is being read) still counts for the longest prefix, but is never an oldest
match: it cannot be taken.
"""

from __future__ import annotations

import bisect
import heapq
import sys
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from kvplug import UnsupportedError

TokenArray: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
"""Token ids, one-dimensional."""

_NOBODY = sys.maxsize
"""Larger than any id: the ``oldest`` of a node without free entries below."""


def token_array(tokens: Any) -> TokenArray:
    """Convert a sequence of ints, an integer array or a tensor to a 1-d int64 array of token ids.

    Shares memory with an int64 array or CPU tensor. Nothing is rounded: floats and bools are refused.

    Raises:
        UnsupportedError: the ids are not integers of 64 bits.
        ValueError: the ids are not one-dimensional.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tokens, torch.Tensor):
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype is torch.bool:
            raise UnsupportedError(f"token ids must be integers, got a tensor of {tokens.dtype}")
        found = tokens.detach().to("cpu").numpy()
    else:
        try:
            found = np.asarray(tokens)
        except (ValueError, OverflowError) as e:
            raise UnsupportedError(f"token ids must be a sequence of integers: {e}") from e
    if found.ndim != 1:
        raise ValueError(f"token ids must be one-dimensional, got shape {found.shape}")
    if found.size == 0 and not isinstance(tokens, np.ndarray):
        return np.empty(0, np.int64)
    if found.dtype.kind not in "iu" or (found.dtype == np.uint64 and found.max(initial=0) > 2**63 - 1):
        raise UnsupportedError(f"token ids must be 64-bit integers, got {found.dtype}")
    ids: TokenArray = np.ascontiguousarray(found, dtype=np.int64)
    return ids


class TokenIndex:
    """Entry ids by (extra, tokens). Token ids are compared as integers; hashes only find candidates.

    Smaller ids are older. ``tokens`` is anything that :func:`token_array` takes.
    """

    def __init__(self) -> None:
        self._roots: dict[bytes, _Node] = {}
        self._where: dict[int, _Node] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, entry_id: object) -> bool:
        return entry_id in self._where

    def __iter__(self) -> Iterator[int]:
        """The ids of all entries, in no particular order."""
        return iter(self._where)

    def insert(self, entry_id: int, tokens: Any, extra: bytes = b"") -> None:
        """Add an entry.

        Raises:
            ValueError: the id is in the index already, or there are no tokens.
        """
        if entry_id in self._where:
            raise ValueError(f"entry {entry_id} is in the index already")
        key = token_array(tokens)
        if not key.size:
            raise ValueError("an entry needs at least one token: it could not be found")
        root = self._roots.get(extra)
        if root is None:
            root = self._roots[extra] = _Node(extra=extra)
        node, inside, done = _walk(root, key)
        if inside is not None:
            node = _split(inside, _common(inside.label, key[done:]))
            done += node.label.size
        if done < key.size:
            node = _attach(node, key[done:].copy())
        bisect.insort(node.free, entry_id)
        self._where[entry_id] = node
        _settle(node)

    def remove(self, entry_id: int) -> bool:
        """Remove an entry. Return whether it was there."""
        node = self._where.pop(entry_id, None)
        if node is None:
            return False
        if entry_id in node.suspended:
            node.suspended.discard(entry_id)
        else:
            _take_out(node.free, entry_id)
            _settle(node)
        self._prune(node)
        return True

    def suspend(self, entry_id: int) -> None:
        """Note that the entry is being read: it stays, and no call may take it. Idempotent.

        Raises:
            KeyError: there is no such entry.
        """
        node = self._where[entry_id]
        if entry_id not in node.suspended:
            _take_out(node.free, entry_id)
            node.suspended.add(entry_id)
            _settle(node)

    def resume(self, entry_id: int) -> None:
        """Note that the entry is no longer being read. Idempotent; an unknown id is ignored."""
        node = self._where.get(entry_id)
        if node is not None and entry_id in node.suspended:
            node.suspended.discard(entry_id)
            bisect.insort(node.free, entry_id)
            _settle(node)

    def match(self, tokens: Any, extra: bytes = b"") -> int:
        """The length of the longest prefix that the query shares with some entry."""
        root = self._roots.get(extra)
        if root is None:
            return 0
        query = token_array(tokens)
        _, inside, done = _walk(root, query)
        return done if inside is None else done + _common(inside.label, query[done:])

    def longest_match(self, tokens: Any, extra: bytes = b"", min_tokens: int = 1) -> tuple[int, int] | None:
        """``(entry id, n)`` of an entry that shares the longest prefix, n tokens, with the query.

        Prefers the oldest free entry; if none is free, returns a suspended one. ``None`` if the longest
        prefix is shorter than ``min_tokens``, or empty.
        """
        root = self._roots.get(extra)
        if root is None:
            return None
        query = token_array(tokens)
        node, inside, done = _walk(root, query)
        if inside is not None:
            node, done = inside, done + _common(inside.label, query[done:])
        if done < max(1, min_tokens):
            return None
        return (node.oldest if node.oldest != _NOBODY else _anyone(node)), done

    def oldest_match(self, tokens: Any, extra: bytes = b"") -> int | None:
        """The oldest free entry that starts with the query, or that the query starts with."""
        root = self._roots.get(extra)
        if root is None:
            return None
        query = token_array(tokens)
        if not query.size:
            return None
        node, inside, done = _walk(root, query)
        below = node if inside is None else inside
        if inside is not None:
            done += _common(inside.label, query[done:])
        best = below.oldest if done == query.size else _NOBODY
        above: _Node | None = node
        while above is not None:
            if above.free:
                best = min(best, above.free[0])
            above = above.parent
        return None if best == _NOBODY else best

    def oldest(self, extra: bytes = b"") -> int | None:
        """The oldest free entry with this ``extra``."""
        root = self._roots.get(extra)
        return None if root is None or root.oldest == _NOBODY else root.oldest

    def clear(self) -> None:
        """Remove every entry."""
        self._roots.clear()
        self._where.clear()

    def _prune(self, node: _Node) -> None:
        """Remove nodes that no entry needs: an empty leaf, then a node with a single child."""
        if node.free or node.suspended:
            return
        parent = node.parent
        if parent is not None and not node.children:
            del parent.children[int(node.label[0])]
            node.parent = None
            node = parent
            parent = node.parent
        if node.free or node.suspended:
            return
        if parent is None:
            if not node.children:
                self._roots.pop(node.extra, None)
        elif len(node.children) == 1:
            (child,) = node.children.values()
            child.label = np.concatenate((node.label, child.label))
            child.parent = parent
            parent.children[int(node.label[0])] = child


class _Node:
    """A place in a tree where keys diverge or end. ``label`` is the run of tokens that leads here."""

    __slots__ = ("ages", "children", "extra", "free", "label", "oldest", "parent", "suspended")

    def __init__(
        self, label: TokenArray | None = None, parent: _Node | None = None, extra: bytes = b""
    ) -> None:
        self.label: TokenArray = np.empty(0, np.int64) if label is None else label
        self.parent = parent
        self.extra = extra
        """The key of the tree; only set in a root."""
        self.children: dict[int, _Node] = {}
        self.free: list[int] = []
        """Ids of entries that end here and may be taken, oldest first."""
        self.suspended: set[int] = set()
        self.ages: list[tuple[int, int]] = []
        """Heap of (a child's ``oldest``, the child's first token); may hold stale elements."""
        self.oldest = _NOBODY
        """The oldest free entry here or below."""


def _walk(root: _Node, query: TokenArray) -> tuple[_Node, _Node | None, int]:
    """Go down while whole edges equal the query. Return the node reached, the next child, and the depth.

    The next child is the one whose edge continues the query by at least one token, but diverges from it or
    outlasts it; ``None`` if there is none.
    """
    node, done, end = root, 0, query.size
    while done < end:
        child = node.children.get(int(query[done]))
        if child is None:
            break
        label = child.label
        stop = done + label.size
        if stop > end or not (query[done:stop] == label).all():
            return node, child, done
        node, done = child, stop
    return node, None, done


def _common(label: TokenArray, rest: TokenArray) -> int:
    """Length of the common prefix."""
    size = min(label.size, rest.size)
    differ = label[:size] != rest[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size


def _attach(parent: _Node, label: TokenArray) -> _Node:
    leaf = _Node(label, parent)
    parent.children[int(label[0])] = leaf
    return leaf


def _split(lower: _Node, at: int) -> _Node:
    """Put a node after ``at`` tokens of the edge that leads to ``lower``."""
    assert lower.parent is not None and 0 < at < lower.label.size
    # Copies, so that no piece of an edge keeps the memory of a whole prompt alive.
    upper = _Node(lower.label[:at].copy(), lower.parent)
    lower.parent.children[int(upper.label[0])] = upper
    lower.label = lower.label[at:].copy()
    lower.parent = upper
    upper.children[int(lower.label[0])] = lower
    upper.oldest = lower.oldest
    if lower.oldest != _NOBODY:
        upper.ages.append((lower.oldest, int(lower.label[0])))
    return upper


def _settle(node: _Node) -> None:
    """Update ``oldest`` after a change of ``node.free``, here and in the ancestors that it affects."""
    while True:
        before = node.oldest
        _crown(node)
        parent = node.parent
        if parent is None or node.oldest == before:
            return
        if node.oldest != _NOBODY:
            heapq.heappush(parent.ages, (node.oldest, int(node.label[0])))
            if len(parent.ages) > 2 * len(parent.children) + 8:
                by_token = parent.children.items()
                parent.ages = [(child.oldest, token) for token, child in by_token if child.oldest != _NOBODY]
                heapq.heapify(parent.ages)
        node = parent


def _crown(node: _Node) -> None:
    ages = node.ages
    while ages:
        oldest, token = ages[0]
        child = node.children.get(token)
        if child is not None and child.oldest == oldest:
            break
        heapq.heappop(ages)
    best = ages[0][0] if ages else _NOBODY
    node.oldest = min(best, node.free[0]) if node.free else best


def _anyone(node: _Node) -> int:
    """A suspended entry here or below, if none is free."""
    while not node.suspended:
        node = next(iter(node.children.values()))
    return next(iter(node.suspended))


def _take_out(ids: list[int], entry_id: int) -> None:
    del ids[bisect.bisect_left(ids, entry_id)]
