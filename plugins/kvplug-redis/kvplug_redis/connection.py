"""Makes clients of Redis and Valkey from options, and explains their errors to an operator."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import valkey
from valkey.backoff import NoBackoff
from valkey.cluster import ClusterNode, ValkeyCluster
from valkey.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError as LateError,
    ValkeyError,
)
from valkey.retry import Retry
from valkey.sentinel import MasterNotFoundError, Sentinel

from kvplug import ConfigError, TimeoutError, TransportError
from kvplug.transport import Address, BlockingStore, MissReason, close_after_fork
from kvplug_redis.landing import LandingParser, LongReplyError
from kvplug_redis.options import PORTS, RedisOptions

_MAX_PASSWORD_BYTES: Final = 4096
_FULL: Final = "the server is full: raise maxmemory, or lower options.redis.size"
_REPLICA: Final = "the server is a read-only replica: give the address of its primary"


class NoRoomError(Exception):
    """The server has no memory for a value, and its policy evicts nothing."""


class Client:
    """A client that is made at its first use, since a cluster's client connects to the nodes at once."""

    def __init__(self, options: RedisOptions, *, timeout_s: float | None = None) -> None:
        """Raises ConfigError: as :func:`prepared`."""
        self._make = prepared(options, timeout_s=timeout_s)
        self._lock = threading.Lock()
        self._made: Any = None
        close_after_fork(self)

    def _after_fork_in_child(self) -> None:
        made, self._made = self._made, None
        for pool in _pools_of(made):
            for connection in (*pool._available_connections, *pool._in_use_connections):
                if (sock := connection._sock) is not None:
                    sock.close()  # the parent still uses it

    def get(self) -> Any:
        """Raises the client's errors if its servers do not answer."""
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def close(self) -> None:
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            made.close()
            for pool in _pools_of(made):
                pool.disconnect()


def _pools_of(client: Any) -> list[Any]:
    """The connection pools of a client: one, or one for each node of a cluster."""
    if client is None:
        return []
    if (pool := getattr(client, "connection_pool", None)) is not None:
        return [pool]
    nodes = client.nodes_manager.nodes_cache.values()
    return [node.valkey_connection.connection_pool for node in nodes if node.valkey_connection is not None]


def prepared(options: RedisOptions, *, timeout_s: float | None = None) -> Callable[[], Any]:
    """A function that makes a client with these options.

    Args:
        timeout_s: replaces the options' timeout.

    Raises:
        ConfigError: an address is wrong, or a file cannot be used.
    """
    within = options.timeout_s if timeout_s is None else timeout_s
    common: dict[str, Any] = {
        "username": options.user,
        "password": password_of(options.password_file, "password_file"),
        "socket_timeout": within,
        "socket_connect_timeout": within,
        "retry": Retry(NoBackoff(), 1),  # the server may have closed an idle connection
        "retry_on_error": [valkey.ConnectionError],
        "protocol": 2,
        "client_name": "kvplug",
        **_tls(options),
    }
    if options.user is not None and common["password"] is None:
        raise ConfigError("options.redis.password_file: nothing was given; user needs it")
    if options.mode == "single":
        if len(options.address) != 1:
            raise ConfigError(
                f"options.redis.address: {len(options.address)} servers were given, but mode is single;"
                " set it to sentinel or cluster"
            )
        return functools.partial(valkey.Valkey, connection_pool=_pool(options, common))
    servers = [_server(each, options.mode) for each in options.address]
    if options.mode == "sentinel":
        sentinel = Sentinel(servers, sentinel_kwargs=common, **common)
        more = {**common, "parser_class": LandingParser, "db": options.db}
        return functools.partial(sentinel.master_for, options.service, **more)
    if options.db:
        raise ConfigError(f"options.redis.db: {options.db} was given; a cluster has only number 0")
    return functools.partial(
        ValkeyCluster,
        startup_nodes=[ClusterNode(host, port) for host, port in servers],
        parser_class=LandingParser,
        cluster_error_retry_attempts=1,
        **common,
    )


def _pool(options: RedisOptions, common: dict[str, Any]) -> Any:
    (address,) = options.address
    server = Address.parse_server(address, PORTS["single"])
    if not server.is_unix:
        where: dict[str, Any] = {"host": server.host, "port": server.port}
        kind = valkey.SSLConnection if options.tls else valkey.Connection
    else:
        if options.tls:
            raise ConfigError("options.redis.tls: it is set, but a Unix socket never leaves the host")
        where, kind = {"path": server.sockaddr}, valkey.UnixDomainSocketConnection
    given = {key: value for key, value in common.items() if key != "ssl"}
    if server.is_unix:
        del given["socket_connect_timeout"]
    return valkey.ConnectionPool(
        connection_class=kind, parser_class=LandingParser, db=options.db, **where, **given
    )


