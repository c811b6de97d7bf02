"""The messages of configuration faults: the key, what was given, what is allowed, the nearest name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

_LONGEST = 60

_GROUP = "a group's ranks are arguments of StatelessGroup.create"
REMOVED: Final[Mapping[str, str]] = {
    "rank": _GROUP,
    "world_size": _GROUP,
    "store_timeout_s": "a group's timeout is the argument timeout_s of StatelessGroup.create",
}
"""Keys that earlier configurations could have, and what replaces them."""


def shown(value: Any) -> str:
    """A value as an operator wrote it, cut where it becomes long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python turns into text
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` most likely stands for, if any is near."""
    from difflib import get_close_matches

    by_folded = {_folded(each): each for each in known}
    found = get_close_matches(_folded(name), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")


def listed(names: Iterable[str]) -> str:
    """``a, b or c``."""
    every = list(names)
    return every[0] if len(every) == 1 else f"{', '.join(every[:-1])} or {every[-1]}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean …?``, or nothing when no known name is near."""
    found = nearest(name, known)
    return f"; did you mean {found!r}?" if found else ""


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The fault of an unknown key. It hides the value, which may be a secret under a misspelt name."""
    if key in REMOVED:
        return f"{key}: not a known key any more; {REMOVED[key]}"
    names = sorted(known)
    hint = did_you_mean(key.rpartition(".")[2], names)
    return f"{key}: not a known key{hint or '; known are ' + ', '.join(names) if names else hint}"


def bad_value(key: str, given: Any, allowed: str) -> str:
    return f"{key}: {shown(given)} was given; allowed is {allowed}"
