"""Makes clients of Redis and Valkey from options, and explains their errors to an operator."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import attrs
import valkey
from valkey.backoff import NoBackoff
from valkey.cluster import PRIMARY, ClusterNode, ValkeyCluster
from valkey.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    ClusterError,
    ConnectionError as LostError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError as LateError,
    TryAgainError,
    ValkeyError,
)
from valkey.retry import Retry
from valkey.sentinel import MasterNotFoundError, Sentinel

from kvplug import ConfigError, TimeoutError, TransportError
from kvplug.transport import Address, BlockingStore, MissReason, close_after_fork
from kvplug_redis.options import PORTS, RedisOptions
from kvplug_redis.replies import (
    LongReplyError,
    ReplyPrimaryConnection,
    ReplyTcpConnection,
    ReplyTlsConnection,
    ReplyTlsPrimaryConnection,
    ReplyUnixConnection,
)

Argument: TypeAlias = bytes | str | int | Sequence[memoryview]
"""Text and numbers are sent as UTF-8."""

_MAX_PASSWORD_BYTES: Final = 4096
_LONG_BYTES: Final = 4096
"""From this length on, it is cheaper to send a part of a value alone than to copy it."""
_REDIRECTIONS: Final = (AskError, TryAgainError)  # MovedError is an AskError
_FULL: Final = "the server is full: raise maxmemory, or lower options.redis.size"
_REPLICA: Final = "the server is a read-only replica: give the address of its primary"


class NoRoomError(Exception):
    """The server has no memory for a value, and its policy evicts nothing."""


@attrs.frozen
class Command:
    """One command of the server."""

    args: tuple[bytes | Sequence[memoryview], ...]
    """Its name and its arguments. An argument in parts is their concatenation."""
    key: bytes
    """The key that determines the node of a cluster."""
    into: Sequence[memoryview] | None = None
    """Where the value of the reply is written. The reply is its length then."""

    @classmethod
    def of(
        cls, name: bytes, key: bytes, *args: Argument, into: Sequence[memoryview] | None = None
    ) -> Command:
        """A command with one key, which is its first argument."""
        return cls((name, key, *map(_encoded, args)), key, into)

    @classmethod
    def script(cls, script: str, keys: Sequence[bytes], *args: Argument) -> Command:
        """A script. Its keys are on one node."""
        return cls((b"EVAL", *map(_encoded, (script, len(keys), *keys, *args))), keys[0])


def _encoded(argument: Argument) -> bytes | Sequence[memoryview]:
    return str(argument).encode() if isinstance(argument, (str, int)) else argument


class Client:
    """Sends commands, many with one round trip. Connects at its first use. Thread-safe.

    Raises (every method that sends): the client's errors, which :func:`mapped_errors` translates.
    """

    def __init__(self, options: RedisOptions, *, timeout_s: float | None = None) -> None:
        """Raises ConfigError: as :func:`prepared`."""
        self._make = prepared(options, timeout_s=timeout_s)
        self._lock = threading.Lock()
        self._made: Any = None
        self._is_cluster = options.mode == "cluster"
        close_after_fork(self)  # frees the lock

    def _after_fork_in_child(self) -> None:
        self._made = None

    def get(self) -> Any:
        """The client of valkey-py."""
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies, in order, some of which may be a ResponseError."""
        replies: list[Any] = [None] * len(commands)
        for index, (reply,) in self.stream([[command] for command in commands]):
            replies[index] = reply
        return replies

    def stream(self, groups: Sequence[Sequence[Command]]) -> Generator[tuple[int, list[Any]], None, None]:
        """Send all commands at once, and yield the replies of each group as soon as they are there.

        The keys of a group are on one node of a cluster. The groups come in any order, and may use the same
        memory. A group is sent again after a lost connection or a redirection, so its commands have the same
        effect twice as once.
        """
        client, left, is_cluster = self.get(), dict(enumerate(groups)), self._is_cluster
        redirected = []
        for is_last in (False, True):
            try:
                for index, replies in self._exchanged(client, left.copy()):
                    group = left.pop(index)
                    if is_cluster and any(isinstance(each, _REDIRECTIONS) for each in replies):
                        redirected.append((index, group))
                        _learn_nodes(client, replies)
                    else:
                        yield index, replies
                break
            except (LostError, LateError) as e:
                if is_cluster:
                    with contextlib.suppress(ValkeyError):
                        client.nodes_manager.initialize()  # another node may have taken over
                if is_last or isinstance(e, LateError):
                    raise
        for index, group in redirected:
            yield index, [_followed(client, command) for command in group]

    def _exchanged(
        self, client: Any, groups: Mapping[int, Sequence[Command]]
    ) -> Generator[tuple[int, list[Any]], None, None]:
        """Send all groups, and then yield the replies of each."""
        pools: dict[Any, list[int]] = {}
        for index, group in groups.items():
            pools.setdefault(self._pool_for(client, group[0].key), []).append(index)
        connections: list[tuple[Any, Any]] = []
        try:
            connections.extend((pool, pool.get_connection("GET")) for pool in pools)
            for pool, connection in connections:
                commands = [command for index in pools[pool] for command in groups[index]]
                connection.send_packed_command(_packed(commands))
            for pool, connection in connections:
                for index in pools[pool]:
                    yield index, [_reply(connection, command) for command in groups[index]]
        except BaseException:
            for _, connection in connections:
                connection.disconnect()  # its other replies will not be read
            raise
        finally:
            for pool, connection in connections:
                pool.release(connection)

    def _pool_for(self, client: Any, key: bytes) -> Any:
        if self._is_cluster:
            client = client.get_valkey_connection(client.get_node_from_key(key))
        return client.connection_pool

    def close(self) -> None:
        # without the lock: a thread that holds it may be connecting to a cluster
        made, self._made = self._made, None
        if made is not None and self._is_cluster:
            made.disconnect_connection_pools()
        elif made is not None:
            made.connection_pool.disconnect()


