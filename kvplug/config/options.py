"""Options are attrs classes: filled from plain values with every fault at once, and described as rows.

:func:`option` declares an option, :func:`check_options` fills a class from plain values, and
:func:`describe_options` lists the options of a class. :class:`~kvplug.config.Config` is read the same way.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import attrs

from kvplug.config.convert import UnfitError, convert, describe_type, format_number, format_value
from kvplug.config.messages import Fault, bad_value, shown, unknown_key
from kvplug.errors import ConfigError, PluginError

T = TypeVar("T")

HELP: Final = "kvplug.help"
UNIT: Final = "kvplug.unit"
MEMORY: Final = "kvplug.memory"
_BOUNDS: Final = "kvplug.bounds"


@attrs.frozen
class _Bounds:
    """Bounds of a number: an attrs validator whose error says what is allowed."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None

    def text(self, unit: str) -> str:
        limits = (("at least", self.at_least), ("more than", self.above), ("at most", self.at_most))
        return " and ".join(
            f"{word} {format_number(limit, unit)}" for word, limit in limits if limit is not None
        )

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

    def refusals(
        self, instance: Any, attribute: attrs.Attribute[Any], value: Any, given: Any
    ) -> tuple[str, ...]:
        """The fault of ``value``; the message shows what was given, before conversion."""
        key = attribute.alias or attribute.name
        try:
            if value is not None and not self.bounds.holds(value):
                return (bad_value(key, given, self.bounds.text(attribute.metadata[UNIT])),)
            if self.validator is not None:
                self.validator(instance, attribute, value)
        except ConfigError as e:
            return tuple(fault if Fault.of(fault).key else f"{key}: {fault}" for fault in e.faults)
        except (ValueError, TypeError) as e:
            return (f"{key}: {shown(given)} was given; {e.args[0] if e.args else e}",)
        return ()

    def __call__(self, instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        faults = self.refusals(instance, attribute, value, value)
        if faults:
            raise ConfigError(*faults)


def option(
    default: Any = attrs.NOTHING,
    *,
    help: str,  # noqa: A002  (the word an author looks for; nothing here calls the builtin)
    unit: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    validator: Callable[[Any, Any, Any], Any] | None = None,
    takes_memory: bool = False,
) -> Any:
    """One field of an options class: ``attrs.field`` with what ``kvplug list --options`` prints.

    With ``unit="bytes"`` an operator may write ``"64 MiB"``, with ``unit="seconds"`` ``"500 ms"``; other
    units are only shown. Choices are said by the type: ``Literal["never", "oldest"]`` or an enum. Without
    a default the option must be given. ``default`` may be an ``attrs.Factory``.

    ``takes_memory``: the process may take so many bytes of the host's memory; ``None`` stands for the
    config's ``buffer_size``. They are compared with the memory that there is before anything starts.

    >>> @attrs.frozen(kw_only=True)
    ... class MyOptions:
    ...     slot_bytes: int = option(4096, unit="bytes", at_least=1, help="Bytes of one slot.")
    """
    bounds = _Bounds(at_least, above, at_most)
    return attrs.field(
        default=default,
        validator=_Checks(bounds, validator),
        metadata={HELP: help, UNIT: unit, MEMORY: takes_memory, _BOUNDS: bounds},
    )


@attrs.frozen(kw_only=True)
class OptionRow:
    """One option, described for documents and the command line."""

    name: str
    """The key, as an operator writes it."""
    type: str
    """In words: ``int``, ``seconds``, ``one of "never", "oldest"``."""
    unit: str
    """``bytes``, ``seconds``, or another one that is only shown; empty where there is none."""
    default: str
    """The default as it is written in a configuration; ``"required"`` where there is none."""
    help: str
    """What the option does, one or two sentences."""


def check_options(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Make an instance of the options class ``cls`` from plain values.

    ``where`` goes before each key in a fault (``"options.cpu"``). Text is converted to the field's
    type, so that values from environment variables do.

    >>> @attrs.frozen(kw_only=True)
    ... class MyOptions:
    ...     slot_bytes: int = option(4096, unit="bytes", at_least=1, help="Bytes of one slot.")
    >>> check_options(MyOptions, {"slot_bytes": "1 MiB"}).slot_bytes
    1048576

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of bounds, an option that must be
            given; every fault at once.
    """
    converted, faults = convert_values(cls, values, where)
    prefix = f"{where}." if where else ""
    for name, field in option_fields(cls).items():
        if field.default is attrs.NOTHING and values.get(name, "") == "":
            what = f"must be given; {field.metadata.get(HELP, '') or 'no default'}"
            faults.append(Fault(f"{prefix}{name}: {what}", key=f"{prefix}{name}"))
    if faults:
        raise ConfigError(*faults)
    try:
        return cls(**converted)
    except ConfigError as e:
        raise ConfigError(*(Fault.of(fault).under(prefix) for fault in e.faults)) from e
    except (ValueError, TypeError) as e:
        raise ConfigError(f"{where}: {e}" if where else str(e)) from e


def convert_values(
    cls: type, values: Mapping[str, Any], where: str = ""
) -> tuple[dict[str, Any], list[Fault]]:
    """The values that are right, converted to their fields' types, and the faults of all the others."""
    prefix = f"{where}." if where else ""
    fields = option_fields(cls)
    hints = _hints(cls)
    converted: dict[str, Any] = {}
    faults: list[Fault] = []
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
            value = convert(given, hints[field.name], unit)
        except UnfitError as e:
            allowed = e.allowed + (f", {bounds.text(unit)}" if bounds != _Bounds() and not e.reason else "")
            reason = f" ({e.reason})" if e.reason else ""
            faults.append(bad_value(key, given, allowed, reason=reason, meant=e.meant))
            continue
        refusals = _refusals(field, value, given)
        faults += (Fault.of(refusal).under(prefix) for refusal in refusals)
        if not refusals:
            converted[name] = value
    return converted, faults


def describe_options(cls: type) -> tuple[OptionRow, ...]:
    """The options of a class, in the order of its fields.

    >>> @attrs.frozen(kw_only=True)
    ... class MyOptions:
    ...     slot_bytes: int = option(4096, unit="bytes", at_least=1, help="Bytes of one slot.")
    >>> (row,) = describe_options(MyOptions)
    >>> row.name, row.default, row.help
    ('slot_bytes', '4 KiB', 'Bytes of one slot.')
    """
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
    """The fields that a configuration may set, by key."""
    return {field.alias or field.name: field for field in attrs.fields(cls) if field.init}


def _default(field: attrs.Attribute[Any], unit: str) -> str:
    default: Any = field.default
    if default is attrs.NOTHING:
        return "required"
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        plain = default.factory in (dict, list, tuple, set, frozenset)
        return format_value(default.factory(), unit) if plain else "computed"
    return format_value(default, unit)


def _refusals(field: attrs.Attribute[Any], value: Any, given: Any) -> tuple[str, ...]:
    """Why the class's own validator refuses the value.

    The validator runs without an instance, so that every fault is reported; a validator that needs an
    instance runs in the constructor only.
    """
    checks = field.validator
    if checks is None:
        return ()
    if not isinstance(checks, _Checks):
        checks = _Checks(_Bounds(), checks)
    try:
        return checks.refusals(None, field, value, given)
    except AttributeError:
        return ()


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError as e:
        raise PluginError(f"the types of {cls.__module__}.{cls.__qualname__} cannot be resolved: {e}") from e
