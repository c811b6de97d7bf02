"""Quantities with units: ``"64 MiB"``, ``"500 ms"``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Final

_QUANTITY = re.compile(r"\s*([0-9][0-9_]{0,30}(?:\.[0-9]{0,30})?(?:[eE][+-]?[0-9]{1,2})?)\s*([A-Za-z]*)\s*")

BYTES: Final = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
SECONDS: Final = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_bytes(text: str) -> int:
    """Parse a size such as ``"1 GiB"``, ``"64MB"`` or ``"4096"`` into bytes. Fractions of a byte are dropped.

    ``"64M"`` is refused because it can mean 64,000,000 or 67,108,864.

    Raises:
        ValueError: the text is not a size; the message shows the valid forms.
    """
    number, unit = _split(text, "size", BYTES)
    if number.isdigit():
        return int(number) * BYTES[unit]
    from decimal import Decimal

    return int(Decimal(number) * BYTES[unit])


def parse_seconds(text: str) -> float:
    """Parse a duration such as ``"30 s"``, ``"500 ms"``, ``"5 min"`` or ``"1.5"`` into seconds.

    Raises:
        ValueError: the text is not a duration.
    """
    number, unit = _split(text, "time", SECONDS)
    return float(number) * SECONDS[unit]


def _split(text: str, what: str, units: Iterable[str]) -> tuple[str, str]:
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a number with a unit")
    unit = found[2]
    if unit not in units:
        meant = {each.lower(): each for each in units}.get(unit.lower())
        hint = f"did you mean {meant!r}?" if meant else "units are " + ", ".join(filter(None, units))
        if what == "size" and unit.upper() in ("K", "M", "G", "T"):
            hint = f"write {unit.upper()}B (powers of 1000) or {unit.upper()}iB (powers of 1024)"
        raise ValueError(f"{unit!r} is not a unit of {what}; {hint}")
    return found[1].replace("_", ""), unit


def format_bytes(nbytes: int) -> str:
    """Format a size in the shortest exact form that :func:`parse_bytes` can read."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % BYTES[unit] == 0:
            return f"{nbytes // BYTES[unit]} {unit}"
    return f"{nbytes} B"


def format_seconds(seconds: float) -> str:
    return f"{seconds:g} s" if math.isfinite(seconds) else str(seconds)


def bytes_in_words(number: int | None) -> str:
    """Format a number of bytes with three significant digits and a unit, or ``None`` as "unlimited".

    >>> bytes_in_words(25275637760), bytes_in_words(4096), bytes_in_words(None)
    ('23.5 GiB', '4 KiB', 'unlimited')
    """
    if number is None:
        return "unlimited"
    size, units = float(number), iter(("bytes", "KiB", "MiB", "GiB", "TiB", "PiB"))
    unit = next(units)
    while size >= 1000 and unit != "PiB":
        size, unit = size / 1024, next(units)
    return f"{size:.3g} {unit}"