def _packed(commands: Sequence[Command]) -> list[Any]:
    """The commands as the server reads them, in few buffers. Long parts are not copied."""
    buffers: list[Any] = []
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command.args)
        for arg in command.args:
            if isinstance(arg, bytes):
                small += b"$%d\r\n%b\r\n" % (len(arg), arg)
                continue
            small += b"$%d\r\n" % sum(map(len, arg))
            for part in arg:
                if len(part) < _LONG_BYTES:
                    small += part
                else:
                    buffers += [small, part]
                    small = bytearray()
            small += b"\r\n"
    return [*buffers, small]


def _reply(connection: Any, command: Command) -> Any:
    try:
        return connection.read_reply(command.into)
    except ResponseError as e:
        return e


def _learn_nodes(client: Any, replies: Sequence[Any]) -> None:
    """Make the nodes known to which these replies redirect. The cluster lists none that has no slot yet."""
    for reply in replies:
        if isinstance(reply, AskError):
            node = ClusterNode(reply.host, reply.port, PRIMARY)
            client.nodes_manager.nodes_cache.setdefault(node.name, node)


def _followed(client: Any, command: Command) -> Any:
    """The reply to a command that was sent to the wrong node of a cluster. valkey-py finds the right one."""
    try:
        name, *args = [arg if isinstance(arg, bytes) else b"".join(arg) for arg in command.args]
        reply = client.execute_command(name.decode(), *args)
    except ResponseError as e:
        return e
    if command.into is None or reply is None:
        return reply
    value = memoryview(reply)
    for view in command.into:
        part, value = value[: len(view)], value[len(view) :]
        view[: len(part)] = part
    return len(reply)


def checked(replies: Sequence[Any]) -> Sequence[Any]:
    """Return the replies; raise the first one that is an error."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def prepared(options: RedisOptions, *, timeout_s: float | None = None) -> Callable[[], Any]:
    """A function that makes a client with these options.

    Args:
        timeout_s: replaces the options' timeout.

    Raises:
        ConfigError: an address is wrong, or a file cannot be used.
    """
    within = options.timeout_s if timeout_s is None else timeout_s
    tls = _tls(options)
    common: dict[str, Any] = {
        "username": options.user,
        "password": password_of(options.password_file, "password_file"),
        "socket_timeout": within,
        "socket_connect_timeout": within,
        "retry": Retry(NoBackoff(), 1),  # the server may have closed an idle connection
        "protocol": 2,
        "client_name": "kvplug",
    }
    if options.user is not None and common["password"] is None:
        raise ConfigError("options.redis.password_file: nothing was given; user needs it")
    retried = {"retry_on_error": [LostError], "db": options.db}
    if options.mode == "single":
        if len(options.address) != 1:
            raise ConfigError(
                f"options.redis.address: {len(options.address)} servers were given, but mode is single;"
                " set it to sentinel or cluster"
            )
        kind, where = _endpoint(options)
        if kind is ReplyUnixConnection:
            del common["socket_connect_timeout"]
        pool = valkey.ConnectionPool(connection_class=kind, **where, **common, **retried, **tls)
        return functools.partial(valkey.Valkey, connection_pool=pool)
    servers = [_server(each, options.mode) for each in options.address]
    if options.mode == "sentinel":
        own = {"ssl": True, **tls} if options.tls else {}
        sentinel = Sentinel(servers, sentinel_kwargs={**common, **own}, **common, **retried, **tls)
        kind = ReplyTlsPrimaryConnection if options.tls else ReplyPrimaryConnection
        return functools.partial(sentinel.master_for, options.service, connection_class=kind)
    if options.db:
        raise ConfigError(f"options.redis.db: {options.db} was given; a cluster has only number 0")
    host, port = servers[0]
    return functools.partial(
        ValkeyCluster,
        url=f"valkey://{f'[{host}]' if ':' in host else host}:{port}",  # or it ignores connection_class
        startup_nodes=[ClusterNode(*server) for server in servers[1:]],
        connection_class=functools.partial(ReplyTlsConnection if options.tls else ReplyTcpConnection, **tls),
        cluster_error_retry_attempts=1,
        **common,
    )


def _endpoint(options: RedisOptions) -> tuple[Any, dict[str, Any]]:
    """The class of a single server's connections, and their arguments."""
    (address,) = options.address
    server = Address.parse_server(address, PORTS["single"])
    if not server.is_unix:
        kind = ReplyTlsConnection if options.tls else ReplyTcpConnection
        return kind, {"host": server.host, "port": server.port}
    if options.tls:
        raise ConfigError("options.redis.tls: it is set, but a Unix socket never leaves the host")
    return ReplyUnixConnection, {"path": server.sockaddr}


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
    except ClusterError as e:  # after TRYAGAIN, again and again
        raise TransportError(
            f"the cluster moves a slot to another node, and takes no page of several values until then: {e}"
        ) from e
    except ResponseError as e:
        text = str(e)
        if "OOM command not allowed" in text:  # errors in a script have this class
            raise NoRoomError(_FULL) from e
        if "READONLY" in text:
            raise PermissionError(_REPLICA) from e
        if "WRONGTYPE" in text:
            raise BlockingStore.PageError(MissReason.UNREADABLE, "a key holds a value of another type") from e
        if isinstance(e, AskError):
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
