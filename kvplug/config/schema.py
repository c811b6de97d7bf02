"""The form of each value of a configuration, and the rules between keys."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Final

import attrs

from kvplug.config.addresses import (
    LAST_PORT,
    MAX_UNIX_BYTES,
    TcpAddress,
    check_host,
    check_unix_path,
    parse_address,
    parse_server,
)
from kvplug.config.messages import bad_value, nearest
from kvplug.errors import ConfigError

NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*:)?[a-z][a-z0-9-]{0,39}")
DEVICE = re.compile(r"([a-z][a-z_]*)(?::[0-9]{1,4})?")
DEVICE_TYPES: Final = (
    *("cpu", "cuda", "ipu", "xpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga", "maia", "xla"),
    *("lazy", "vulkan", "mps", "meta", "hpu", "mtia", "privateuseone"),
    *("npu", "mlu", "musa"),
)
"""torch's device types, followed by names that backends outside torch give to ``privateuseone``."""
_MAX_HOST_BYTES: Final = 89
"""Of the name or path of a Unix socket as ``host``: numbers of workers and sockets are appended."""
_CPU = "[0-9]{1,5}(?:-[0-9]{1,5})?"
_CPUS = re.compile(rf"all|inherit|{_CPU}(?:,{_CPU})*")
HASH = re.compile(r"[a-z][a-z0-9_]{0,31}")


def matches(pattern: re.Pattern[str], allowed: str) -> Any:
    def check(_: Any, __: Any, value: Any) -> None:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(f"allowed is {allowed}")

    return check


engine_id_form = matches(
    re.compile(r"[\x21-\x7e]{1,200}"), "up to 200 printable characters without white space"
)
weights_form = matches(re.compile(r"[\x20-\x7e]{0,200}"), "up to 200 printable characters")
integrity_form = matches(HASH, '"auto", "off" or the name of a hash')
A_NAME = 'a name as `kvplug list` shows it, or "distribution:name"'
name_form = matches(NAME, A_NAME)


def option_tables(value: Any) -> Mapping[str, Mapping[str, Any]]:
    return {str(name): dict(table) for name, table in value.items()}


def chosen(_: Any, __: Any, value: Any) -> None:
    if value == "auto":
        raise ValueError(f"allowed is {A_NAME}; a connector is not chosen automatically")
    name_form(None, None, value)


