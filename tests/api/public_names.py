"""The public names of kvplug as lines of text, which ``plugin-api-1.txt`` records.

``python tests/api/public_names.py`` records new names. If one is gone or another, it records nothing: plugins
that exist may break. ``--changed`` records that too, after a person has seen that they do not.
"""

from __future__ import annotations

import builtins
import collections.abc
import enum
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pluggy

import kvplug
import kvplug.engine
import kvplug.net.wire
import kvplug.transport
import kvplug_testing
from kvplug.transport import hookspecs

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("plugin-api-1.txt")
DOORS = (kvplug, kvplug.engine, kvplug.transport, kvplug_testing)
WIRE = {
    "kvplug.net.wire": tuple(kvplug.net.wire.__all__),
    "kvplug.net.wire.checksum": ("digest",),
    "kvplug.net.wire.copying": ("LOCK_FREE_BYTES", "CopyBytes", "address_of", "copy_bytes"),
    "kvplug.net.wire.frames": ("HEADER_SIZE", "FrameKind", "decode_header", "encode_header"),
    "kvplug.net.wire.messages": (
        *("GOODBYE", "NONE", "SHORTEST_TENSOR_PREFIX", "prefix_size", "read_prefix"),
        *("Announcement", "message_parts", "tensor_prefix"),
    ),
    "kvplug.net.wire.token_ids": ("pack_tokens", "unpack_tokens"),
    "kvplug.net.wire.tensors": (
        *("TensorMeta", "as_bits", "copy_into", "dense", "dtype_name", "dtype_of", "empty_like_meta"),
        *("encode_meta", "is_dense", "memory_of", "memory_of_writable", "meta_of", "split_meta"),
    ),
}
"""Public as well, where plugins import them from. Other names of those modules are kvplug's own."""
PROTECTED = (
    *("_addresses", "_compare", "_connect", "_deadline", "_destroy", "_dial", "_drain"),
    *("_exchange", "_fail", "_give_up", "_join", "_join_threads", "_listener", "_on_failure"),
    *("_on_peer_gone", "_peer_gone", "_receive_blocks", "_resume", "_send_blocks", "_suspend"),
    *("_is_in_use", "_synchronize", "_taken", "_wait"),
    *("_forget", "_free", "_is_unused", "_look", "_moves_in_place", "_next_offer", "_on_value", "_place_of"),
    *("_poll", "_prepare", "_read_place", "_revoke", "_start", "_step", "_survives", "_take", "_taken_back"),
    *("_copying", "_tell"),
    *("_all_gather", "_all_reduce", "_broadcast", "_reduce_scatter"),
)
"""Private methods with a body that subclasses override or call, beside abstract ones."""
ABSTRACT = "abstract method"
PUBLIC_ELSEWHERE = {
    *vars(collections.abc),
    *vars(typing),
    *vars(builtins),
    *("Logger", "Tensor", "Timeout", "Plain"),
    *("Stop", "StatsSnapshot"),  # what is public has these as functions and as a dict
}
VALUES = (bool, int, float, str, bytes, type(None))


@attrs.frozen
class Line:
    """What is recorded of one name."""

    since: str
    """The version of the plugin API that added it: ``"1.0"``."""
    kind: str
    text: str
    """A signature, the bases of a class, the type of a field, or a value."""


Names = Mapping[str, Line]

# -- as it is now ------------------------------------------------------------------------------------


def names_now() -> dict[str, Line]:
    """Every public name, in the order of the doors."""
    since = "{}.{}".format(*hookspecs.PLUGIN_API)
    found: dict[str, Line] = {}
    public: dict[type, str] = {}
    shown = [(f"{door.__name__}.{name}", getattr(door, name)) for door in DOORS for name in door.__all__]
    for room, names in WIRE.items():
        module = importlib.import_module(room)
        shown += [(f"{room}.{name}", getattr(module, name)) for name in names]
    classes = [(path, value) for path, value in shown if isinstance(value, type)]
    for path, value in classes:
        public.setdefault(value, path)
    for path, value in classes:
        for name, inner in inspect.getmembers_static(value, inspect.isclass):
            places = {cls.__qualname__ for cls in value.__mro__ if cls.__module__.startswith("kvplug")}
            stands_there = inner.__qualname__.rpartition(".")[0] in places
            if stands_there and not name.startswith("_") and inner not in public:
                public[inner] = f"{path}.{name}"
                shown.append((public[inner], inner))
    for path, value in shown:
        for name, kind, text in _lines_of(path, value, public):
            found[name] = Line(since, kind, text)
    for hook in hookspecs.OFFERED:
        found[f"hook {hook}"] = Line(since, "function", _signature(getattr(hookspecs, hook)))
    return found


def _lines_of(path: str, value: Any, public: Mapping[type, str]) -> Iterator[tuple[str, str, str]]:
    if isinstance(value, type) and public[value] != path:
        yield path, "class", public[value]  # which has its members
    elif isinstance(value, type):
        bases = [_base(each, public) for each in value.__mro__[1:]]
        yield path, "class", ", ".join(filter(None, bases))
        if not path.startswith("kvplug_testing."):  # what a suite consists of may change
            for name, kind, text in _members(value, public):
                yield f"{path}.{name}", kind, text
    elif inspect.isroutine(value):
        yield path, "function", _signature(value)
    elif isinstance(value, VALUES):
        yield path, "constant", repr(value)
    elif isinstance(value, pluggy.HookimplMarker):
        yield path, "constant", ""
    else:
        yield path, "constant", type(value).__name__ if isinstance(value, enum.Enum) else ""


def _base(cls: type, public: Mapping[type, str]) -> str:
    if cls.__module__ == "builtins":
        return "" if cls is object else cls.__name__
    return public.get(cls, "")


