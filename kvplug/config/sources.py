"""Sources of configuration: each source becomes a :class:`Layer` of plain values, with its faults.

This module checks the form of the source only. The keys and values are checked together, after all layers
are merged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from kvplug.config.messages import REMOVED, Fault, bad_value, in_place_of, nearest, shown
from kvplug.config.schema import NAME
from kvplug.errors import ConfigError

PREFIX: Final = "KVPLUG_"

RESERVED: Final[Mapping[str, str]] = {
    "KVPLUG_SECRET": "the secret both ends share; at least 16 bytes",
    "KVPLUG_STRICT_PLUGINS": "1: a plugin that does not load is an error instead of a line in `kvplug list`",
    "KVPLUG_DISABLE_PLUGINS": "names of plugins, with commas between them, that are not even imported",
    "KVPLUG_LOG": "level of the command line's log: debug, info, warning or error",
    "KVPLUG_DEBUG": "1: the command line shows the traceback of an error",
    "KVPLUG_CONFIG": "file that Config.load and the command line read when none is named",
    "KVPLUG_NCCL_LIBRARY": "path of the NCCL library, for plugins that load it",
    "KVPLUG_CUDART_LIBRARY": "path of the CUDA runtime, for plugins that load it",
    "KVPLUG_CACHE": "folder for what is made once and kept, such as converted models",
}
"""Variables that are not configuration keys, and what each is for."""

RESERVED_PREFIXES: Final[Mapping[str, str]] = {
    "KVPLUG_LOG_": "more about logging, for programs around kvplug",
    "KVPLUG_TEST_": "for kvplug's own tests",
}
"""The same for whole families of variables."""

_KUBERNETES = re.compile(r"KVPLUG_(SERVICE_(HOST|PORT)\w*|PORT_\d+_(TCP|UDP|SCTP)\w*)")
_SECRET_WORDS = ("secret", "password", "token")

VLLM_KEYS: Final[Mapping[str, str]] = {
    "kv_connector": "connector",
    "kv_role": "role",
    "kv_ip": "host",
    "kv_port": "port",
    "kv_buffer_device": "device",
    "kv_buffer_size": "buffer_size",
    "kv_load_failure_policy": "failure_policy",
    "engine_id": "engine_id",
}
"""Keys of vLLM's ``--kv-transfer-config``, and ours."""

VLLM_EXTRA: Final = "kv_connector_extra_config"
VLLM_IGNORED: Final = ("kv_connector_module_path", "enable_permute_local_kv", "kv_rank", "kv_parallel_size")
"""Keys that only vLLM itself needs: the module of its connector class, a conversion that kvplug does by
itself, and the number of this instance among the instances."""

_OUR_NAME = re.compile(r"[a-z][a-z0-9-]*")


@attrs.frozen
class SourcedValue:
    """One value and its source."""

    value: Any
    source: str
    spelled: str = ""
    """The key as the source spells it, where that differs; faults show it."""


@attrs.frozen(kw_only=True)
class Layer:
    """The values of one source. Options are flat, with keys ``options.<name>.<option>``."""

    source: str
    values: Mapping[str, SourcedValue]
    faults: tuple[Fault, ...] = ()


# -- dicts and files -----------------------------------------------------------------------------


def from_mapping(data: Any, source: str) -> Layer:
    """From a dict as TOML or JSON give it: kvplug's keys, or those of vLLM's ``--kv-transfer-config``."""
    if not isinstance(data, Mapping):
        fault = Fault(f"a table of keys and values is needed, got {shown(data)}")
        return Layer(source=source, values={}, faults=(fault,))
    if any(isinstance(key, str) and key.startswith("kv_") for key in data):
        return _from_vllm(data, source)
    values, faults = _flattened(data, source)
    return Layer(source=source, values=values, faults=tuple(faults))


def _flattened(data: Mapping[Any, Any], source: str) -> tuple[dict[str, SourcedValue], list[Fault]]:
    values: dict[str, SourcedValue] = {}
    faults: list[Fault] = []
    for key, value in data.items():
        if key != "options":
            values[str(key)] = SourcedValue(value, source)
        elif not isinstance(value, Mapping):
            faults.append(bad_value("options", value, "one table for each name"))
        else:
            for name, table in value.items():
                if not isinstance(table, Mapping):
                    faults.append(bad_value(f"options.{name}", table, "a table"))
                    continue
                for option, setting in table.items():
                    values[f"options.{name}.{option}"] = SourcedValue(setting, source)
    return values, faults


