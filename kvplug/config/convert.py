"""Conversion of one value: from the text or plain value in a source to the field's type, and back to text."""

from __future__ import annotations

import enum
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Final, Literal, Union

from kvplug.config.messages import listed, nearest
from kvplug.config.units import format_bytes, format_seconds, parse_bytes, parse_seconds

_TRUE: Final = ("true", "yes", "on", "1")
_FALSE: Final = ("false", "no", "off", "0")


class UnfitError(Exception):
    """A value does not fit its type. ``allowed`` says what fits; ``reason`` adds details if there are any;
    ``meant`` is the value that was most likely meant."""

    def __init__(self, allowed: str, reason: str = "", meant: str | None = None) -> None:
        super().__init__(allowed)
        self.allowed = allowed
        self.reason = reason
        self.meant = meant


def describe_type(hint: Any) -> str:
    """Describe a type for readers who do not write Python."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        words = [describe_type(each) for each in arguments if each is not type(None)]
        return listed(words) + (" (or none)" if type(None) in arguments else "")
    if origin is Literal:
        return f"one of {listed([format_value(each) for each in arguments])}"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return f"one of {listed([str(each.value) for each in hint])}"
    if origin in (tuple, list, frozenset):
        return f"list of {describe_type(arguments[0])}"
    if origin is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return "table"
    plain = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return plain.get(hint, getattr(hint, "__name__", str(hint)))


def convert(given: Any, hint: Any, unit: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(given, hint, arguments, unit)
    if origin is Literal:
        return _convert_choice(given, {format_value(each): each for each in arguments}, hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return (
            given
            if isinstance(given, hint)
            else _convert_choice(given, {str(m.value): m for m in hint}, hint)
        )
    if origin in (tuple, list, frozenset):
        return _convert_sequence(given, hint, origin, arguments, unit)
    if hint is bool:
        return _convert_bool(given)
    if hint is int:
        return _convert_int(given, unit)
    if hint is float:
        return _convert_float(given, unit)
    if hint is str:
        if not isinstance(given, str):
            raise UnfitError("text")
        return given
    if origin is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(given, Mapping):
            raise UnfitError("a table of names and values")
        return given
    return given


def _convert_union(given: Any, hint: Any, arguments: tuple[Any, ...], unit: str) -> Any:
    if type(None) in arguments:
        if given is None or (isinstance(given, str) and given.strip().lower() == "none"):
            return None
        arguments = tuple(each for each in arguments if each is not type(None))
    refusals = []
    for each in arguments:
        try:
            return convert(given, each, unit)
        except UnfitError as e:
            refusals.append(e)
    if len(refusals) == 1:
        raise UnfitError(describe_type(hint), refusals[0].reason, refusals[0].meant)
    raise UnfitError(describe_type(hint))


def _convert_choice(given: Any, choices: Mapping[str, Any], hint: Any) -> Any:
    text = format_value(given)
    if text in choices:
        return choices[text]
    near = nearest(text, choices) if isinstance(given, str) else None
    raise UnfitError(describe_type(hint), f"did you mean {near!r}?" if near else "", near)


def _convert_sequence(given: Any, hint: Any, origin: Any, arguments: tuple[Any, ...], unit: str) -> Any:
    if isinstance(given, str):
        given = [part.strip() for part in given.split(",") if part.strip()]
    if not isinstance(given, (list, tuple, set, frozenset)):
        raise UnfitError(describe_type(hint))
    try:
        return origin(convert(each, arguments[0], unit) for each in given)
    except UnfitError as e:
        raise UnfitError(describe_type(hint), e.reason, e.meant) from e


def _convert_bool(given: Any) -> bool:
    if isinstance(given, bool):
        return given
    if isinstance(given, str) and given.strip().lower() in _TRUE:
        return True
    if isinstance(given, str) and given.strip().lower() in _FALSE:
        return False
    raise UnfitError("true or false")


def _convert_int(given: Any, unit: str) -> int:
    allowed = 'a size such as "64 MiB" or a whole number of bytes' if unit == "bytes" else "a whole number"
    if isinstance(given, bool):
        raise UnfitError(allowed)
    if isinstance(given, int):
        return given
    if isinstance(given, float) and given.is_integer():
        return int(given)
    if isinstance(given, str):
        try:
            return parse_bytes(given) if unit == "bytes" else int(given)
        except ValueError as e:
            raise UnfitError(allowed, str(e) if unit == "bytes" else "") from e
    raise UnfitError(allowed)


def _convert_float(given: Any, unit: str) -> float:
    allowed = 'seconds, or a duration such as "500 ms"' if unit == "seconds" else "a number"
    if isinstance(given, bool):
        raise UnfitError(allowed)
    if isinstance(given, str):
        try:
            given = parse_seconds(given) if unit == "seconds" else float(given)
        except ValueError as e:
            raise UnfitError(allowed, str(e) if unit == "seconds" else "") from e
    if isinstance(given, (int, float)):
        try:
            value = float(given)
        except OverflowError as e:
            raise UnfitError(allowed) from e
        if math.isfinite(value):
            return value
    raise UnfitError(allowed)


def format_value(value: Any, unit: str = "") -> str:
    """Format a value as it is written in a configuration."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, (int, float)):
        return format_number(value, unit)
    if isinstance(value, (tuple, list, frozenset, set)):
        return ", ".join(format_value(each) for each in value) or "nothing"
    return str(value) if value != "" else '""'


def format_number(value: Any, unit: str) -> str:
    if unit == "bytes" and isinstance(value, int):
        return format_bytes(value)
    if unit == "seconds":
        return format_seconds(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
