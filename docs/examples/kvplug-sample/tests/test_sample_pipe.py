"""What is this pipe's own: the bytes on its socket, which peers it lets in, and where it works."""

from __future__ import annotations

import contextlib

import pytest

import kvplug
import kvplug.transport
from kvplug.net.wire.messages import message_parts
from kvplug_sample.options import SampleOptions
from kvplug_sample.pipe import SampleContact, SampleEndpoint
from kvplug_sample.probe import describe
from kvplug_testing.pairs import accepting


def endpoint():
    context = SampleEndpoint.Context(
        options=SampleOptions(), credentials=kvplug.transport.Credentials(), timeout_s=20.0
    )
    return SampleEndpoint(context)


def test_a_receive_that_times_out_within_a_header_is_resumed():
    here = endpoint()
    listener = here.listen()
    with contextlib.closing(listener), here.connect(listener.contact) as one, listener.accept() as two:
        (header,) = message_parts(None)
        one._sock.send(header[:9])
        with pytest.raises(kvplug.TimeoutError):
            two.recv_tensor(timeout=0.05)
        one._sock.send(header[9:])
        assert two.recv_tensor() is None


def test_a_listener_of_another_purpose_is_no_way_in():
    other = accepting("unix:", kvplug.transport.Credentials(), "something else")
    with other, pytest.raises(kvplug.AuthenticationError):
        endpoint().connect(str(SampleContact.here(other.contact)), timeout=5)


def test_the_probe_names_this_host():
    assert describe().viable
    assert describe() == describe()
