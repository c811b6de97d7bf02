"""The directory "redis": entries as keys that expire, and a set of their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import attrs

from kvplug import ConfigError
from kvplug.transport import Directory
from kvplug_redis.connection import Client, mapped_errors
from kvplug_redis.options import RedisOptions

_URL: Final = re.compile(r"redis://(?:(?P<servers>[^/?#@]+)(?:/(?P<db>[0-9]{1,6})?)?|(?P<path>/[^?#]+))")


class RedisDirectory(Directory):
    """Announcements in Redis or Valkey, on the servers of the store "redis" or on others."""

    def __init__(self, context: Directory.Context) -> None:
        """Raises ConfigError: the URL or the options are wrong, or a file cannot be used."""
        options = _with_servers(context.options, context.url)
        self._client = Client(options, timeout_s=context.timeout_s / 3)  # a call connects, and retries once
        begin = f"{{{options.prefix}:members}}"
        self._names = begin.encode()
        self._entry = f"{begin}:".encode()

    def announce(self, name: str, entry: bytes, lease_s: float) -> None:
        with mapped_errors(), self._client.get().pipeline(transaction=False) as pipe:
            pipe.set(self._entry + name.encode("ascii"), entry, px=max(1, int(lease_s * 1000)))
            pipe.sadd(self._names, name.encode("ascii"))
            pipe.execute()

    def withdraw(self, name: str) -> None:
        with mapped_errors(), self._client.get().pipeline(transaction=False) as pipe:
            pipe.delete(self._entry + name.encode("ascii"))
            pipe.srem(self._names, name.encode("ascii"))
            pipe.execute()

    def entries(self) -> Mapping[str, bytes]:
        with mapped_errors():
            client = self._client.get()
            names = sorted(client.smembers(self._names))
            if not names:
                return {}
            found = client.mget([self._entry + name for name in names])
            gone = [name for name, entry in zip(names, found, strict=True) if entry is None]
            if gone:
                client.srem(self._names, *gone)
            pairs = zip(names, found, strict=True)
            return {name.decode("ascii", "replace"): entry for name, entry in pairs if entry is not None}

    def close(self) -> None:
        self._client.close()


def _with_servers(options: RedisOptions, url: str) -> RedisOptions:
    """Raises ConfigError: the URL has another form."""
    found = _URL.fullmatch(url)
    form = (
        "allowed is redis://host:6379/0, more servers after commas, or redis:///path of a Unix socket; users,"
        " passwords and TLS are options"
    )
    if found is None:
        raise ConfigError(f"peers: the URL of redis is wrong; {form}")
    db = options.db if found["db"] is None else int(found["db"])
    servers = (f"unix:{found['path']}",) if found["path"] else tuple(found["servers"].split(","))
    try:
        return attrs.evolve(options, address=servers, db=db)
    except ConfigError as e:
        faults = (fault.removeprefix("address: ") for fault in e.faults)
        raise ConfigError(*(f"peers: {fault}; {form}" for fault in faults)) from e
