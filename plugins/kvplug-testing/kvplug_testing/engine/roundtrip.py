"""Encodes and decodes the values that a connector's two sides exchange: in an engine they are two
processes.
"""

from __future__ import annotations

from typing import Any

from kvplug.net.wire import Limits, decode, encode

_LIMITS = Limits(max_bytes=64 << 20, max_items=1 << 24)


def roundtrip(value: Any, what: str) -> Any:
    """The value as the other side receives it.

    Raises:
        AssertionError: a part is not :data:`kvplug.engine.connector.values.Plain`; the message says which.
    """
    _check(value, what)
    return decode(encode(value, limits=_LIMITS), limits=_LIMITS)


def _check(value: Any, where: str) -> None:
    kind = type(value)
    if kind in (list, tuple):
        for index, each in enumerate(value):
            if type(each) is not int:
                _check(each, f"{where}[{index}]")
    elif kind is dict:
        for key, each in value.items():
            _check(key, f"a key of {where}")
            _check(each, f"{where}[{key!r}]")
    elif value is not None and kind not in (bool, int, float, str, bytes):
        raise AssertionError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}: only plain values cross between the sides"
        )
