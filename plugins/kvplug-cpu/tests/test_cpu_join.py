"""Coming together: contacts, options, strangers, and peers that vanish half-way."""

from __future__ import annotations

import os
import secrets
import socket
import time
from typing import Any

import pytest
import torch

from cpu_ends import guest
from kvplug import AuthenticationError, ConfigError, TransportError
from kvplug.transport import Credentials, InsecureAddressError, Secret, WireError
from kvplug_cpu.contact import CpuContact
from kvplug_cpu.join import Join
from kvplug_testing import peers
from kvplug_testing.resources import Resources


def meets(end: Any, listener: Any) -> bool:
    with end.connect(listener.contact, timeout=10) as one, listener.accept(10) as other:
        one.send_tensor(torch.arange(3))
        return bool(torch.equal(other.recv_tensor(), torch.arange(3)))


def knock(contact: str) -> socket.socket:
    """A stranger's connection to where a listener of this pipe listens."""
    where = CpuContact.parse(contact).addresses[0]
    if where.startswith("unix:@"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect("\0" + where.removeprefix("unix:@"))
        return sock
    host, _, port = where.removeprefix("tcp://").partition("?")[0].rpartition(":")
    return socket.create_connection((host, int(port)))


def test_strangers_silent_or_talking_garbage_delay_nobody(endpoint: Any, socket_kind: str) -> None:
    end = endpoint(socket_kind)
    with peers.nothing_left(), end.listen() as listener:
        strangers = [knock(listener.contact) for _ in range(30)]
        for number, stranger in enumerate(strangers):
            if number % 2:
                stranger.sendall(secrets.token_bytes(10_000))
        began = time.monotonic()
        assert meets(end, listener)
        assert time.monotonic() - began < 3
        for stranger in strangers:
            stranger.close()


def test_a_proven_peer_that_says_nothing_or_garbage_delays_nobody(endpoint: Any, socket_kind: str) -> None:
    end = endpoint(socket_kind)
    with end.listen() as listener:
        silent = [guest(listener.contact) for _ in range(5)]
        loud = [guest(listener.contact) for _ in range(5)]
        for connection in loud:
            connection.sock.sendall(secrets.token_bytes(1000))
        unknown = guest(listener.contact)
        Join(index=1, connections=2, session=secrets.token_bytes(16)).send(unknown)
        began = time.monotonic()
        assert meets(end, listener)
        assert time.monotonic() - began < 3
        for connection in (*silent, *loud, unknown):
            connection.close()


def test_a_peer_that_vanishes_before_all_its_connections_came_leaves_nothing(
    endpoint: Any, socket_kind: str
) -> None:
    end = endpoint(socket_kind)
    with peers.nothing_left(), end.listen() as listener:
        control = guest(listener.contact)
        Join(index=0, connections=2).send(control)
        control.close()
        assert meets(end, listener)


def test_a_secret_is_required_off_loopback_and_must_be_the_same(endpoint: Any) -> None:
    open_end = endpoint("tcp", host="0.0.0.0")
    with pytest.raises(InsecureAddressError):
        open_end.listen()
    end = endpoint("tcp", credentials=Credentials(Secret(b"x" * 32)))
    with end.listen() as listener:
        with pytest.raises(AuthenticationError):
            endpoint("tcp").connect(listener.contact)
        assert meets(end, listener)


def test_off_loopback_a_peer_on_this_host_still_gets_the_fast_socket(endpoint: Any) -> None:
    def num_tcp() -> int:
        """Sockets of TCP that this process has."""
        found = 0
        for each in Resources.of().descriptors:
            fd, _, target = each.partition(" -> ")
            if target.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as sock:
                    found += sock.family == socket.AF_INET
        return found

    end = endpoint("auto", host="0.0.0.0", credentials=Credentials(Secret(b"x" * 32)))
    with end.listen() as listener:
        contact = CpuContact.parse(listener.contact)
        assert contact.addresses[0].startswith("unix:")
        assert contact.addresses[1].startswith("tcp:")
        before = num_tcp()
        with end.connect(listener.contact), listener.accept(5):
            assert num_tcp() == before
        port = contact.addresses[1].rpartition(":")[2]
        elsewhere = CpuContact("another-host/net", (contact.addresses[0], f"tcp://127.0.0.1:{port}"))
        with end.connect(str(elsewhere)), listener.accept(5):
            assert num_tcp() > before


def test_a_socket_of_another_host_is_refused_with_advice(endpoint: Any) -> None:
    with pytest.raises(TransportError, match="socket to 'tcp'"):
        endpoint().connect(str(CpuContact("another-host/net", ("unix:@kvplug-x",))))


def test_what_is_not_a_contact_is_refused_without_repeating_it(endpoint: Any) -> None:
    for text in (
        "",
        "cpu1",
        "cpu1 x",
        "cpu2 x y",
        "tcp://127.0.0.1:1?token=abcdef",
        "cpu1  y",
        "cpu1 a b c d e f",
    ):
        with pytest.raises(WireError) as caught:
            endpoint().connect(text)
        assert "abcdef" not in str(caught.value)


def test_a_device_that_is_not_the_cpu_is_refused(endpoint: Any) -> None:
    with pytest.raises(ConfigError, match="cuda"):
        endpoint(device="cuda:0")
