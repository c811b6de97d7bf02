"""Calls of etcd's JSON gateway: https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/.

The servers are tried in turn, from the one that answered last. A call has one deadline for all of them."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Final

import urllib3

from kvplug import ConfigError, KvplugError, TransportError
from kvplug.transport import Deadline, close_after_fork

_MAX_ANSWER_BYTES: Final = 64 << 20
_LEAST_S: Final = 0.05
"""Minimum time for a server, even if less is left."""
_UNAUTHENTICATED: Final = 16
"""gRPC's code of a token that is no longer valid."""


class EtcdError(KvplugError):
    """A server has refused a call."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.grpc_code = code


class Gateway:
    """The servers of one cluster. Not thread-safe."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        context: ssl.SSLContext | None,
        user: str | None,
        password: str | None,
        timeout_s: float,
    ) -> None:
        """
        Args:
            servers: ``host:port`` of each.
            context: for TLS; ``None`` for plain HTTP.
        """
        scheme = "http" if context is None else "https"
        self._servers = [f"{scheme}://{server}" for server in servers]
        self._user, self._password = user, password
        self._timeout_s = timeout_s
        self._token = ""
        self._pool = urllib3.PoolManager(num_pools=len(servers), retries=False, ssl_context=context)
        close_after_fork(self)

    def call(self, path: str, deadline: Deadline | None = None, **body: Any) -> Mapping[str, Any]:
        """The answer to a POST of ``body`` at ``/v3/path``.

        Raises:
            TransportError: no server answered in time; lists each server's failure.
            EtcdError: a server refused it.
        """
        deadline = deadline or Deadline.after(self._timeout_s)
        if self._user is not None and not self._token:
            self._authenticate(deadline)
        try:
            return self._post(path, body, deadline)
        except EtcdError as e:
            if self._user is None or e.grpc_code != _UNAUTHENTICATED:
                raise
            self._authenticate(deadline)  # the token has expired
            return self._post(path, body, deadline)

    def _authenticate(self, deadline: Deadline) -> None:
        self._token = ""
        answer = self._post("auth/authenticate", {"name": self._user, "password": self._password}, deadline)
        self._token = str(answer.get("token", ""))

    def _post(self, path: str, body: Mapping[str, Any], deadline: Deadline) -> Mapping[str, Any]:
        failures = []
        for left in range(len(self._servers), 0, -1):
            server = self._servers[0]
            share = max(_LEAST_S, (deadline.remaining() or 0.0) / left)
            try:
                return self._post_to(server, path, body, share)
            except (urllib3.exceptions.HTTPError, OSError) as e:
                failures.append(f"{server}: {_description(e)}")
                self._servers.append(self._servers.pop(0))
            if deadline.expired:
                break
        raise TransportError(f"no etcd server answers ({'; '.join(failures)})")

    def _post_to(
        self, server: str, path: str, body: Mapping[str, Any], timeout_s: float
    ) -> Mapping[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        response = self._pool.request(
            "POST",
            f"{server}/v3/{path}",
            body=json.dumps(body).encode(),
            headers=headers,
            timeout=urllib3.Timeout(total=timeout_s),
            redirect=False,
            preload_content=False,
        )
        try:
            raw = response.read(_MAX_ANSWER_BYTES + 1)
        finally:
            response.release_conn()
        if len(raw) > _MAX_ANSWER_BYTES:
            response.close()
            raise EtcdError(f"{server} answers with more than {_MAX_ANSWER_BYTES} bytes", 0)
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EtcdError(f"{server} is not etcd with the JSON gateway /v3 (status {response.status})", 0)
        if response.status != 200:
            text, code = answer.get("message") or answer.get("error"), answer.get("code")
            raise EtcdError(f"{server} refuses {path}: {text}", code if isinstance(code, int) else 0)
        return answer

    def _after_fork_in_child(self) -> None:
        for key in self._pool.pools.keys():  # noqa: SIM118  (it cannot be iterated over)
            for connection in [*self._pool.pools[key].pool.queue]:
                if connection is not None and connection.sock is not None:
                    connection.sock.close()  # the parent still uses it
        self._pool = urllib3.PoolManager()

    def close(self) -> None:
        """Close the connections: `clear` leaves that to the garbage collector."""
        for key in self._pool.pools.keys():  # noqa: SIM118  (it cannot be iterated over)
            self._pool.pools[key].close()
        self._pool.clear()


def _description(error: BaseException) -> str:
    """urllib3's error without the names of its objects."""
    cause = getattr(error, "reason", None) or error
    if isinstance(cause, urllib3.exceptions.NewConnectionError):  # a time-out for urllib3
        cause = cause.__cause__ or cause
    elif isinstance(cause, urllib3.exceptions.TimeoutError):
        return "no answer in time"
    return f"{type(cause).__name__}: {cause}"


def tls_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """The context for TLS; ``None`` if no file is given.

    Raises:
        ConfigError: a file cannot be used, or one is missing.
    """
    if ca is None:
        if cert is not None or key is not None:
            raise ConfigError("options.etcd.tls_ca: nothing was given; TLS needs it")
        return None
    if (cert is None) != (key is None):
        missing = "tls_key" if key is None else "tls_cert"
        raise ConfigError(f"options.etcd.{missing}: nothing was given; the client's certificate needs both")
    try:
        context = ssl.create_default_context(cafile=ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if cert is not None:
            context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(f"options.etcd: the TLS files cannot be used: {e}") from e
    return context


def _no_password() -> str:
    raise ConfigError("options.etcd.tls_key: the key is encrypted, but kvplug cannot ask for a password")
