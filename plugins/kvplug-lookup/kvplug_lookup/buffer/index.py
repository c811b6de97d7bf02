"""An exact index of a store's entries by their token ids: a radix tree of bytes.

It knows entry ids and keys, but no tensors. It has no lock: its owner has one.

There is one tree per ``extra``. An edge carries a run of token ids; a node lies where keys diverge or end. A
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

import numpy as np

from kvplug_lookup.buffer.entry import TOKEN_BYTES

_NONE = sys.maxsize
"""Larger than any id: the ``oldest`` of a node without free entries below."""


class TokenIndex:
    """Entry ids by (extra, token ids). Ids of tokens are compared exactly. Smaller entry ids are older."""

    def __init__(self) -> None:
        self._roots: dict[bytes, _Node] = {}
        self._nodes: dict[int, _Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def insert(self, entry_id: int, key: bytes, extra: bytes = b"") -> None:
        """Add an entry, whose id is new and whose key is not empty."""
        node, below, done = _walk(self._roots.setdefault(extra, _Node(label=extra)), key)
        if below is not None:
            node = _split(below, _common(below.label, key[done:]))
            done += len(node.label)
        if done < len(key):
            node = _Node(key[done:], node)
        bisect.insort(node.free, entry_id)
        self._nodes[entry_id] = node
        _settle(node)

    def remove(self, entry_id: int) -> None:
        """Remove an entry."""
        node = self._nodes.pop(entry_id)
        if entry_id in node.suspended:
            node.suspended.discard(entry_id)
        else:
            node.free.remove(entry_id)
            _settle(node)
        self._prune(node)

    def suspend(self, entry_id: int) -> None:
        """Note that the entry is being read: it stays, and no call may take it. Idempotent."""
        node = self._nodes[entry_id]
        if entry_id not in node.suspended:
            node.free.remove(entry_id)
            node.suspended.add(entry_id)
            _settle(node)

    def resume(self, entry_id: int) -> None:
        """Note that the entry is no longer being read. Idempotent."""
        node = self._nodes[entry_id]
        if entry_id in node.suspended:
            node.suspended.discard(entry_id)
            bisect.insort(node.free, entry_id)
            _settle(node)

    def match(self, key: bytes, extra: bytes = b"") -> int:
        """The number of tokens in the longest prefix that the query shares with some entry."""
        return self._deepest(key, extra)[1] // TOKEN_BYTES

    def longest_match(self, key: bytes, extra: bytes = b"", min_tokens: int = 1) -> int | None:
        """An entry that shares the longest prefix with the query, if that has ``min_tokens``, at least 1.

        Prefers the oldest free entry; if none is free, returns a suspended one.
        """
        node, done = self._deepest(key, extra)
        if node is None or done < TOKEN_BYTES * max(1, min_tokens):
            return None
        if node.oldest != _NONE:
            return node.oldest
        while not node.suspended:
            node = next(iter(node.children.values()))
        return next(iter(node.suspended))

    def oldest_match(self, key: bytes | None, extra: bytes = b"") -> int | None:
        """The oldest free entry that starts with the query, or that the query starts with.

        ``None`` matches any entry, and ``b""`` matches none.
        """
        root = self._roots.get(extra)
        if root is None or key == b"":
            return None
        key = key or b""
        node, below, done = _walk(root, key)
        rest, best = key[done:], _NONE
        if not rest:
            best = node.oldest
        elif below is not None and below.label.startswith(rest):
            best = below.oldest
        above: _Node | None = node
        while above is not None:
            if above.free:
                best = min(best, above.free[0])
            above = above.parent
        return None if best == _NONE else best

    def _deepest(self, key: bytes, extra: bytes) -> tuple[_Node | None, int]:
        """The node at or below the longest shared prefix, and the length of that prefix in bytes."""
        root = self._roots.get(extra)
        if root is None:
            return None, 0
        node, below, done = _walk(root, key)
        return (node, done) if below is None else (below, done + _common(below.label, key[done:]))

    def _prune(self, node: _Node) -> None:
        """Remove nodes that no entry needs: an empty leaf, then a node with a single child."""
        parent = node.parent
        if parent is not None and node.is_empty and not node.children:
            del parent.children[node.first]
            node, parent = parent, parent.parent
        if not node.is_empty:
            return
        if parent is None:
            if not node.children:
                del self._roots[node.label]
        elif len(node.children) == 1:
            (child,) = node.children.values()
            child.label = node.label + child.label
            child.parent = parent
            parent.children[child.first] = child


class _Node:
    """A place in a tree where keys diverge or end. ``label`` is the run of token ids that leads here; the
    label of a root is the tree's ``extra``."""

    __slots__ = ("ages", "children", "free", "label", "oldest", "parent", "suspended")

    def __init__(self, label: bytes, parent: _Node | None = None) -> None:
        self.label = label
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        """By their first token."""
        self.free: list[int] = []
        """Ids of entries that end here and may be taken, oldest first."""
        self.suspended: set[int] = set()
        self.ages: list[tuple[int, bytes]] = []
        """Heap of (a child's ``oldest``, the child's first token); may hold stale elements."""
        self.oldest = _NONE
        """The oldest free entry here or below."""
        if parent is not None:
            parent.children[self.first] = self

    @property
    def first(self) -> bytes:
        return self.label[:TOKEN_BYTES]

    @property
    def is_empty(self) -> bool:
        """Whether no entry ends here."""
        return not self.free and not self.suspended


