"""The directory "etcd": entries under keys with a prefix, which etcd deletes when their lease has ended."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from kvplug import ConfigError
from kvplug.transport import Address, Deadline, Directory
from kvplug_etcd.gateway import EtcdError, Gateway, tls_context
from kvplug_etcd.options import EtcdOptions

_URL: Final = re.compile(r"etcd://(?P<servers>[^/?#@]+)(?:/(?P<prefix>[A-Za-z0-9._/-]{1,200}))?")
_PORT: Final = 2379
_NOT_FOUND: Final = 5
"""gRPC's code of an expired lease."""
_MAX_PASSWORD_BYTES: Final = 4096


class EtcdDirectory(Directory):
    """Announcements in etcd 3.4 or later, through its JSON gateway, as keys ``PREFIX/NAME`` with a lease.

    A lease lasts at least a second, and at least etcd's minimum: about two seconds with its usual settings.
    """

    def __init__(self, context: Directory.Context) -> None:
        """Raises ConfigError: the URL or the options are wrong, or a file cannot be used."""
        options: EtcdOptions = context.options
        servers, prefix = _parsed(context.url)
        self._prefix = f"{prefix}/".encode()
        self._timeout_s = context.timeout_s
        self._gateway = Gateway(
            servers,
            context=tls_context(options.tls_ca, options.tls_cert, options.tls_key),
            user=options.user,
            password=_password(options),
            timeout_s=context.timeout_s,
        )
        self._lease = ""
        """The id of our lease; empty if there is none."""
        self._kept: dict[str, bytes] = {}
        """Entries by name under that lease."""

    def announce(self, name: str, entry: bytes, lease_s: float) -> None:
        deadline = Deadline.after(self._timeout_s)
        if self._lease and not self._is_alive(deadline):
            self._lease, self._kept = "", {}
        if not self._lease:
            granted = self._gateway.call("lease/grant", deadline, TTL=max(1, math.ceil(lease_s)))
            self._lease = str(granted["ID"])
        if self._kept.get(name) != entry:
            key, value = self._key(name), _text(entry)
            try:
                self._gateway.call("kv/put", deadline, key=key, value=value, lease=self._lease)
            except EtcdError as e:
                if e.grpc_code == _NOT_FOUND:
                    self._lease, self._kept = "", {}
                raise
            self._kept[name] = entry

    def _is_alive(self, deadline: Deadline) -> bool:
        """Renew the lease. Returns whether it was still valid. Forgets our entries if one was changed."""
        answer = self._gateway.call("lease/keepalive", deadline, ID=self._lease).get("result", {})
        if int(answer.get("TTL", 0)) <= 0:
            return False
        for name, entry in self._kept.items():
            found = self._gateway.call("kv/range", deadline, key=self._key(name)).get("kvs", [])
            if not found or _bytes(found[0].get("value", "")) != entry:
                self._kept = {}  # another process has replaced or removed it
                break
        return True

    def withdraw(self, name: str) -> None:
        deadline = Deadline.after(self._timeout_s)
        self._kept.pop(name, None)
        self._gateway.call("kv/deleterange", deadline, key=self._key(name))

    def entries(self) -> Mapping[str, bytes]:
        end = self._prefix[:-1] + bytes([self._prefix[-1] + 1])
        answer: Mapping[str, Any] = self._gateway.call(
            "kv/range", key=_text(self._prefix), range_end=_text(end)
        )
        begin = len(self._prefix)
        return {
            _bytes(each["key"])[begin:].decode("ascii", "replace"): _bytes(each.get("value", ""))
            for each in answer.get("kvs", [])
        }

    def _key(self, name: str) -> str:
        return _text(self._prefix + name.encode("ascii"))

    def close(self) -> None:
        self._gateway.close()


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _parsed(url: str) -> tuple[list[str], str]:
    """The servers, and the prefix of the keys.

    Raises:
        ConfigError: the URL has another form.
    """
    form = "allowed is etcd://host:2379, with more servers after commas and a key prefix after a slash"
    found = _URL.fullmatch(url)
    if found is None:
        raise ConfigError(f"peers: the URL of etcd is wrong; {form}; users and passwords are options")
    servers = []
    for each in found["servers"].split(","):
        try:
            server = Address.parse_server(each, _PORT)
        except ConfigError as e:
            raise ConfigError(f"peers: {e.faults[0]}; {form}") from e
        if server.is_unix:
            raise ConfigError(f"peers: {each!r} is not a server of etcd; {form}")
        servers.append(str(server))
    return servers, (found["prefix"] or "kvplug/members").rstrip("/")


def _password(options: EtcdOptions) -> str | None:
    if (options.user is None) != (options.password_file is None):
        missing = "password_file" if options.password_file is None else "user"
        raise ConfigError(f"options.etcd.{missing}: nothing was given; user and password_file go together")
    if options.password_file is None:
        return None
    try:
        with open(options.password_file, encoding="utf-8") as file:
            return file.read(_MAX_PASSWORD_BYTES).strip()
    except (OSError, ValueError) as e:
        raise ConfigError(f"options.etcd.password_file: the file cannot be read: {e}") from e