def _from_vllm(data: Mapping[Any, Any], source: str) -> Layer:
    known = (*VLLM_KEYS, VLLM_EXTRA, *VLLM_IGNORED)
    extra = data.get(VLLM_EXTRA)
    faults: list[Fault] = []
    values: dict[str, SourcedValue] = {}
    for key, value in data.items():
        if key in VLLM_KEYS:
            if value is not None:  # vLLM writes None for what was not given
                values[VLLM_KEYS[key]] = SourcedValue(
                    value, f"{source}: {key}" if source else key, spelled=key
                )
        elif key not in known:
            faults.append(_unknown_of_vllm(str(key), known))
    if extra is not None and not isinstance(extra, Mapping):
        faults.append(bad_value(VLLM_EXTRA, extra, "a table of kvplug's keys"))
        extra = None
    if extra is not None and "failure_policy" in extra:
        text = (
            "failure_policy: not for kv_connector_extra_config; vLLM itself decides what becomes of a failed"
            " load, by kv_load_failure_policy beside it"
        )
        line = in_place_of("failure_policy", "kv_load_failure_policy")
        faults.append(Fault(text, key="failure_policy", line=line))
        extra = {key: value for key, value in extra.items() if key != "failure_policy"}
    inner, more = _flattened(extra or {}, f"{source}: {VLLM_EXTRA}" if source else VLLM_EXTRA)
    faults += more
    theirs = values.get("connector")
    if theirs is not None and isinstance(theirs.value, str) and not _OUR_NAME.fullmatch(theirs.value):
        del values["connector"]  # a class of vLLM's; ours is named in the extra config, or the default
        if "connector" not in inner and theirs.value != "KvplugConnector":
            faults.append(
                bad_value(
                    "kv_connector",
                    theirs.value,
                    f"a connector of kvplug, or KvplugConnector with the connector's name in {VLLM_EXTRA}",
                    meant="KvplugConnector",
                )
            )
    elif theirs is not None and "connector" in inner and inner["connector"].value != theirs.value:
        text = (
            f"kv_connector: {shown(theirs.value)} was given, and in {VLLM_EXTRA} the connector"
            f" {shown(inner['connector'].value)}; name one of them"
        )
        faults.append(Fault(text, key="kv_connector", value="KvplugConnector"))
    return Layer(source=source, values={**values, **inner}, faults=tuple(faults))


def _unknown_of_vllm(key: str, known: Iterable[str]) -> Fault:
    near = nearest(key, known)
    hint = f"; did you mean {near!r}?" if near else f"; kvplug's own keys go into {VLLM_EXTRA}"
    line = in_place_of(key, near) if near else f"{VLLM_EXTRA}: {key} goes in there"
    return Fault(f"{key}: not a key of vLLM's kv-transfer-config{hint}", key=key, line=line)


def toml_table(text: str, source: str) -> dict[str, Any]:
    """Raises ConfigError where it is not TOML."""
    import tomllib

    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise ConfigError(f"not TOML: {e}", source=source) from e


def json_value(text: str, source: str) -> Any:
    """Raises ConfigError where it is not JSON, or says a key twice."""
    import json

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {key!r} is there twice")
            found[key] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"not JSON: {e}", source=source) from e


def file_value(path: str | os.PathLike[str]) -> Any:
    """Read a file by its suffix: ``.toml`` or ``.json``.

    Raises:
        ConfigError: it cannot be read, or is not what its ending says.
    """
    name = os.fspath(path)
    ending = os.path.splitext(name)[1].lower()
    if ending not in (".toml", ".json"):
        raise ConfigError(f"the file's name must end in .toml or .json, not {ending!r}", source=name)
    return (toml_table if ending == ".toml" else json_value)(read_text(name), name)


def from_toml_text(text: str, source: str) -> Layer:
    """Raises ConfigError where it is not TOML."""
    return from_mapping(toml_table(text, source), source)


def from_json_text(text: str, source: str) -> Layer:
    """Raises ConfigError where it is not JSON, or says a key twice."""
    return from_mapping(json_value(text, source), source)


