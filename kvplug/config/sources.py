"""Sources of configuration. Each source becomes a :class:`Layer` of plain values with its faults.

This module only checks the form of the sources. :class:`~kvplug.config.Draft` combines them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Mapping
from typing import Any, Final

import attrs

from kvplug.config.messages import Fault, bad_value, in_place_of, nearest, shown, unknown_key
from kvplug.errors import ConfigError

PREFIX: Final = "KVPLUG_"
_OPTION: Final = re.compile(r"kvplug_options__((?:(?!__).)+)__((?:(?!__).)+)")
_OPTION_FORM: Final = "KVPLUG_OPTIONS__<NAME>__<OPTION>"

RESERVED: Final[Mapping[str, str]] = {
    "KVPLUG_SECRET": "the secret both ends share; at least 16 bytes",
    "KVPLUG_STRICT_PLUGINS": "1: a plugin that does not load is an error instead of a line in `kvplug list`",
    "KVPLUG_DISABLE_PLUGINS": "names of plugins, with commas between them, that are not even imported",
    "KVPLUG_LOG": "the command line's log: debug, info, warning or error, json, or both as in debug,json",
    "KVPLUG_DEBUG": "1: the command line shows the traceback of an error",
    "KVPLUG_CONFIG": "file that Config.load and the command line read when none is named",
    "KVPLUG_NCCL_LIBRARY": "path of the NCCL library, for plugins that load it",
    "KVPLUG_CUDART_LIBRARY": "path of the CUDA runtime, for plugins that load it",
    "KVPLUG_CACHE": "folder for what is made once and kept, such as converted models",
}
"""Variables that are not configuration keys, with their purposes."""

RESERVED_PREFIXES: Final[Mapping[str, str]] = {
    "KVPLUG_LOG_": "more about logging, for programs around kvplug",
    "KVPLUG_TEST_": "for kvplug's own tests",
}
"""Prefixes of further such variables, with their purposes."""

_KUBERNETES = re.compile(r"KVPLUG_(SERVICE_(HOST|PORT)\w*|PORT_\d+_(TCP|UDP|SCTP)\w*)")
_SECRET_WORDS = ("secret", "password", "token")

VLLM_KEYS: Final[Mapping[str, str]] = {
    "kv_connector": "connector",
    "kv_role": "role",
    "kv_ip": "host",
    "kv_port": "port",
    "kv_buffer_device": "device",
    "kv_buffer_size": "buffer_size",
    "engine_id": "engine_id",
}
"""Keys of vLLM's ``--kv-transfer-config``, and kvplug's equivalents."""

VLLM_EXTRA: Final = "kv_connector_extra_config"
VLLM_IGNORED: Final = (
    *("kv_connector_module_path", "kv_load_failure_policy", "enable_permute_local_kv", "kv_rank"),
    "kv_parallel_size",
)
"""Keys that only vLLM itself needs: the module of its connector class, the policy for failed loads, a
conversion that kvplug does itself, the rank of this instance, and the number of instances."""

_OUR_NAME = re.compile(r"[a-z][a-z0-9-]*")
_TABLE_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
_UNQUOTED = re.compile(r"""\s*([\w.-]+)\s*=\s*([^\s"'\[{#][^#]*?)\s*(?:#.*)?""")


@attrs.define
class Layer:
    """The values and faults of one source."""

    source: str
    """A file, ``environment``, ``command line``, or the ``source`` that a program passed."""
    values: dict[str, tuple[Any, str]] = attrs.field(factory=dict)
    """Each value and its source: the file, a variable, one of vLLM's keys, or the command line. Options are
    flat, with keys ``options.<name>.<option>``."""
    faults: list[Fault] = attrs.field(factory=list)

    def add(self, data: Mapping[Any, Any], source: str) -> None:
        """Add the values of kvplug's own keys."""
        flat = {str(key): value for key, value in data.items() if key != "options"}
        tables = data.get("options", {})
        if not isinstance(tables, Mapping):
            self.faults.append(bad_value("options", tables, "one table for each name"))
            tables = {}
        for name, table in tables.items():
            if isinstance(table, Mapping):
                flat |= {f"options.{name}.{key}": value for key, value in table.items()}
            else:
                self.faults.append(bad_value(f"options.{name}", table, "a table"))
        self.values |= {key: (value, source) for key, value in flat.items()}


# -- dicts and files -----------------------------------------------------------------------------


def from_mapping(data: Any, source: str) -> Layer:
    """Read a dict from TOML or JSON, with kvplug's keys or those of vLLM's ``--kv-transfer-config``."""
    layer = Layer(source)
    if not isinstance(data, Mapping):
        layer.faults.append(Fault(f"a table of keys and values is needed, got {shown(data)}"))
    elif any(isinstance(key, str) and key.startswith("kv_") for key in data):
        _add_vllm(layer, data)
    else:
        layer.add(data, source)
    return layer


def _add_vllm(layer: Layer, data: Mapping[Any, Any]) -> None:
    """Add vLLM's keys, then kvplug's keys in the extra config, which override them."""
    prefix = f"{layer.source}: " if layer.source else ""
    known = (*VLLM_KEYS, VLLM_EXTRA, *VLLM_IGNORED)
    for key, value in data.items():
        if key in VLLM_KEYS and value is not None:  # vLLM passes None for a key that was not given
            layer.values[VLLM_KEYS[key]] = value, f"{prefix}{key}"
        elif key not in known:
            near = nearest(str(key), known)
            hint = f"did you mean {near!r}?" if near else f"kvplug's own keys go into {VLLM_EXTRA}"
            line = in_place_of(key, near) if near else f"{VLLM_EXTRA}: move {key} into it"
            text = f"{key}: not a key of vLLM's kv-transfer-config; {hint}"
            layer.faults.append(Fault(text, key=key, line=line))
    extra = data.get(VLLM_EXTRA)
    if not isinstance(extra, Mapping):
        if extra is not None:
            layer.faults.append(bad_value(VLLM_EXTRA, extra, "a table of kvplug's keys"))
        extra = {}
    theirs, ours = data.get("kv_connector"), extra.get("connector")
    if isinstance(theirs, str) and not _OUR_NAME.fullmatch(theirs):
        del layer.values["connector"]  # names vLLM's class; the extra config or the default names kvplug's
        if ours is None and theirs != "KvplugConnector":
            allowed = f"a connector of kvplug, or KvplugConnector with the connector's name in {VLLM_EXTRA}"
            layer.faults.append(bad_value("kv_connector", theirs, allowed, meant="KvplugConnector"))
    elif None not in (theirs, ours) and ours != theirs:
        text = (
            f"{shown(theirs)} was given, but {VLLM_EXTRA} has the connector {shown(ours)}; name one of them"
        )
        layer.faults.append(Fault(f"kv_connector: {text}", key="kv_connector", value="KvplugConnector"))
    layer.add(extra, f"{prefix}{VLLM_EXTRA}")


def from_file(path: str | os.PathLike[str]) -> Layer:
    """Read a ``.toml`` or ``.json`` file.

    Raises:
        ConfigError: the file cannot be read, or its content does not match its ending.
    """
    name = os.fspath(path)
    ending = os.path.splitext(name)[1].lower()
    if ending not in (".toml", ".json"):
        raise ConfigError(f"the file's name must end in .toml or .json, not {ending!r}", source=name)
    text = _text_of(name)
    try:
        return from_mapping((_toml if ending == ".toml" else _json)(text), name)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"not {ending[1:].upper()}: {e}", source=name) from e


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8-sig") as f:
            return f.read()
    except UnicodeDecodeError as e:
        line = e.object.count(b"\n", 0, e.start) + 1
        reason = f"line {line} is not UTF-8: it has the byte 0x{e.object[e.start]:02x}"
        raise ConfigError(f"cannot be read: {reason}", source=path) from e
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        raise ConfigError(f"cannot be read: {reason}", source=path) from e


