"""Peers of the pipe "pynccl" that say what cannot be."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import pynccl_ends as ends
from kvplug import KvplugError, PeerGoneError, TransportError
from kvplug.net.wire.messages import NONE, tensor_prefix
from kvplug.transport import Credentials, WireError, dial
from kvplug_pynccl.pipe import join
from kvplug_pynccl.pipe.contact import PyncclContact
from kvplug_pynccl.pipe.frames import WINDOW, Announcement, Frame, FrameParser, FrameType
from kvplug_testing.waits import Call, until

ENDS = Path(__file__).with_name("pynccl_ends.py")
local_pair = ends.local_pair
PATIENCE_S, gated = ends.PATIENCE_S, ends.gated

PREFIX = tensor_prefix(torch.float32, torch.Size((10,)), 40)
HUGE = tensor_prefix(torch.uint8, torch.Size((2**55,)), 2**55)
LIES = {
    "no frame": b"x" * 16,
    "a kind that there is not": Frame(FrameType.HEARTBEAT).pack().replace(b"\x04", b"\x09", 1),
    "a message out of order": Announcement(1, PREFIX, None).pack(),
    "an announcement that is cut short": Frame(FrameType.ANNOUNCE, 0, b"\x01").pack(),
    "an announcement without a prefix": Frame(FrameType.ANNOUNCE, 0, b"\x01\x00").pack(),
    "a prefix that contradicts itself": Announcement(0, PREFIX + b"x", None).pack(),
    "no pieces": Announcement(0, PREFIX, None, 0).pack(),
    "pieces that it does not have": Announcement(0, PREFIX, None, 3).pack(),
    "None in pieces": Announcement(0, NONE, None, 2).pack(),
    "clear for what was not announced": Frame(FrameType.CLEAR, 0).pack(),
    "taken what was not announced": Frame(FrameType.TAKEN, 0).pack(),
    "more than the window": b"".join(Announcement(n, NONE, None).pack() for n in range(WINDOW + 1)),
}


@pytest.mark.parametrize("what", list(LIES))
def test_a_peer_that_says_what_cannot_be_ends_the_pipe_and_nothing_else(local_pair: Any, what: str) -> None:
    one, other = local_pair()
    # What is taken is told to the liar, which has not sent it, and might end the pipe first.
    is_taken = what == "more than the window"
    receiving = None if is_taken else Call(lambda: other.recv_tensor(timeout=None))
    one._control.send(LIES[what])
    if receiving is not None:
        assert isinstance(receiving.outcome(), TransportError)
    until(lambda: other._lifecycle.ended)
    with pytest.raises(TransportError, match="cannot be"):
        other.send_tensor(None)
    with pytest.raises(PeerGoneError):
        one.recv_tensor(timeout=PATIENCE_S)
    a, b = local_pair()
    a.send_tensor(torch.arange(3))
    assert b.recv_tensor(timeout=PATIENCE_S).tolist() == [0, 1, 2]


@pytest.mark.parametrize("frame", [FrameType.CLEAR, FrameType.TAKEN])
def test_a_peer_that_has_what_was_only_announced_ends_the_pipe(local_pair: Any, frame: FrameType) -> None:
    one, other = local_pair()
    transfer = one.send_tensor(torch.zeros(100_000))
    other._control.send(Frame(frame, 0 if frame is FrameType.TAKEN else 1).pack())
    with pytest.raises(TransportError, match="cannot be"):
        transfer.wait(PATIENCE_S)


def test_a_peer_that_clears_what_was_not_announced_ends_the_pipe(local_pair: Any, gated: Any) -> None:
    one, other = local_pair(device=gated.device)
    gated.shut()
    transfer = one.send_tensor(torch.zeros(100_000))
    other._control.send(Frame(FrameType.CLEAR, 0).pack())
    with pytest.raises(TransportError, match="cannot be"):
        transfer.wait(PATIENCE_S)
    gated.open()


def test_memory_is_allocated_for_a_message_only_when_a_call_receives_it(local_pair: Any) -> None:
    one, other = local_pair()
    one._control.send(Announcement(0, HUGE, None).pack())
    with pytest.raises(KvplugError, match="this process can have"):
        other.recv_tensor(timeout=PATIENCE_S)
    assert not other._lifecycle.ended


@given(st.lists(st.binary(max_size=200)))
def test_whatever_comes_is_frames_or_a_wire_error(chunks: list[bytes]) -> None:
    frames = FrameParser()
    try:
        for chunk in chunks:
            frames.feed(chunk)
    except WireError:
        pass
    assert len(frames._held) < 2000


def test_ends_that_disagree_on_what_comes_next_get_an_error_that_names_both(
    local_pair: Any,
) -> None:
    one, other = local_pair()
    transfer = one.send_tensor(torch.zeros(100_000))
    other._control.send(Frame(FrameType.CLEAR, 0, PREFIX).pack())
    with pytest.raises(TransportError, match=r"disagree.*100000.*10.*check_order"):
        transfer.wait(PATIENCE_S)


def test_with_check_order_the_receiver_repeats_what_was_announced(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = local_pair(check_order=True)
    heard = []
    clear = one._outbox.clear
    monkeypatch.setattr(one._outbox, "clear", lambda frame: (heard.append(frame.payload), clear(frame)))
    one.send_tensor(torch.zeros(10))
    assert other.recv_tensor(timeout=PATIENCE_S).shape == (10,)
    assert heard == [PREFIX]


def test_a_stranger_that_is_let_in_and_joins_wrongly_stops_no_other_peer(
    fake_path: str, local_pair: Any, controls: Any
) -> None:
    end = ends.endpoint(fake_path)
    with end.listen() as listener, ExitStack() as stack:
        where = PyncclContact.parse(listener.contact).reachable()[0]
        for data in (
            b"",
            b"x" * 1000,
            join.Join(step=join.Step.READY).pack(),
            join.Join(step=join.Step.HELLO, version=7).pack(),
        ):
            connection = stack.enter_context(dial(where, Credentials(), join.PURPOSE))
            connection.sock.sendall(data)
        connecting = Call(lambda: end.connect(listener.contact))
        with listener.accept() as one, connecting.result() as other:
            one.send_tensor(torch.arange(2))
            assert other.recv_tensor().tolist() == [0, 1]
