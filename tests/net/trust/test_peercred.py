"""Which user holds the other end of a loopback connection."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

import pytest

from kvplug.net.trust import peercred, sockdiag
from kvplug.net.trust.peercred import NoSocketDiagError, tcp_peer_uid, tcp_peer_uid_at_once, tcp_peer_uids

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only"),
]


@pytest.fixture(params=["127.0.0.1", "::1", "mapped"])
def connected(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """(the dialling end, the accepted end); "mapped": IPv4 at a listener for both versions."""
    if request.param == "mapped":
        listening = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        host = "127.0.0.1"
    else:
        host = request.param
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family)
    with listening, socket.create_connection((host, listening.getsockname()[1])) as ours:
        theirs, _ = listening.accept()
        with theirs:
            yield ours, theirs


def test_both_ways_name_the_user_at_both_ends(connected) -> None:
    for sock in connected:
        assert tcp_peer_uid_at_once(sock) == os.geteuid()
    assert tcp_peer_uids(connected) == [os.geteuid()] * 2


def test_one_question_reads_no_table_of_all_sockets(connected, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> None:
        raise AssertionError("the tables were read")

    monkeypatch.setattr(peercred, "_rows", read)
    assert tcp_peer_uid(connected[0]) == os.geteuid()


def test_an_end_that_its_process_has_closed_has_no_user(connected) -> None:
    ours, theirs = connected
    ours.close()
    assert tcp_peer_uid_at_once(theirs) is None
    assert tcp_peer_uids([theirs]) == [None]


def test_a_kernel_without_the_question_is_asked_for_its_tables(
    connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockdiag, "_SOCK_DIAG_BY_FAMILY", 99)  # which no kernel knows
    with pytest.raises(NoSocketDiagError):
        tcp_peer_uid_at_once(connected[1])
    assert tcp_peer_uid(connected[1]) == os.geteuid()


def test_a_listener_is_not_taken_for_a_connection() -> None:
    """Asked for a connection that is not there, the kernel answers with the listener of that port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert sockdiag.tcp_owner(("127.0.0.1", port), ("127.0.0.1", 9)) is None
