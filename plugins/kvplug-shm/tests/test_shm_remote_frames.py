"""What comes over the network half of a queue and cannot be read: frames, handles, another service."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies

import shm_remote_ends as ends
from kvplug import AuthenticationError, PeerGoneError
from kvplug.transport import WireError
from kvplug_shm.queue import remote_frames as frames
from kvplug_shm.queue.reader_link import identity_of
from kvplug_shm.queue.remote_assembly import Assembly
from kvplug_shm.queue.remote_frames import First, Piece, Plain, QueueFrameKind

REMOTE = str(Path(__file__).with_name("shm_remote_ends.py"))
context, joined, joining = ends.context, ends.joined, ends.joining


@given(strategies.lists(strategies.binary(max_size=80), max_size=3))
def test_bytes_that_are_no_frame_are_a_wire_error_and_nothing_else(parts: list[bytes]) -> None:
    try:
        frames.read([memoryview(part) for part in parts])
    except WireError:
        pass


@given(
    strategies.lists(
        strategies.one_of(
            strategies.builds(
                First,
                strategies.booleans(),
                strategies.integers(0, 3),
                strategies.integers(0, 1 << 64 - 1),
                strategies.integers(0, 100),
                strategies.binary(max_size=100).map(memoryview),
            ),
            strategies.builds(
                Piece,
                strategies.integers(0, 3),
                strategies.integers(0, 200),
                strategies.binary(max_size=100).map(memoryview),
            ),
        ),
        max_size=8,
    )
)
def test_frames_that_do_not_fit_together_are_told(given_frames: list[First | Piece]) -> None:
    from kvplug import TransportError

    assembly = Assembly(1 << 20)
    for frame in given_frames:
        try:
            done = assembly.add(frame)
        except (WireError, TransportError):
            return
        if done is not None:
            assert len(done[0].head) + len(done[0].body) <= 1 << 22


def test_a_message_beyond_the_limit_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(WireError, match="at most"):
        Assembly(1 << 20).add(First(False, 0, 0, 1 << 40, memoryview(b"")))


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"version": 2},
        {"version": 1, "host": "a name", "port": 1, "salt": "00" * 16, "token": ""},
        {"version": 1, "host": "::1", "port": 0, "salt": "00" * 16, "token": ""},
        {"version": 1, "host": "::1", "port": 9, "salt": "xx", "token": ""},
        {"version": 1, "host": "::1", "port": 9, "salt": "00" * 16, "token": "00"},
    ],
)
def test_a_handle_that_says_nothing_of_the_network_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        joined(context(), data)


def test_values_of_a_frame_are_plain_and_small() -> None:
    welcome = frames.read([memoryview(frames.plain(QueueFrameKind.WELCOME, joining()))])
    assert isinstance(welcome, Plain)
    assert str(identity_of(welcome.value["who"])) == "pid 77 on example"


def test_a_port_where_something_else_listens_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        data = {"version": 2, "contact": address, "address": address, "salt": "00" * 16}
        with pytest.raises((AuthenticationError, PeerGoneError)):
            other.settimeout(10)
            import threading

            def hang_up() -> None:
                end, _ = other.accept()
                end.sendall(b"220 hello\r\n")
                end.close()

            threading.Thread(target=hang_up, daemon=True).start()
            joined(context(), {**data, "token": "11" * 32})