def _toml(text: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        at = re.search(r"at line (\d+)", str(e))
        found = at and _UNQUOTED.fullmatch(text.splitlines()[int(at[1]) - 1])
        if found:
            try:
                tomllib.loads(found[0])
            except tomllib.TOMLDecodeError:
                raise ValueError(f'{e}; text needs quotes: {found[1]} = "{found[2]}"') from e
        raise


def _json(text: str) -> Any:
    import json

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {key!r} is given twice")
            found[key] = value
        return found

    return json.loads(text, object_pairs_hook=once)


# -- environment and command line ----------------------------------------------------------------


def from_environment(environ: Mapping[str, str], known: Iterable[str]) -> Layer:
    """Read ``KVPLUG_<KEY>`` and ``KVPLUG_OPTIONS__<NAME>__<OPTION>``. Underscores in NAME stand for hyphens.

    An empty value counts as not given. Faults do not repeat the values of unknown variables.
    """
    keys = {PREFIX + key.upper(): key for key in known}
    layer, services = Layer("environment"), []
    for name, text in sorted(environ.items()):
        if not name.startswith(PREFIX) or name in RESERVED or name.startswith(tuple(RESERVED_PREFIXES)):
            continue
        if _KUBERNETES.fullmatch(name) or (name == "KVPLUG_PORT" and text.startswith(("tcp://", "udp://"))):
            services.append(name)
        elif name in keys:
            if text.strip():
                layer.values[keys[name]] = text, name
        elif found := _OPTION.fullmatch(name.lower()):
            layer.values[f"options.{found[1].replace('_', '-')}.{found[2]}"] = text, name
        elif name.startswith(f"{PREFIX}OPTION"):
            text = f"the variable of an option is {_OPTION_FORM}, with two underscores in both places"
            layer.faults.append(_of_variable(name, text, _OPTION_FORM))
        else:
            near = nearest(name, (*keys, *RESERVED))
            hint = f"; did you mean {near!r}?" if near else ""
            layer.faults.append(_of_variable(name, f"not a kvplug variable{hint}", near))
    if services:
        text = (
            f"{', '.join(services)}: Kubernetes sets these for a service named kvplug; rename the service, or"
            " set enableServiceLinks: false in the pod"
        )
        line = "enableServiceLinks: false    (in the pod)"
        layer.faults.append(Fault(text, key=services[0], place=services[0], line=line))
    return layer


def _of_variable(name: str, text: str, meant: str | None) -> Fault:
    """Make the fault of an unknown variable. ``meant``: the variable that was most likely meant."""
    line = in_place_of(name, meant) if meant else f"unset {name}"
    return Fault(f"{name}: {text}", key=name, place=name, line=line)


def from_overrides(overrides: Mapping[str, Any] | Iterable[str]) -> Layer:
    """Read overrides: ``{"port": 5000}`` or ``["port=5000", "options.cpu.max_in_flight_bytes=64 MiB"]``."""
    source = "command line"
    if isinstance(overrides, Mapping):
        return from_mapping(overrides, source)
    layer = Layer(source)
    for each in overrides:
        key, equals, text = each.partition("=")
        if not equals or not key.strip():
            layer.faults.append(Fault(f"{shown(each)} was given; allowed is key=value", place=source))
        else:
            layer.values[key.strip()] = text, source
    return layer


# -- options of plugins, and unknown keys -------------------------------------------------------------


def put_option(options: dict[str, dict[str, Any]], key: str, value: Any) -> tuple[Fault, ...]:
    """Set the option with the key ``options.NAME.OPTION``. Return a fault if the key has another form."""
    name, _, setting = key.removeprefix("options.").rpartition(".")
    if _TABLE_NAME.fullmatch(name) and setting:
        options.setdefault(name, {})[setting] = value
        return ()
    text = f"{key}: the key of an option is options.<name>.<option>, with a name that `kvplug list` shows"
    return (Fault(text, key=key, line="[options.NAME]    (a NAME that `kvplug list` shows)"),)


def unknown(key: str, value: Any, known: Iterable[str], given: Container[str]) -> Fault:
    """Make the fault of an unknown key. It never repeats the value, which may be a secret."""
    words = key.lower().replace("tokens", "")  # "page_tokens" is a number
    if "." not in key and any(word in words for word in _SECRET_WORDS):
        text = (
            f"{key}: a configuration must not contain a secret; put it into the variable KVPLUG_SECRET,"
            " or into a file that secret_file names"
        )
        return Fault(text, key=key, line=in_place_of(key, "export KVPLUG_SECRET=..."))
    if isinstance(value, Mapping) and nearest(key, ("options",)) is None:
        text = (
            f"{key}: not a known key; a plugin's options go into a table [options.{key}], and kvplug's own"
            " keys go before all tables"
        )
        return Fault(text, key=key, line=in_place_of(key, f"[options.{key}]"))
    if nearest(key, known) is None:
        text = f"{key}: not a known key; a plugin's options go into a table [options.NAME]"
        return Fault(text, key=key, line=in_place_of(key, f"[options.NAME] {key}"))
    return unknown_key(key, known, given)
