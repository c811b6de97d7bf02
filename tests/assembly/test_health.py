"""Probes over HTTP are answered whatever other clients do, and while the check waits."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from kvplug.assembly.health import Health, HealthServer
from kvplug.config.addresses import Address
from kvplug.errors import AddressInUseError
from kvplug_testing import peers
from kvplug_testing.waits import Call, patience_s, until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


@pytest.fixture
def server(port: int) -> Iterator[HealthServer]:
    with peers.nothing_left(), contextlib.closing(HealthServer(Address("127.0.0.1", port))) as opened:
        yield opened


def answer(port: int, path: str = "/ready", method: str = "GET") -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=patience_s)) as client:
        client.request(method, path)
        response = client.getresponse()
        return response.status, response.read().decode()


def reasons(port: int, path: str = "/ready") -> tuple[int, list[str]]:
    status, body = answer(port, path)
    return status, json.loads(body)["reasons"]


def dialled(port: int, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), patience_s)
    client.sendall(sent)
    return client


def is_hung_up(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_ready_and_live_differ_and_give_their_reasons(server: HealthServer, port: int) -> None:
    assert reasons(port) == (503, ["it is starting"])
    assert reasons(port, "/live") == (200, [])
    server.watch(lambda: Health(facts={"pages": 3}))
    assert answer(port) == (200, '{"ok": true, "reasons": [], "pages": 3}\n')
    server.watch(lambda: Health(not_live=("lost",), not_ready=("full",)))
    assert reasons(port) == (503, ["lost", "full"])
    assert reasons(port, "/live?x=1") == (503, ["lost"])
    server.watch(lambda: Health(no="such field"))
    assert reasons(port) == (503, ["its check failed: TypeError"])


def test_other_requests_have_their_codes(server: HealthServer, port: int) -> None:
    server.watch(Health)
    assert answer(port, method="HEAD") == (200, "")
    assert answer(port, "/metrics")[0] == 404
    assert answer(port, method="POST")[0] == 405
    with dialled(port, b"GET /" + b"x" * 20_000) as client:
        assert client.recv(12) == b""
    with dialled(port, b"\x16\x03\x01\r\n\r\n") as client:
        assert client.recv(12) == b"HTTP/1.1 404"


def test_silent_and_slow_clients_delay_no_other_and_take_no_threads(server: HealthServer, port: int) -> None:
    """More of them than may be connected at once: the oldest ones are hung up."""
    server.watch(Health)
    before = threading.active_count()
    with contextlib.ExitStack() as silent:
        clients = [silent.enter_context(dialled(port, b"GET /rea"[: i % 9])) for i in range(300)]
        assert reasons(port) == (200, [])
        assert threading.active_count() == before
        assert clients[0].recv(1) == b"", "the oldest is hung up"
        assert sum(not is_hung_up(client) for client in clients) <= 64


def test_many_probes_at_once_are_all_answered(server: HealthServer, port: int) -> None:
    server.watch(Health)
    calls = [Call(lambda: reasons(port)) for _ in range(60)]
    assert [call.result() for call in calls] == [(200, [])] * 60


def test_a_check_that_waits_is_not_ready_and_one_that_never_ends_not_live(
    server: HealthServer, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, began = threading.Lock(), []

    def check() -> Health:
        began.append(1)
        with lock:
            return Health()

    server.watch(check)
    with lock:
        status, (why,) = reasons(port)
        assert status == 503 and why.startswith("the store has not answered for ")
        assert reasons(port, "/live") == (200, [])
        monkeypatch.setattr("kvplug.assembly.health._STUCK_S", 0.0)
        assert reasons(port, "/live")[0] == 503
        assert len(began) == 1, "clients share the check that waits"
    until(lambda: reasons(port, "/live") == (200, []))


def test_an_address_in_use_is_refused_and_closing_ends_silent_clients(
    server: HealthServer, port: int
) -> None:
    with pytest.raises(AddressInUseError, match=f"127.0.0.1:{port} is in use"):
        HealthServer(Address("127.0.0.1", port))
    with dialled(port) as client:
        assert reasons(port, "/live") == (200, [])  # the earlier client has been accepted, too
        server.close()
        server.close()
        assert client.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        dialled(port)
