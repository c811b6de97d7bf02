"""Faults of configurations: the key, the value given, the values allowed, and the line that fixes it."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any, Final, Self

_LONGEST: Final = 60


class Fault(str):
    """One fault of a configuration: a sentence that names the key, and the line that fixes it.

    Plugins state their faults as plain text, ``key: what is wrong``, which :meth:`of` parses.
    """

    key: str
    """The key at fault; empty if the fault concerns several keys or no key."""
    place: str
    """The place that sets the key: a variable, one of vLLM's keys, ``command line``. Empty for a file."""
    _value: str
    _line: str

    def __new__(cls, text: str, *, key: str = "", value: str = "", line: str = "", place: str = "") -> Self:
        """
        Args:
            value: the value that was most likely meant.
            line: the line that fixes the fault, if it is not ``key = value``.
        """
        fault = super().__new__(cls, text)
        fault.key, fault.place, fault._value, fault._line = key, place, value, line
        return fault

    @classmethod
    def of(cls, text: str) -> Fault:
        """Parse a fault from a sentence."""
        if isinstance(text, Fault):
            return text
        keyed = re.match(r"([\w.-]+): .", text, re.DOTALL)
        key = keyed[1] if keyed else ""
        return cls(text, key=key, place=key if key.startswith("KVPLUG_") else "")

    @property
    def line(self) -> str:
        """The line that fixes the fault, as shown to people; empty if it is not known."""
        if self._line or not self.key:
            return self._line
        value = repr(self._value) if self._value else "..."
        return f"export {self.place}={value}" if self.place.startswith("KVPLUG_") else f"{self.key} = {value}"

    def under(self, prefix: str) -> Fault:
        """Return the fault with ``prefix`` before its key."""
        line = self._line and f"{prefix}{self._line}"
        return Fault(f"{prefix}{self}", key=prefix + self.key, value=self._value, line=line, place=self.place)

    def at(self, place: str) -> Fault:
        """Return the fault with the ``place`` that sets its key; empty for a file."""
        text = f"{self} [{place}]" if place else str(self)
        return Fault(text, key=self.key, value=self._value, line=self._line, place=place)


def shown(value: Any) -> str:
    """Format a value as an operator wrote it, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python converts to text
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is closest to ``name``, or ``None`` if none is close."""
    from difflib import get_close_matches

    by_folded = {_folded(each): each for each in known}
    found = get_close_matches(_folded(name), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")


def listed(names: Iterable[str]) -> str:
    """Join names as ``a, b or c``."""
    every = list(names)
    return every[0] if len(every) == 1 else f"{', '.join(every[:-1])} or {every[-1]}"


def in_place_of(key: str, name: str) -> str:
    """Return the line that fixes a misspelt or misplaced key."""
    return f"{name}    (in place of {key})"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean …?``, or an empty text if no known name is close."""
    found = nearest(name, known)
    return f"; did you mean {found!r}?" if found else ""


def unknown_key(key: str, known: Iterable[str], given: Container[str] = ()) -> Fault:
    """Make the fault of an unknown key. It hides the value, which may be a secret under a misspelt name.

    ``given``: the keys that are set. The fault does not suggest setting one of them a second time.
    """
    names = sorted(known)
    near = nearest(key, names)
    hint = f"; did you mean {near!r}?" if near else "; known are " + ", ".join(names) if names else ""
    if near is None:
        line = f"{key}    (remove it)"
    elif near in given:
        line = f"{key}    (remove it: {near} is set already)"
    else:
        line = in_place_of(key, near)
    return Fault(f"{key}: not a known key{hint}", key=key, line=line)


def bad_value(key: str, given: Any, allowed: str, *, reason: str = "", meant: str | None = None) -> Fault:
    """Make the fault of a value. ``meant``: the value that was most likely meant."""
    text = f"{key}: {shown(given)} was given; allowed is {allowed}{reason}"
    return Fault(text, key=key, value=meant or "")
