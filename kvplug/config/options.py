"""Options classes: attrs classes that msgspec fills from plain values, reporting every fault at once.

:func:`option` declares an option, :func:`check_options` makes an instance of a class from plain values, and
:func:`describe_options` lists the options of a class. :class:`~kvplug.config.Config` is read the same way.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar, Union

import attrs

from kvplug.config.messages import Fault, bad_value, listed, nearest, shown, unknown_key
from kvplug.config.units import BYTES, SECONDS, format_bytes, format_seconds, parse_bytes, parse_seconds
from kvplug.errors import ConfigError, PluginError

T = TypeVar("T")

HELP: Final = "kvplug.help"
UNIT: Final = "kvplug.unit"
MEMORY: Final = "kvplug.memory"
_BOUNDS: Final = "kvplug.bounds"
_BOOLEANS: Final = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
_UNITS: Final[Mapping[str, Iterable[str]]] = {"bytes": BYTES, "seconds": SECONDS}
_LIMITS: Final = {"ge": "at least", "gt": "more than", "le": "at most"}
_WORDS: Final = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def option(
    default: Any = attrs.NOTHING,
    *,
    help: str,  # noqa: A002  (authors expect this word, and this function does not call the builtin)
    unit: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    validator: Callable[[Any, Any, Any], Any] | None = None,
    takes_memory: bool = False,
) -> Any:
    """Declare a field of an options class: an ``attrs.field`` with the texts for ``kvplug list --options``.

    With ``unit="bytes"`` an operator may write ``"64 MiB"``, and with ``unit="seconds"`` ``"500 ms"``. Other
    units are only displayed. For choices, use the type ``Literal["never", "oldest"]`` or an enum. An option
    without a default must be given. ``default`` may be an ``attrs.Factory``.

    ``takes_memory``: the option's value is the number of bytes of host memory that the process may use;
    ``None`` stands for the config's ``buffer_size``. It is compared with the available memory at start.

    >>> @attrs.frozen(kw_only=True)
    ... class MyOptions:
    ...     slot_bytes: int = option(4096, unit="bytes", at_least=1, help="Bytes of one slot.")
    """
    given = {"ge": at_least, "gt": above, "le": at_most}
    bounds = {name: bound for name, bound in given.items() if bound is not None}
    return attrs.field(
        default=default,
        validator=_Check(validator),
        metadata={HELP: help, UNIT: unit, MEMORY: takes_memory, _BOUNDS: bounds},
    )


@attrs.frozen(kw_only=True)
class OptionRow:
    """One option, described for documents and the command line."""

    name: str
    """The key, as an operator writes it."""
    type: str
    """The type in words, such as ``whole number`` or ``one of never or oldest``."""
    unit: str
    """``bytes``, ``seconds``, or another unit that is only displayed; empty without a unit."""
    default: str
    """The default as written in a configuration; ``"required"`` without a default."""
    help: str
    """What the option does, in one or two sentences."""


@attrs.frozen
class _Check:
    """Validates an option: checks its type and bounds, then calls the author's own validator."""

    validator: Callable[[Any, Any, Any], Any] | None

    def __call__(self, instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        _, faults = _options(type(instance))[attribute.alias or attribute.name].structured(value, instance)
        if faults:
            raise ConfigError(*faults)


@attrs.frozen(kw_only=True)
class _Option:
    """One option of a class, with its type."""

    key: str
    field: attrs.Attribute[Any]
    hint: Any
    unit: str
    help: str
    bounds: Mapping[str, Any]
    """Arguments of ``msgspec.Meta``."""

    @classmethod
    def of(cls, key: str, field: attrs.Attribute[Any], hint: Any) -> _Option:
        about = field.metadata
        text = " ".join(about.get(HELP, "").split())
        bounds = about.get(_BOUNDS, {})
        return cls(key=key, field=field, hint=hint, unit=about.get(UNIT, ""), help=text, bounds=bounds)

    @property
    def is_required(self) -> bool:
        return self.field.default is attrs.NOTHING

    def structured(self, given: Any, instance: Any = None) -> tuple[Any, tuple[Fault, ...]]:
        """Convert a given value to the option's type, or return its faults.

        ``instance``: an instance that a program made; its values must have the right types already.
        """
        import msgspec  # imported late, because `kvplug list` imports option modules for their probes

        if self.field.converter is not None:
            return given, ()  # the class converts the value itself, and raises its own errors
        reason, meant = "", None
        try:
            plain = _plain(given, _kinds(self.hint), self.unit) if instance is None else given
            is_text = isinstance(given, str) and instance is None
            value = msgspec.convert(plain, _bounded(self.hint, self.bounds), strict=not is_text)
            is_finite = not isinstance(value, float) or math.isfinite(value)
            is_name = instance is not None and isinstance(value, enum.Enum) and value is not given
            if is_finite and not is_name:
                return value, self._refusals(value, given, instance)
        except msgspec.ValidationError:
            meant = nearest(given, _choices(self.hint)) if isinstance(given, str) else None
            reason = f"; did you mean {meant!r}?" if meant else ""
        except ValueError as e:
            reason = f"; {e}"
        allowed = ", ".join(filter(None, (in_words(self.hint, self.unit), self.limits())))
        return None, (bad_value(self.key, given, allowed, reason=reason, meant=meant),)

    def _refusals(self, value: Any, given: Any, instance: Any) -> tuple[Fault, ...]:
        """Return the faults that the author's validator finds. A validator that needs an instance only runs
        in the constructor."""
        check = self.field.validator
        check = check.validator if isinstance(check, _Check) else check
        try:
            if check is not None:
                check(instance, self.field, value)
        except ConfigError as e:
            return tuple(Fault.of(each if Fault.of(each).key else f"{self.key}: {each}") for each in e.faults)
        except AttributeError:
            if instance is not None:
                raise
        except (ValueError, TypeError) as e:
            return (Fault.of(f"{self.key}: {shown(given)} was given; {e.args[0] if e.args else e}"),)
        return ()

    def limits(self) -> str:
        return " and ".join(
            f"{_LIMITS[key]} {format_value(limit, self.unit)}" for key, limit in self.bounds.items()
        )

    def row(self) -> OptionRow:
        words = in_words(self.hint).removeprefix("a ")
        return OptionRow(
            name=self.key,
            type=", ".join(filter(None, (words, self.limits()))),
            unit=self.unit,
            default=self._default(),
            help=self.help,
        )

    def _default(self) -> str:
        default: Any = self.field.default
        if self.is_required:
            return "required"
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            plain = default.factory in (dict, list, tuple, set, frozenset)
            return format_value(default.factory(), self.unit) if plain else "computed"
        return format_value(default, self.unit)

    def in_schema(self) -> tuple[str, Any, Any]:
        """Return the option as a field of a msgspec.Struct."""
        import msgspec

        described = msgspec.Meta(description=self.help)
        hint: Any = Annotated[_in_schema(self.hint, self.bounds, self.unit), described]
        default: Any = self.field.default
        if self.is_required:
            default = msgspec.NODEFAULT
        elif isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default = msgspec.field(default_factory=object)  # optional, without a default in the schema
        return self.key, hint, default


def option_fields(cls: type) -> dict[str, attrs.Attribute[Any]]:
    """Return the fields that a configuration may set, by key."""
    return {field.alias or field.name: field for field in attrs.fields(cls) if field.init}


def _resolved(cls: type) -> Mapping[str, _Option]:
    try:
        hints = typing.get_type_hints(cls)
    except NameError as e:
        raise PluginError(f"the types of {cls.__module__}.{cls.__qualname__} cannot be resolved: {e}") from e
    return {key: _Option.of(key, field, hints[field.name]) for key, field in option_fields(cls).items()}


_options: Final[Callable[[type], Mapping[str, _Option]]] = functools.cache(_resolved)
"""Returns the options of a class by key. Raises PluginError if their types cannot be resolved."""


def check_options(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Make an instance of the options class ``cls`` from plain values.

    ``where`` precedes each key in a fault (``"options.cpu"``). Text is converted to the field's type, so
    that environment variables can supply values.

    >>> @attrs.frozen(kw_only=True)
    ... class MyOptions:
    ...     slot_bytes: int = option(4096, unit="bytes", at_least=1, help="Bytes of one slot.")
    >>> check_options(MyOptions, {"slot_bytes": "1 MiB"}).slot_bytes
    1048576

    Raises:
        ConfigError: a key is unknown, a value has the wrong type or is out of bounds, or a required option
            is missing; it lists every fault.
    """
    prefix = f"{where}." if where else ""
    known = _options(cls)
    found = {str(key): structured(cls, str(key), given, values) for key, given in values.items()}
    faults = [fault for _, of_key in found.values() for fault in of_key]
    for key, each in known.items():
        if each.is_required and values.get(key, "") == "":
            faults.append(Fault(f"{key}: must be given ({each.help.rstrip('.') or 'no default'})", key=key))
    try:
        if not faults:
            return cls(**{key: value for key, (value, _) in found.items()})
    except ConfigError as e:
        faults = [Fault.of(fault) for fault in e.faults]
    except (ValueError, TypeError) as e:
        raise ConfigError(f"{where}: {e}" if where else str(e)) from e
    raise ConfigError(*(fault.under(prefix) for fault in faults))


def structured(cls: type, key: str, given: Any, others: Container[str] = ()) -> tuple[Any, tuple[Fault, ...]]:
    """Convert the value given for one option of the class, or return its faults. ``others``: the keys that
    are set."""
    known = _options(cls)
    return known[key].structured(given) if key in known else (None, (unknown_key(key, known, others),))


def describe_options(cls: type) -> tuple[OptionRow, ...]:
    """Describe the options of a class, in the order of its fields.

    >>> @attrs.frozen(kw_only=True)
    ... class MyOptions:
    ...     slot_bytes: int = option(4096, unit="bytes", at_least=1, help="Bytes of one slot.")
    >>> (row,) = describe_options(MyOptions)
    >>> row.name, row.default, row.help
    ('slot_bytes', '4 KiB', 'Bytes of one slot.')
    """
    return tuple(each.row() for each in _options(cls).values())


def schema_fields(*classes: type) -> dict[str, tuple[str, Any, Any]]:
    """Return msgspec fields for the options of all these classes, by key."""
    return {key: each.in_schema() for cls in classes for key, each in _options(cls).items()}


# -- types -----------------------------------------------------------------------------------------


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _kinds(hint: Any) -> set[Any]:
    return {typing.get_origin(each) or each for each in _members(hint)}


def _choices(hint: Any) -> list[str]:
    """Return the values that a Literal or enum type allows."""
    found: list[str] = []
    for each in _members(hint):
        if typing.get_origin(each) is Literal:
            found += [format_value(choice) for choice in typing.get_args(each)]
        elif isinstance(each, type) and issubclass(each, enum.Enum):
            found += [format_value(choice) for choice in each]
    return found


def _bounded(hint: Any, bounds: Mapping[str, Any]) -> Any:
    """Return the type with bounds on its numbers."""
    import msgspec

    meta, members = msgspec.Meta(**bounds), _members(hint)
    bounded = (Annotated[each, meta] if each in (int, float) else each for each in members)
    return functools.reduce(operator.or_, bounded)


def _in_schema(hint: Any, bounds: Mapping[str, Any], unit: str) -> Any:
    """Return the bounded type for a JSON schema, in which a number with a unit may be text."""
    if unit not in _UNITS or not _kinds(hint) & {int, float}:
        return _bounded(hint, bounds)
    import msgspec

    text = msgspec.Meta(pattern=rf"^\s*[0-9][0-9_.eE+-]*\s*({'|'.join(_UNITS[unit])})\s*$")
    return _bounded(hint, bounds) | Annotated[str, text]


def _plain(given: Any, kinds: set[Any], unit: str) -> Any:
    """Prepare a value for msgspec: parse text, and turn a whole float into an int.

    Raises:
        ValueError: the text has a wrong unit, or is not a quantity.
    """
    if isinstance(given, float) and int in kinds and given.is_integer():
        return int(given)
    if not isinstance(given, str):
        return given
    word = given.strip().lower()
    if word == "none" and types.NoneType in kinds:
        return None
    if bool in kinds and word in _BOOLEANS:
        return _BOOLEANS[word]
    if kinds & {tuple, list, frozenset}:
        return [part.strip() for part in given.split(",") if part.strip()]
    if unit == "bytes" and int in kinds:
        return parse_bytes(given)
    return parse_seconds(given) if unit == "seconds" and float in kinds else given


def in_words(hint: Any, unit: str = "") -> str:
    """Describe a type for readers who do not write Python."""
    members = [each for each in _members(hint) if each is not types.NoneType]
    words = []
    for each in members:
        origin = typing.get_origin(each)
        if choices := _choices(each):
            words.append(f"one of {listed(choices)}")
        elif origin in (tuple, list, frozenset):
            words.append(f"a list of {in_words(typing.get_args(each)[0]).removeprefix('a ')}")
        elif isinstance(origin, type) and issubclass(origin, Mapping):
            words.append("a table of names and values")
        elif (each, unit) == (int, "bytes"):
            words.append('a size such as "64 MiB" or a whole number of bytes')
        elif (each, unit) == (float, "seconds"):
            words.append('seconds, or a duration such as "500 ms"')
        else:
            words.append(_WORDS.get(each, getattr(each, "__name__", str(each))))
    return listed(words) + (" (or none)" if types.NoneType in _kinds(hint) else "")


def format_value(value: Any, unit: str = "") -> str:
    """Format a value as it is written in a configuration."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, (tuple, list, frozenset, set)):
        return ", ".join(format_value(each) for each in value) or "nothing"
    if unit == "bytes" and isinstance(value, int):
        return format_bytes(value)
    if unit == "seconds" and isinstance(value, (int, float)):
        return format_seconds(value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value != "" else '""'