def _members(cls: type, public: Mapping[type, str]) -> Iterator[tuple[str, str, str]]:
    """Its own, and those of bases that are not public themselves."""
    has_fields = attrs.has(cls) and "__attrs_attrs__" in vars(cls)
    fields = {field.name: field for field in attrs.fields(cls)} if has_fields else {}
    if fields and any(field.init for field in fields.values()) and "__init__" in vars(cls):
        yield "__init__", "method", _signature_of_fields(fields.values())
    elif "__init__" in vars(cls) and not issubclass(cls, enum.Enum):
        signature = _signature(vars(cls)["__init__"])
        if _names_only_public(signature, public):  # otherwise kvplug alone makes them
            yield "__init__", "method", signature
    subclassed = bool(getattr(cls, "__abstractmethods__", None)) or cls is kvplug.transport.DeviceCommunicator
    for name in dir(cls):
        owner = next(base for base in cls.__mro__ if name in vars(base) or base is object)
        if not owner.__module__.startswith("kvplug") or (owner is not cls and owner in public):
            continue
        raw = vars(owner)[name]
        inner = getattr(raw, "__func__", None) or getattr(raw, "fget", None) or raw
        is_abstract = getattr(raw, "__isabstractmethod__", False)
        is_theirs = is_abstract or (subclassed and name in PROTECTED)
        if isinstance(raw, type):
            continue  # a line of its own
        if name.startswith("__") or (name.startswith("_") and not is_theirs) or name in fields:
            continue
        if isinstance(raw, classmethod):
            yield name, "class method", _signature(inner)
        elif isinstance(raw, staticmethod):
            yield name, "static method", _signature(inner)
        elif isinstance(raw, property) or inspect.isdatadescriptor(raw) or hasattr(raw, "attrname"):
            yield name, "abstract property" if is_abstract else "property", _type_of(inner)
        elif inspect.isfunction(raw):
            yield name, ABSTRACT if is_abstract else "method", _signature(raw)
        elif isinstance(raw, enum.Enum):
            yield name, "member", repr(raw.value)
        else:
            yield name, "class attribute", repr(raw) if isinstance(raw, VALUES) else ""
    for name, field in fields.items():
        if not name.startswith("_"):
            yield name, "field", _text_of_type(field.type)


def _names_only_public(signature: str, public: Mapping[type, str]) -> bool:
    known = {path.rpartition(".")[2] for path in public.values()} | PUBLIC_ELSEWHERE
    return set(re.findall(r"\b[A-Z][a-z]\w+", signature)) <= known


def _type_of(getter: Any) -> str:
    return _text_of_type(getattr(getter, "__annotations__", {}).get("return"))


def _text_of_type(of: Any) -> str:
    if of is None or of is inspect.Parameter.empty:
        return ""
    return of if isinstance(of, str) else getattr(of, "__name__", repr(of))


def _text_of_default(value: object) -> str:
    return repr(value) if type(value) in VALUES else "..."


def _signature(function: Any) -> str:
    """As Python writes it; a default that is no plain value is ``...``."""
    signature = inspect.signature(function)

    def shown(value: Any, text: Callable[[Any], str]) -> Any:
        return value if value is inspect.Parameter.empty else _Text(text(value))

    parameters = [
        each.replace(
            annotation=shown(each.annotation, _text_of_type), default=shown(each.default, _text_of_default)
        )
        for each in signature.parameters.values()
    ]
    returns = _text_of_type(signature.return_annotation)
    return str(inspect.Signature(parameters)) + (f" -> {returns}" if returns else "")


class _Text(str):
    """A part of a signature, shown as it is."""

    def __repr__(self) -> str:
        return str(self)


def _signature_of_fields(fields: Any) -> str:
    positional, named = [], []
    for field in fields:
        if field.init:
            text = f"{field.alias}: {_text_of_type(field.type)}"
            if field.default is not attrs.NOTHING:
                text += f" = {_text_of_default(field.default)}"
            (named if field.kw_only else positional).append(text)
    return f"({', '.join(['self', *positional, *(['*', *named] if named else [])])})"


# -- the record --------------------------------------------------------------------------------------


def differences(old: Names, new: Names) -> list[str]:
    """What is recorded, and is gone or another: a sentence for each name."""
    said = []
    for name, was in old.items():
        now = new.get(name)
        if now is None:
            said.append(f"{name} is gone")
        elif (was.kind, was.text) != (now.kind, now.text):
            said.append(f"{name} was {was.kind} {was.text}, and is {now.kind} {now.text}")
    return said


def recorded() -> dict[str, Line]:
    """The names of the record, a line each: since, kind, name and text, separated by `` | ``."""
    names = {}
    for line in RECORD.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            since, kind, name, text = f"{line} ".split(" | ", 3)
            names[name] = Line(since, kind, text.strip())
    return names


def written(names: Names) -> str:
    title = (
        "# The public names of kvplug: the plugin API. Each line begins with the version that added it.\n"
        "# Written by tests/api/public_names.py; docs/explanation/versions.md says what may change.\n"
    )
    return title + "".join(
        f"{line.since} | {line.kind} | {name} | {line.text}".rstrip() + "\n" for name, line in names.items()
    )


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--changed"]):
        print(f"python {sys.argv[0]} [--changed]", file=sys.stderr)
        return 2
    old, now = recorded(), names_now()
    said = differences(old, now)
    for line in (*said, *(f"{name} is new" for name in now if name not in old)):
        print(line)
    if said and not arguments:
        return 1
    kept = {name: attrs.evolve(line, since=old.get(name, line).since) for name, line in now.items()}
    RECORD.write_text(written(kept), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
