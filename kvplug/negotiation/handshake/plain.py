"""Reads a peer's plain values: bounded, with every fault and the name of its field.

The peer has proved its identity, but may run another version, or be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from kvplug.errors import HandshakeError

T = TypeVar("T")

MAX_TEXT = 1000
"""Characters of any text in a Hello."""
MAX_LIST = 64
"""Elements of any list or mapping in a Hello."""
_SAID_ALREADY = object()
_MAX_INT = (1 << 63) - 1


class FieldReader:
    """Reads one received mapping. A missing or malformed field is added to ``faults``, and a default
    returned.

    Keys that are not read are ignored: a newer minor version may have added them.
    """

    def __init__(self, plain: object, where: str = "", faults: list[str] | None = None) -> None:
        self.faults: list[str] = [] if faults is None else faults
        self._where = where
        self._absent = type(plain) is not dict
        self._plain: dict[Any, Any] = plain if isinstance(plain, dict) else {}
        if self._absent and plain is not _SAID_ALREADY:
            self._fault(where.rstrip(".") or "hello", plain, "a mapping")

    def fault(self, key: str, found: object, wanted: str) -> None:
        """Note what was found under ``key`` and what it must be."""
        self._fault(f"{self._where}{key}", found, wanted)

    def _fault(self, field: str, found: object, wanted: str) -> None:
        self.faults.append(f"{field}: the peer sent {_short(found)}, and it must be {wanted}")

    def is_set(self, key: str) -> bool:
        """Whether there is anything under ``key`` but ``None``."""
        return self._plain.get(key) is not None

    def _take(self, key: str, kind: type, fits: Callable[[Any], bool], wanted: str, default: T) -> T:
        field = f"{self._where}{key}"
        if self._absent:
            return default  # one fault is enough
        if key not in self._plain:
            self.faults.append(f"{field}: the peer did not send it, and it must be {wanted}")
            return default
        value = self._plain[key]
        fine = type(value) is kind and fits(value)
        if not fine:
            self._fault(field, value, wanted)
            return default
        return value  # type: ignore[no-any-return]

    def text(self, key: str) -> str:
        wanted = f"up to {MAX_TEXT} printable characters"
        return self._take(key, str, _is_short_text, wanted, "")

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        return self._take(key, str, lambda v: v in choices, f"one of {', '.join(choices)}", default)

    def integer(self, key: str, low: int = 0, high: int = _MAX_INT) -> int:
        return self._take(key, int, lambda v: low <= v <= high, f"an integer from {low} to {high}", low)

    def boolean(self, key: str) -> bool:
        return self._take(key, bool, lambda v: True, "true or false", False)

    def positive(self, key: str) -> float:
        """A float above zero and finite."""
        return self._take(key, float, lambda v: math.isfinite(v) and v > 0, "a number above 0", 1.0)

    def optional_integer(self, key: str, low: int = 0) -> int | None:
        return self.integer(key, low) if self.is_set(key) else None

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(self._take(key, list, _is_short_texts, f"a list of up to {MAX_LIST} short texts", []))

    def integers(self, key: str, count: int) -> tuple[int, ...]:
        """Exactly ``count`` integers of 0 or more."""
        found: list[int] = self._take(
            key,
            list,
            lambda v: len(v) == count and all(type(i) is int and 0 <= i <= _MAX_INT for i in v),
            f"a list of {count} integers of 0 or more",
            [0] * count,
        )
        return tuple(found)

    def mapping_of_texts(self, key: str) -> dict[str, str]:
        return self._take(
            key,
            dict,
            lambda v: _is_short_texts(list(v)) and _is_short_texts(list(v.values())),
            f"a mapping of up to {MAX_LIST} short texts",
            {},
        )

    def each(self, key: str, read: Callable[[FieldReader], T]) -> tuple[T, ...]:
        """``read`` applied to each mapping of a list."""
        wanted = f"a list of up to {MAX_LIST} mappings"
        items: list[Any] = self._take(key, list, lambda v: len(v) <= MAX_LIST, wanted, [])
        return tuple(
            read(FieldReader(item, f"{self._where}{key}[{i}].", self.faults)) for i, item in enumerate(items)
        )

    def part(self, key: str) -> FieldReader:
        """The mapping under ``key``."""
        inner = _SAID_ALREADY if self._absent else self._plain.get(key)
        return FieldReader(inner, f"{self._where}{key}.", self.faults)

    def check(self) -> None:
        """Raise for what was found wrong.

        Raises:
            HandshakeError: with every fault.
        """
        if self.faults:
            raise HandshakeError(*self.faults)


def is_same(theirs: object, ours: object) -> bool:
    """Whether a peer sent what it should. It may send an array, whose ``==`` gives no truth value."""
    if type(theirs) is not type(ours):
        return False
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return theirs.keys() == ours.keys() and all(is_same(theirs[key], ours[key]) for key in ours)
    return theirs == ours


def _is_short_texts(values: list[Any]) -> bool:
    return len(values) <= MAX_LIST and all(type(v) is str and _is_short_text(v) for v in values)


def _is_short_text(value: str) -> bool:
    return len(value) <= MAX_TEXT and value.isprintable()


def _short(value: object) -> str:
    """Enough of a value to recognise it, without writing a peer's free text into the log."""
    if isinstance(value, str | bytes):
        return ascii(value[:40]) + ("…" if len(value) > 40 else "")
    if value is None or isinstance(value, bool | int | float):
        return ascii(value)
    return f"a {type(value).__name__}"
