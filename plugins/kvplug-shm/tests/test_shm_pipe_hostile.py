"""A peer that is allowed in and writes nonsense: into words, into headers, or in place of a join."""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import shm_pipe_ends as ends
from kvplug import KvplugError, PeerGoneError, TransportError
from kvplug.net.wire.frames import FrameKind, encode_header
from kvplug.net.wire.messages import GOODBYE, tensor_prefix
from kvplug.transport import Credentials, Deadline, WireError
from kvplug_shm.joining import JoiningPeer
from kvplug_shm.pipe.endpoint import ShmContact, ShmEndpoint
from kvplug_shm.pipe.geometry import LINE, RingSizes
from kvplug_shm.pipe.rings import Incoming
from kvplug_shm.ring.protocol import HEAD
from kvplug_testing import peers
from kvplug_testing.pairs import accepting
from kvplug_testing.waits import Call

by_hand = ends.by_hand

MIB = 1024 * 1024
ENDED = (TransportError, PeerGoneError, WireError)
WORDS = [3, 2 * 10**7, 2**32 + 2, 2**63 - 1, 2**64 - 2]
"""Odd ones say that the end is over."""


# -- words -----------------------------------------------------------------------------------------


def assert_ended(pipe: Any) -> None:
    for call in (lambda: pipe.recv_tensor(timeout=5), lambda: pipe.send_tensor(None, timeout=5)):
        for _ in range(2):
            with pytest.raises(ENDED):
                call()


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("blocked", [False, True])
def test_a_head_that_cannot_be_is_an_error_and_the_end_of_the_pipe(
    by_hand: Any, word: int, blocked: bool
) -> None:
    peer, other = by_hand()
    if blocked:
        receiving = Call(lambda: other.recv_tensor(timeout=None))
        assert receiving.is_blocked(0.05)
    peer.out.words.words[HEAD] = word
    if blocked:
        peer.out.words.wake(HEAD)
        assert isinstance(receiving.outcome(), ENDED)
    assert_ended(other)


@settings(max_examples=3 * settings.default.max_examples // 5, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 2**64 - 1) | st.integers(0, 20_000)), max_size=6
    ),
    nbytes=st.sampled_from([0, 100, 3000, 100_000]),
)
def test_whatever_a_peer_writes_into_the_words_every_call_ends(
    changes: list[tuple[int, int]], nbytes: int
) -> None:
    end = ends.endpoint(slots=2, slot_bytes=1024)
    with end.listen() as listener:
        peer = ends.PeerByHand(listener.contact)
        with peer.connection, listener.accept() as pipe:
            for number, (word, value) in enumerate(changes):
                (peer.out, peer.into)[number % 2].words.words[word] = value
                for call in (
                    lambda: pipe.send_tensor(torch.zeros(nbytes, dtype=torch.uint8), timeout=0.01),
                    lambda: pipe.recv_tensor(timeout=0.01),
                ):
                    with contextlib.suppress(KvplugError):
                        call()
            pipe.abort()


# -- headers ---------------------------------------------------------------------------------------


def prefix(shape: tuple[int, ...], nbytes: int, flags: int = 0) -> bytes:
    return tensor_prefix(torch.uint8, torch.Size(shape), nbytes, flags)


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * LINE,
        GOODBYE,
        encode_header(FrameKind.VALUE, 3) + b"abc",
        encode_header(FrameKind.TENSOR, 2**57) + b"\2\1" + bytes(8),
        encode_header(FrameKind.TENSOR, 10) + b"\xff\1" + bytes(8),
        encode_header(FrameKind.TENSOR, 10 + 5) + b"\2\1" + struct.pack("<Q", 6),
        encode_header(FrameKind.TENSOR, 10) + b"\2\1" + struct.pack("<Q", 2**64 - 1),
        encode_header(FrameKind.NONE, 1),
        prefix((3,), 3, flags=1),
    ],
)
@pytest.mark.parametrize("blocked", [False, True])
def test_bytes_that_are_no_message_are_an_error_and_the_end_of_the_pipe(
    by_hand: Any, data: bytes, blocked: bool
) -> None:
    peer, other = by_hand()
    if not blocked:
        peer.lay(data)
    receiving = Call(lambda: other.recv_tensor(timeout=None))
    if blocked:
        assert receiving.is_blocked(0.02)
        peer.lay(data)
    receiving.raised(WireError)
    for _ in range(2):
        with pytest.raises(TransportError):
            other.recv_tensor(timeout=5)
    assert peer.connection.sock.recv(1) == b"", "it did not hang up"


def test_a_header_that_changes_between_two_looks_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is checked is a copy: nothing of it is looked at in shared memory again."""
    next_line, looks = Incoming.next_line, 0

    def counted(self: Any, spin_s: float = 0.0) -> tuple[int, bytes]:
        nonlocal looks
        found = next_line(self, spin_s)
        looks += bool(found[0])
        peer.out.bytes[:16] = secrets.token_bytes(16)
        return found

    monkeypatch.setattr(Incoming, "next_line", counted)
    sent = torch.arange(5)
    with ends.endpoint().listen() as listener:
        peer = ends.PeerByHand(listener.contact)
        with peer.connection, listener.accept() as other:
            peer.lay(ends.prefix_of(sent) + ends.content_of(sent))
            assert torch.equal(other.recv_tensor(timeout=5), sent)
            other.abort()
    assert looks == 1


# -- joining ---------------------------------------------------------------------------------------


def host(answer: Any, fds: Any) -> Any:
    """What a connecting end makes of a listener that answers so."""
    end = ends.endpoint()
    with accepting("unix:", Credentials(), ShmEndpoint.PURPOSE) as listener:
        connecting = Call(lambda: end.connect(str(ShmContact.here(listener.contact)), timeout=5))
        with (
            listener.accept(5) as connection,
            contextlib.closing(JoiningPeer(connection, 5, Deadline.after(5))) as guest,
        ):
            assert guest.agrees(guest.receive())
            guest.send(answer, fds)
            return connecting.outcome()


def memory(nbytes: int, seals: int | None = None) -> int:
    import fcntl

    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals is None:
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


SIZE = RingSizes.of(1, 4096).segment_nbytes
TERMS = list(ends.TERMS)


@pytest.mark.parametrize(
    ("slots", "slot_bytes", "nbytes", "seals", "count"),
    [
        (1, 4096, SIZE, 0, 1),  # it could shrink under us
        (1, 4096, SIZE - 4096, None, 1),
        (1, 4096, SIZE, None, 0),
        (1, 4096, SIZE, None, 2),
        (0, 4096, 4096, None, 1),
        (-1, -4096, SIZE, None, 1),
        (3, 1000, SIZE, None, 1),
        (2**62, 2**62, MIB, None, 1),
    ],
)
def test_memory_that_is_not_what_was_promised_is_refused(
    slots: int, slot_bytes: int, nbytes: int, seals: int | None, count: int
) -> None:
    fds = [memory(nbytes, seals) for _ in range(count)]
    with peers.nothing_left():
        error = host({"slots": slots, "slot_bytes": slot_bytes, "terms": TERMS}, fds)
        assert isinstance(error, WireError), error
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("answer", ["hello", {"slots": 1, "slot_bytes": 4096}, {"terms": TERMS}])
def test_an_answer_of_another_form_is_refused(answer: Any) -> None:
    fd = memory(SIZE)
    with peers.nothing_left():
        assert isinstance(host(answer, [fd]), WireError)
    os.close(fd)
