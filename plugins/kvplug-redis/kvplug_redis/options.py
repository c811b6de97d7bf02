"""Options of the store and of the directory "redis"."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import attrs

from kvplug.transport import Address, option

_PREFIX: Final = re.compile(r"[\x21-\x7e]{1,100}")


PORTS: Final = {"single": 6379, "sentinel": 26379, "cluster": 6379}


def _addresses(_: Any, __: Any, given: tuple[str, ...]) -> None:
    if not given:
        raise ValueError("allowed is at least one server")
    for each in given:
        Address.parse_server(each, PORTS["single"])


def _prefix(_: Any, __: Any, given: str) -> None:
    if not _PREFIX.fullmatch(given) or set("{}*?[]\\") & set(given):
        raise ValueError("allowed are up to 100 printable characters, without white space and {}*?[]\\")


@attrs.frozen(kw_only=True)
class RedisOptions:
    """Options of the store "redis", and of the directory of that name, whose servers are in its URL."""

    address: tuple[str, ...] = option(
        default=("127.0.0.1:6379",),
        help="The server as host:port or unix:/path. Several for sentinels, or nodes of a cluster.",
        validator=_addresses,
    )
    mode: Literal["single", "sentinel", "cluster"] = option(
        default="single",
        help="What the address is: one server, its sentinels, or nodes of a cluster.",
    )
    service: str = option(default="mymaster", help="Name of the server at the sentinels.")
    db: int = option(default=0, at_least=0, help="Number of the database. A cluster has only number 0.")
    user: str | None = option(default=None, help="Name of the ACL user. Default: the server's default user.")
    password_file: str | None = option(
        default=None, help="File with the password. Surrounding white space is ignored."
    )
    tls: bool = option(default=False, help="Connect with TLS.")
    tls_ca: str | None = option(
        default=None, help="PEM file with the authority that signed the server's certificate."
    )
    tls_cert: str | None = option(
        default=None, help="PEM file with this client's certificate, if the server asks for one."
    )
    tls_key: str | None = option(default=None, help="PEM file with the private key of tls_cert.")
    tls_check_host: bool = option(
        default=True, help="Whether the server's certificate must name the host of the address."
    )
    prefix: str = option(
        default="kvplug",
        help="Prefix of all key names. Deployments that share a server have different ones.",
        validator=_prefix,
    )
    size: int | None = option(
        default=None,
        unit="bytes",
        at_least=1,
        help="Bytes of the server's memory that the pages of this prefix may use, with headers and the"
        " server's overhead; equal for all clients. None: the server's maxmemory and its policy decide.",
    )
    ttl_s: float | None = option(
        default=None,
        unit="seconds",
        at_least=1,
        help="Pages that are unused for this long expire. None: pages do not expire.",
    )
    connections: int = option(
        default=4, at_least=1, help="How many connections read and write pages at the same time."
    )
    piece_bytes: int = option(
        default=2**20 - 2**12,  # with the server's own header it takes 1 MiB, not 1.25
        unit="bytes",
        at_least=4096,
        at_most=2**20,
        help="Size of the largest value. Larger pages are split into pieces.",
    )
    touch_s: float = option(
        default=1.0,
        unit="seconds",
        at_least=0,
        help="A read is recorded as a use of its page if the last recorded use is older than this.",
    )
    timeout_s: float = option(
        default=5.0,
        unit="seconds",
        above=0,
        help="How long a server may take to answer before its connection counts as lost.",
    )
