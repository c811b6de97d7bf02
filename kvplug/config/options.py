"""Options are attrs classes: from plain values with every fault at once, and to rows for people.

:func:`option` declares one, :func:`check_options` fills a class from what an operator wrote,
:func:`describe_options` tells what there is. :class:`~kvplug.config.Config` is read the same way.
"""

from __future__ import annotations

import enum
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeVar, Union

import attrs

from kvplug.config.faults import bad_value, listed, nearest, shown, unknown_key
from kvplug.config.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from kvplug.errors import ConfigError, PluginError

T = TypeVar("T")

HELP: Final = "kvplug.help"
UNIT: Final = "kvplug.unit"
_BOUNDS: Final = "kvplug.bounds"

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


@attrs.frozen
class _Bounds:
    """What a number must satisfy besides its type; an attrs validator that also says what is allowed."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None

    def text(self, unit: str) -> str:
        limits = (("at least", self.at_least), ("more than", self.above), ("at most", self.at_most))
        return " and ".join(f"{word} {_number(limit, unit)}" for word, limit in limits if limit is not None)

    def holds(self, value: Any) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
        )


@attrs.frozen
class _Checks:
    """The validator of an option: its bounds, then the author's own; a fault names key and value."""

    bounds: _Bounds
    validator: Callable[[Any, Any, Any], Any] | None

    def __call__(self, instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        key = attribute.alias or attribute.name
        try:
            if value is not None and not self.bounds.holds(value):
                raise ConfigError(bad_value(key, value, self.bounds.text(attribute.metadata[UNIT])))
            if self.validator is not None:
                self.validator(instance, attribute, value)
        except ConfigError:
            raise
        except (ValueError, TypeError) as e:
            raise ConfigError(f"{key}: {shown(value)} was given; {e.args[0] if e.args else e}") from e


def option(
    default: Any = attrs.NOTHING,
    *,
    help: str,  # noqa: A002  (the word an author looks for; nothing here calls the builtin)
    unit: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    validator: Callable[[Any, Any, Any], Any] | None = None,
) -> Any:
    """One field of an options class: ``attrs.field`` with what ``kvplug list --options`` prints.

    With ``unit="bytes"`` an operator may write ``"64 MiB"``, with ``unit="seconds"`` ``"500 ms"``; other
    units are only shown. Choices are said by the type: ``Literal["never", "oldest"]`` or an enum. Without
    a default the option must be given. ``default`` may be an ``attrs.Factory``.
    """
    bounds = _Bounds(at_least, above, at_most)
    return attrs.field(
        default=default,
        validator=_Checks(bounds, validator),
        metadata={HELP: help, UNIT: unit, _BOUNDS: bounds},
    )


@attrs.frozen(kw_only=True)
class OptionRow:
    """One option, as people read about it."""

    name: str
    type: str
    unit: str
    default: str
    """As an operator would write it; ``"required"`` where there is none."""
    help: str


def check_options(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """An instance of the options class ``cls``, made from what an operator wrote.

    ``where`` goes before each key in a fault (``"options.cpu"``). Text is converted to the field's
    type, so that values from environment variables do.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of bounds, an option that must be
            given; every fault at once.
    """
    converted, faults = convert_values(cls, values, where)
    prefix = f"{where}." if where else ""
    for name, field in option_fields(cls).items():
        if field.default is attrs.NOTHING and name not in values:
            faults.append(f"{prefix}{name}: must be given; {field.metadata.get(HELP, '') or 'no default'}")
    if faults:
        raise ConfigError(*faults)
    try:
        return cls(**converted)
    except ConfigError as e:
        raise ConfigError(*(f"{prefix}{fault}" for fault in e.faults)) from e
    except (ValueError, TypeError) as e:
        raise ConfigError(f"{where}: {e}" if where else str(e)) from e


def convert_values(cls: type, values: Mapping[str, Any], where: str = "") -> tuple[dict[str, Any], list[str]]:
    """The values that are right, converted to their fields' types, and the faults of all the others."""
    prefix = f"{where}." if where else ""
    fields = option_fields(cls)
    hints = _hints(cls)
    converted: dict[str, Any] = {}
    faults: list[str] = []
    for name, given in values.items():
        field = fields.get(str(name))
        if field is None:
            faults.append(unknown_key(f"{prefix}{name}", fields))
            continue
        key = f"{prefix}{name}"
        unit = field.metadata.get(UNIT, "")
        bounds: _Bounds = field.metadata.get(_BOUNDS, _Bounds())
        if field.converter is not None:
            converted[name] = given  # the class converts by itself, and says what is wrong
            continue
        try:
            value = _convert(given, hints[field.name], unit)
        except _UnfitError as e:
            allowed = e.allowed + (f", {bounds.text(unit)}" if bounds != _Bounds() and not e.reason else "")
            faults.append(bad_value(key, given, allowed) + (f" ({e.reason})" if e.reason else ""))
            continue
        refusals = _refusals(field, value)
        faults += (f"{prefix}{refusal}" for refusal in refusals)
        if not refusals:
            converted[name] = value
    return converted, faults


def describe_options(cls: type) -> tuple[OptionRow, ...]:
    """What there is to set, in the order of the class."""
    hints = _hints(cls)
    rows: list[OptionRow] = []
    for name, field in option_fields(cls).items():
        unit = field.metadata.get(UNIT, "")
        bounds: _Bounds = field.metadata.get(_BOUNDS, _Bounds())
        kind = describe_type(hints[field.name])
        limits = bounds.text(unit)
        rows.append(
            OptionRow(
                name=name,
                type=f"{kind}, {limits}" if limits else kind,
                unit=unit,
                default=_default(field, unit),
                help=" ".join(field.metadata.get(HELP, "").split()),
            )
        )
    return tuple(rows)


def option_fields(cls: type) -> dict[str, attrs.Attribute[Any]]:
    """The fields an operator may set, by the key they are set with."""
    return {field.alias or field.name: field for field in attrs.fields(cls) if field.init}


def format_value(value: Any, unit: str = "") -> str:
    """A value as an operator would write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, (int, float)):
        return _number(value, unit)
    if isinstance(value, (tuple, list, frozenset, set)):
        return ", ".join(format_value(each) for each in value) or "nothing"
    return str(value) if value != "" else '""'


def _number(value: Any, unit: str) -> str:
    if unit == "bytes" and isinstance(value, int):
        return format_bytes(value)
    if unit == "seconds":
        return format_seconds(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default(field: attrs.Attribute[Any], unit: str) -> str:
    default: Any = field.default
    if default is attrs.NOTHING:
        return "required"
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        plain = default.factory in (dict, list, tuple, set, frozenset)
        return format_value(default.factory(), unit) if plain else "computed"
    return format_value(default, unit)


def _refusals(field: attrs.Attribute[Any], value: Any) -> tuple[str, ...]:
    """Why the class's own validator refuses the value.

    Asked without an instance, so that every fault can be told; a validator that needs one is left to
    the constructor.
    """
    if field.validator is None:
        return ()
    try:
        field.validator(None, field, value)
    except ConfigError as e:
        return e.faults
    except (ValueError, TypeError) as e:
        return (f"{field.alias or field.name}: {shown(value)} was given; {e.args[0] if e.args else e}",)
    except AttributeError:
        return ()
    return ()


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError as e:
        raise PluginError(f"the types of {cls.__module__}.{cls.__qualname__} cannot be resolved: {e}") from e


# -- one value -----------------------------------------------------------------------------------


class _UnfitError(Exception):
    """A value is not of a type. ``allowed`` says what is, ``reason`` more than that where there is more."""

    def __init__(self, allowed: str, reason: str = "") -> None:
        super().__init__(allowed)
        self.allowed = allowed
        self.reason = reason


def describe_type(hint: Any) -> str:
    """A type, for people who do not write Python."""
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


def _convert(given: Any, hint: Any, unit: str) -> Any:
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
            raise _UnfitError("text")
        return given
    if origin is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(given, Mapping):
            raise _UnfitError("a table of names and values")
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
            return _convert(given, each, unit)
        except _UnfitError as e:
            refusals.append(e)
    only = refusals[0].reason if len(refusals) == 1 else ""
    raise _UnfitError(describe_type(hint), only)


def _convert_choice(given: Any, choices: Mapping[str, Any], hint: Any) -> Any:
    text = format_value(given)
    if text in choices:
        return choices[text]
    near = nearest(text, choices) if isinstance(given, str) else None
    raise _UnfitError(describe_type(hint), f"did you mean {near!r}?" if near else "")


def _convert_sequence(given: Any, hint: Any, origin: Any, arguments: tuple[Any, ...], unit: str) -> Any:
    if isinstance(given, str):
        given = [part.strip() for part in given.split(",") if part.strip()]
    if not isinstance(given, (list, tuple, set, frozenset)):
        raise _UnfitError(describe_type(hint))
    try:
        return origin(_convert(each, arguments[0], unit) for each in given)
    except _UnfitError as e:
        raise _UnfitError(describe_type(hint), e.reason) from e


def _convert_bool(given: Any) -> bool:
    if isinstance(given, bool):
        return given
    if isinstance(given, str) and given.strip().lower() in _TRUE:
        return True
    if isinstance(given, str) and given.strip().lower() in _FALSE:
        return False
    raise _UnfitError("true or false")


def _convert_int(given: Any, unit: str) -> int:
    allowed = 'a size such as "64 MiB" or a whole number of bytes' if unit == "bytes" else "a whole number"
    if isinstance(given, bool):
        raise _UnfitError(allowed)
    if isinstance(given, int):
        return given
    if isinstance(given, float) and given.is_integer():
        return int(given)
    if isinstance(given, str):
        try:
            return parse_bytes(given) if unit == "bytes" else int(given)
        except ValueError as e:
            raise _UnfitError(allowed, str(e) if unit == "bytes" else "") from e
    raise _UnfitError(allowed)


def _convert_float(given: Any, unit: str) -> float:
    allowed = 'seconds, or a duration such as "500 ms"' if unit == "seconds" else "a number"
    if isinstance(given, bool):
        raise _UnfitError(allowed)
    if isinstance(given, str):
        try:
            given = parse_seconds(given) if unit == "seconds" else float(given)
        except ValueError as e:
            raise _UnfitError(allowed, str(e) if unit == "seconds" else "") from e
    if isinstance(given, (int, float)):
        try:
            value = float(given)
        except OverflowError as e:
            raise _UnfitError(allowed) from e
        if math.isfinite(value):
            return value
    raise _UnfitError(allowed)