def _walk(root: _Node, query: bytes) -> tuple[_Node, _Node | None, int]:
    """Go down while whole edges equal the query. Return the node reached, the next child, and the depth.

    The next child is the one whose edge continues the query by at least one token, but diverges from it or
    outlasts it; ``None`` if there is none.
    """
    node, done = root, 0
    while (child := node.children.get(query[done : done + TOKEN_BYTES])) is not None:
        if not query.startswith(child.label, done):
            break
        node, done = child, done + len(child.label)
    return node, child, done


def _common(one: bytes, other: bytes) -> int:
    """Length of the common prefix in bytes, of whole tokens."""
    size = min(len(one), len(other)) // TOKEN_BYTES
    differ = np.frombuffer(one, np.int64, size) != np.frombuffer(other, np.int64, size)
    first = int(differ.argmax()) if size else 0
    return TOKEN_BYTES * (first if size and differ[first] else size)


def _split(lower: _Node, at: int) -> _Node:
    """Put a node after ``at`` bytes of the edge that leads to ``lower``."""
    upper = _Node(lower.label[:at], lower.parent)
    lower.label, lower.parent = lower.label[at:], upper
    upper.children[lower.first] = lower
    upper.oldest = lower.oldest
    if lower.oldest != _NONE:
        upper.ages.append((lower.oldest, lower.first))
    return upper


def _settle(node: _Node) -> None:
    """Update ``oldest`` after a change of ``node.free``, here and in the ancestors that it affects."""
    while True:
        before, node.oldest = node.oldest, _oldest_of(node)
        parent = node.parent
        if parent is None or node.oldest == before:
            return
        if node.oldest != _NONE:
            heapq.heappush(parent.ages, (node.oldest, node.first))
            if len(parent.ages) > 2 * len(parent.children) + 8:
                children = parent.children.items()
                parent.ages = [(child.oldest, first) for first, child in children if child.oldest != _NONE]
                heapq.heapify(parent.ages)
        node = parent


def _oldest_of(node: _Node) -> int:
    ages = node.ages
    while ages:
        oldest, first = ages[0]
        child = node.children.get(first)
        if child is not None and child.oldest == oldest:
            break
        heapq.heappop(ages)
    return min(node.free[:1] + [age for age, _ in ages[:1]], default=_NONE)
