"""Coming together: contacts, addresses, and peers that prove themselves and then do not join."""

from __future__ import annotations

import os
import socket

import pytest

from cpu_ends import make_endpoint
from kvplug import ConfigError, TransportError
from kvplug.errors import InsecureAddressError
from kvplug.net.trust.credentials import Secret
from kvplug.transport import Credentials, WireError
from kvplug_cpu.endpoint import CpuContact
from kvplug_testing.resources import Resources


def num_tcp() -> int:
    """Sockets of TCP that this process has."""
    found = 0
    for each in Resources.of().descriptors:
        fd, _, target = each.partition(" -> ")
        if target.startswith("socket:"):
            with socket.socket(fileno=os.dup(int(fd))) as sock:
                found += sock.family == socket.AF_INET
    return found


def test_tcp_requires_a_secret_and_a_peer_on_this_host_still_gets_the_fast_socket() -> None:
    with pytest.raises(InsecureAddressError):
        make_endpoint("tcp", credentials=Credentials()).listen()
    end = make_endpoint("auto", host="0.0.0.0", credentials=Credentials(Secret(b"x" * 32)))
    with end.listen() as listener:
        contact = CpuContact.parse(listener.contact)
        assert [each.startswith("unix:") for each in contact.addresses] == [True, False]
        before = num_tcp()
        with end.connect(listener.contact), listener.accept(5):
            assert num_tcp() == before
        port = contact.addresses[1].rpartition(":")[2]
        elsewhere = CpuContact("another-host/net", (contact.addresses[0], f"127.0.0.1:{port}"))
        with end.connect(str(elsewhere)), listener.accept(5):
            assert num_tcp() > before


def test_a_socket_of_another_host_and_a_device_that_is_not_the_cpu_are_refused_with_advice() -> None:
    with pytest.raises(TransportError, match="socket to 'tcp'"):
        make_endpoint().connect(str(CpuContact("another-host/net", ("unix:@kvplug-x",))))
    with pytest.raises(ConfigError, match="cuda"):
        make_endpoint(device="cuda:0")


def test_what_is_not_a_contact_is_refused_without_repeating_it() -> None:
    for text in (
        "cpu1 x",
        "cpu2 x y",
        "tcp://127.0.0.1:1?token=abcdef",
        "cpu1 a b c d e f",
    ):
        with pytest.raises(WireError) as caught:
            make_endpoint().connect(text)
        assert "abcdef" not in str(caught.value)
