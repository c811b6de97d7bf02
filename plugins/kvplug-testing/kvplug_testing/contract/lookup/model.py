"""The simplest model of a lookup buffer: a list that every query searches from its beginning."""

from __future__ import annotations

from kvplug_testing.contract.lookup.entries import Put

Query = tuple[int, ...]


class ReferenceModel:
    """The held entries, oldest first. It predicts which entries are found, not their bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[int, Put] = {}

    @property
    def is_full(self) -> bool:
        return len(self.held) >= self.capacity

    def oldest(self, query: Query | None, extra: bytes) -> int | None:
        """The entry that ``drop_select`` returns."""
        for entry_id, put in self.held.items():
            if put.extra == extra and (query is None or _is_prefix(query, put.counts)):
                return entry_id
        return None

    def match(self, query: Query, extra: bytes) -> int:
        return max((shared(query, put.counts) for put in self.held.values() if put.extra == extra), default=0)

    def longest(self, query: Query, extra: bytes, min_tokens: int) -> set[int]:
        """The entries that ``select`` may read: all those that share the longest prefix."""
        longest = self.match(query, extra)
        if longest < min_tokens:
            return set()
        return {
            entry_id
            for entry_id, put in self.held.items()
            if put.extra == extra and shared(query, put.counts) == longest
        }


def shared(one: Query, other: Query) -> int:
    """Length of the common prefix."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _is_prefix(one: Query, other: Query) -> bool:
    """Whether one of them is a prefix of the other, and not empty."""
    return shared(one, other) == min(len(one), len(other)) > 0