def _server(address: str, mode: str) -> tuple[str, int]:
    server = Address.parse_server(address, PORTS[mode])
    if server.is_unix:
        raise ConfigError(f"options.redis.address: {address!r} was given; a {mode} has addresses host:port")
    return server.host, server.port


def password_of(path: str | None, key: str) -> str | None:
    """The file's content.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(_MAX_PASSWORD_BYTES).strip()
    except (OSError, ValueError) as e:
        raise ConfigError(f"options.redis.{key}: the file cannot be read: {e}") from e


def _tls(options: RedisOptions) -> dict[str, Any]:
    files = {"tls_ca": options.tls_ca, "tls_cert": options.tls_cert, "tls_key": options.tls_key}
    if not options.tls:
        if given := [key for key, path in files.items() if path is not None]:
            raise ConfigError(f"options.redis.{given[0]}: a file was given, but tls is not set")
        return {}
    if (options.tls_cert is None) != (options.tls_key is None):
        missing = "tls_key" if options.tls_key is None else "tls_cert"
        raise ConfigError(f"options.redis.{missing}: nothing was given; a client's certificate needs both")
    for key, path in files.items():
        if path is not None:
            try:
                with open(path, "rb"):
                    pass
            except OSError as e:
                raise ConfigError(f"options.redis.{key}: the file cannot be read: {e}") from e
    return {
        "ssl": True,
        "ssl_ca_certs": options.tls_ca,
        "ssl_certfile": options.tls_cert,
        "ssl_keyfile": options.tls_key,
        "ssl_check_hostname": options.tls_check_host,
    }


@contextlib.contextmanager
def mapped_errors() -> Iterator[None]:
    """Translate the client's errors into ones that an operator can act on.

    Raises:
        PermissionError: the server is a read-only replica, or the user may not write.
        NoRoomError: the server is full.
        BlockingStore.PageError: another program has put a value of another type, or a longer one, under a
            key.
        TimeoutError: the server does not answer in time.
        TransportError: any other error.
    """
    try:
        yield
    except (PermissionError, NoRoomError, TransportError, TimeoutError):  # from a nested block
        raise
    except LongReplyError as e:
        raise BlockingStore.PageError(MissReason.UNREADABLE, str(e)) from e
    except LateError as e:
        raise TimeoutError(f"the server does not answer: {_brief(e)}") from e
    except ReadOnlyError as e:
        raise PermissionError(_REPLICA) from e
    except OutOfMemoryError as e:
        raise NoRoomError(_FULL) from e
    except NoPermissionError as e:
        raise PermissionError(
            f"the ACL user lacks a right ({e}); see the ACL line in kvplug-redis' readme"
        ) from e
    except AuthenticationError as e:
        raise TransportError(f"the server rejects user and password_file: {_brief(e)}") from e
    except MasterNotFoundError as e:
        raise TransportError(f"no sentinel knows the service: {e}") from e
    except BusyLoadingError as e:
        raise TransportError("the server is loading its data") from e
    except ClusterDownError as e:
        raise TransportError(f"the cluster is down: {e}") from e
    except ResponseError as e:
        text = str(e)
        if "OOM command not allowed" in text:  # errors in a script have this class
            raise NoRoomError(_FULL) from e
        if "READONLY" in text:
            raise PermissionError(_REPLICA) from e
        if "WRONGTYPE" in text:
            raise BlockingStore.PageError(MissReason.UNREADABLE, "a key holds a value of another type") from e
        if text.startswith(("MOVED", "ASK ")):
            text = "it is a node of a cluster: set options.redis.mode to cluster"
        elif "cluster support disabled" in text:
            text = "it is not a node of a cluster: set options.redis.mode to single"
        elif "DB index" in text:
            text = f"{text}: it has no database with the number in options.redis.db"
        raise TransportError(f"the server refuses: {text}") from e
    except (ValkeyError, OSError) as e:
        hint = ""
        if "CERTIFICATE_VERIFY_FAILED" in str(e):
            named = "mismatch" in str(e) or "not valid for" in str(e)
            hint = (
                "; see options.redis.address and options.redis.tls_check_host"
                if named
                else "; see options.redis.tls_ca"
            )
        elif "Connection reset" in str(e) or "WRONG_VERSION" in str(e):
            hint = "; if one end uses TLS and the other does not, see options.redis.tls"
        raise TransportError(f"the server does not answer: {_brief(e)}{hint}") from e


def _brief(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error))[:300]