def host_form(_: Any, __: Any, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError("allowed is text")
    if value.startswith("unix:/"):
        check_unix_path(value.removeprefix("unix:"), _MAX_HOST_BYTES)
    elif value.startswith("unix:"):
        name = value.removeprefix("unix:@")
        if name == value or ":" in name or not name:
            raise ValueError("a Unix socket is written unix:@name, or unix:/path for one in the file system")
        parse_address(f"{value}{'-' * (MAX_UNIX_BYTES - _MAX_HOST_BYTES)}")
    elif "://" in value or re.fullmatch(r"[^:]+:[0-9]+|\[.*\].*", value):
        raise ValueError("allowed is a host alone, without scheme, brackets or port; the port is set by port")
    else:
        check_host(value)


def each_one(check_one: Any) -> Any:
    """The form of a list: that of each element, none of which comes twice."""

    def check(instance: Any, attribute: Any, values: Any) -> None:
        faults: list[str] = []
        for value in values:
            try:
                check_one(instance, attribute, value)
            except ConfigError as e:
                faults += e.faults
        if faults:
            raise ConfigError(*faults)
        if len(set(values)) != len(values):
            raise ValueError("allowed is each once")

    return check


DIRECTORY_URL = re.compile(r"([a-z][a-z0-9-]{0,39})://(\S+)")
"""A directory of engines: its name, and what that makes of the rest."""


def peer_form(_: Any, __: Any, value: Any) -> None:
    if isinstance(value, str) and directory_of(value) is not None:
        return
    if isinstance(value, str) and "://" in value:
        raise ValueError('a directory of engines is written as a URL, such as "redis://10.0.0.7:6379/0"')
    address = parse_server(value if isinstance(value, str) else "")
    if isinstance(address, TcpAddress) and address.host in ("0.0.0.0", "::"):  # noqa: S104 - it is refused
        raise ConfigError(f"{value!r} is not a peer: {address.host} stands for every interface of a host")


def cpus_form(_: Any, __: Any, value: Any) -> None:
    if not isinstance(value, str) or not _CPUS.fullmatch(value):
        raise ValueError('allowed is "all", "inherit", or a list of CPUs such as "0-3,8"')
    for first, last in re.findall(r"(\d+)-(\d+)", value):
        if int(first) > int(last):
            raise ValueError(f"the range {first}-{last} has no CPU; its lower end is first")


def may_be_device_type(name: str) -> bool:
    """Whether a backend outside torch may use this device type. A name close to a known one is a typo."""
    if name in DEVICE_TYPES:
        return True
    if name == "gpu" or not re.fullmatch("[a-z][a-z_]*", name):
        return False
    if any(sorted(name) == sorted(known) for known in DEVICE_TYPES):  # two letters change places
        return False
    return not difflib.get_close_matches(name, DEVICE_TYPES, n=1, cutoff=0.8)


def device_form(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    found = DEVICE.fullmatch(value) if isinstance(value, str) else None
    near = None
    if found is not None:
        if may_be_device_type(found[1]):
            return
        near = nearest("cuda" if found[1] == "gpu" else found[1], DEVICE_TYPES)
    hint = f"; did you mean {near!r}?" if near else ""
    allowed = 'a device such as "cpu", "cuda" or "cuda:1"'
    raise ConfigError(bad_value(attribute.name, value, allowed, reason=hint, meant=near))


def count(what: str) -> Any:
    def check(_: Any, __: Any, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"allowed is {what}")

    return check


def directory_of(peer: str) -> str | None:
    """The name of the directory that an element of ``peers`` stands for; ``None``: it is an address."""
    found = DIRECTORY_URL.fullmatch(peer)
    return None if found is None else found[1]


TLS_KEYS = ("tls_cert", "tls_key", "tls_ca")
"""They turn TLS on: all of them, or none."""


def cross_faults(values: Mapping[str, Any]) -> list[str]:
    """Faults between keys. Keys that are missing in ``values`` had faults of their own."""
    faults = []
    port, offset, host = values.get("port"), values.get("port_offset"), values.get("host", "")
    if port is not None and offset is not None and not host.startswith("unix:"):
        first = port + offset
        if first > LAST_PORT:
            faults.append(
                f"port: {port} was given; with port_offset {offset} rank 0 would listen at {first}, and the"
                f" last port is {LAST_PORT}"
            )
    heartbeat, timeout = values.get("heartbeat_timeout_s"), values.get("timeout_s")
    if heartbeat is not None and timeout is not None and heartbeat > timeout:
        faults.append(
            f"heartbeat_timeout_s: {heartbeat:g} was given; allowed is at most timeout_s ({timeout:g}), or"
            " calls would give up before the death of a peer is noticed"
        )
    directories = [peer for peer in values.get("peers", ()) if directory_of(peer)]
    if len(directories) > 1:
        faults.append(f"peers: {len(directories)} directories were given; allowed is one, beside addresses")
    missing = [key for key in TLS_KEYS if not values.get(key)]
    given = [key for key in TLS_KEYS if key not in missing]
    if given and missing:
        faults.append(f"{missing[0]}: nothing was given; TLS needs it, since {given[0]} is set")
    if given and host.startswith("unix:") and not values.get("peers"):
        faults.append(
            f"{given[0]}: a file was given, and host is {host!r}; TLS is for TCP, and a Unix socket never"
            " leaves the host: remove one of the two"
        )
    return faults