def from_file(path: str | os.PathLike[str]) -> Layer:
    """Raises ConfigError as :func:`file_value`."""
    return from_mapping(file_value(path), os.fspath(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """Raises ConfigError where the file cannot be read."""
    try:
        with open(path, encoding="utf-8-sig") as f:
            return f.read()
    except (OSError, UnicodeDecodeError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else e
        raise ConfigError(f"cannot be read: {reason}", source=os.fspath(path)) from e


# -- environment and command line ----------------------------------------------------------------


def from_environment(environ: Mapping[str, str], known: Iterable[str]) -> Layer:
    """``KVPLUG_<KEY>`` and ``KVPLUG_OPTIONS__<NAME>__<OPTION>``; a hyphen in a name is an underscore here.

    A value that is empty counts as not given. Values of unknown variables are not repeated in faults.
    """
    keys = {PREFIX + key.upper(): key for key in known}
    values: dict[str, SourcedValue] = {}
    faults: list[Fault] = []
    services: list[str] = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in RESERVED or name.startswith(tuple(RESERVED_PREFIXES)):
            continue
        text = environ[name]
        if _KUBERNETES.fullmatch(name) or (name == "KVPLUG_PORT" and text.startswith(("tcp://", "udp://"))):
            services.append(name)
        elif name in keys:
            if text.strip():
                values[keys[name]] = SourcedValue(text, name, spelled=name)
        elif name.startswith("KVPLUG_OPTIONS__"):
            parts = name.lower().split("__")
            if len(parts) == 3 and all(parts):
                values[f"options.{parts[1].replace('_', '-')}.{parts[2]}"] = SourcedValue(
                    text, name, spelled=name
                )
            else:
                text = f"{name}: an option's variable is KVPLUG_OPTIONS__<NAME>__<OPTION>"
                faults.append(_of_variable(name, text, "KVPLUG_OPTIONS__<NAME>__<OPTION>"))
        elif name.startswith(f"{PREFIX}OPTION"):
            text = (
                f"{name}: not a variable of kvplug; that of an option is KVPLUG_OPTIONS__<NAME>__<OPTION>,"
                " with two underscores before the name and the option"
            )
            faults.append(_of_variable(name, text, "KVPLUG_OPTIONS__<NAME>__<OPTION>"))
        else:
            key = name.removeprefix(PREFIX).lower()
            near = None if key in REMOVED else nearest(name, (*keys, *RESERVED))
            hint = f"; {REMOVED[key]}" if key in REMOVED else f"; did you mean {near!r}?" if near else ""
            faults.append(_of_variable(name, f"{name}: not a variable of kvplug{hint}", near))
    if services:
        text = (
            f"{', '.join(services)}: Kubernetes sets these for a service named kvplug; rename the service, or"
            " set enableServiceLinks: false in the pod"
        )
        line = "enableServiceLinks: false    (in the pod)"
        faults.append(Fault(text, key=services[0], place=services[0], line=line))
    return Layer(source="environment", values=values, faults=tuple(faults))


def _of_variable(name: str, text: str, meant: str | None) -> Fault:
    """The fault of a variable that is none of kvplug's. ``meant``: the one that was most likely meant."""
    line = in_place_of(name, meant) if meant else f"unset {name}"
    return Fault(text, key=name, place=name, line=line)


def from_overrides(overrides: Mapping[str, Any] | Iterable[str], source: str = "command line") -> Layer:
    """From ``{"port": 5000}`` or ``["port=5000", "options.cpu.max_in_flight_bytes=64 MiB"]``."""
    if isinstance(overrides, Mapping):
        return from_mapping(overrides, source)
    values: dict[str, SourcedValue] = {}
    faults: list[Fault] = []
    for each in overrides:
        key, equals, text = each.partition("=")
        key = key.strip()
        if not equals or not key:
            faults.append(Fault(f"{shown(each)} was given; allowed is key=value", place=source))
        else:
            values[key] = SourcedValue(text, source, spelled=source)
    return Layer(source=source, values=values, faults=tuple(faults))


def secret_fault(key: str) -> Fault | None:
    """The fault of a key that looks like a secret. It never repeats the value."""
    last = key.rpartition(".")[2].lower()
    if "." not in key and any(word in last for word in _SECRET_WORDS):
        text = (
            f"{key}: a secret is never written into a configuration; put it into the variable KVPLUG_SECRET,"
            " or into a file that secret_file names"
        )
        return Fault(text, key=key, line=in_place_of(key, "export KVPLUG_SECRET=..."))
    return None


def put_option(options: dict[str, dict[str, Any]], key: str, value: Any) -> Fault | None:
    """Set the option of the key ``options.NAME.OPTION``; the fault if the key has another form."""
    _, _, rest = key.partition(".")
    name, _, setting = rest.rpartition(".")
    if not name or not setting:
        return Fault(
            f"{key}: an option's key is options.<name>.<option>", key=key, line=f"{key}    (remove it)"
        )
    if ":" in name or not NAME.fullmatch(name):
        return Fault(
            f"options.{name}: not a name as `kvplug list` shows it",
            key=f"options.{name}",
            line="[options.NAME]    (NAME as `kvplug list` shows it)",
        )
    options.setdefault(name, {})[setting] = value
    return None
