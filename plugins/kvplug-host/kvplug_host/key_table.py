"""A dict by page key without slow calls: a large dict takes milliseconds to grow or to be copied."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

T = TypeVar("T")

_PARTS: Final = 256


class KeyTable(Generic[T]):
    """Values by page key, in 256 dicts. Keys are hashes, so the dicts are about equally large.

    Not thread-safe: its owner locks it.
    """

    def __init__(self) -> None:
        self.parts: list[dict[bytes, T]] = [{} for _ in range(_PARTS)]
        """A key is in the dict whose number is the key's first byte."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: bytes) -> bool:
        return key in self.parts[key[0]]

    def get(self, key: bytes) -> T | None:
        """The value of a key, or ``None``."""
        return self.parts[key[0]].get(key)

    def add(self, key: bytes, value: T) -> None:
        """Add a key that the table does not have."""
        self.parts[key[0]][key] = value
        self._count += 1

    def pop(self, key: bytes) -> T | None:
        """Remove a key. Returns its value, or ``None`` if the table did not have it."""
        value = self.parts[key[0]].pop(key, None)
        if value is not None:
            self._count -= 1
        return value

    def copy_from(self, number: int, least: int) -> tuple[dict[bytes, T], int]:
        """Copy the dicts from this number on, until the copy has ``least`` keys.

        Returns the copy, and the number of the first dict that is not in it: 256 after the last.
        """
        found: dict[bytes, T] = {}
        while number < _PARTS and len(found) < least:
            found.update(self.parts[number])
            number += 1
        return found, number

    @staticmethod
    def has_more(number: int) -> bool:
        """Whether :meth:`copy_from` has not copied all dicts yet, if it returned this number."""
        return number < _PARTS
