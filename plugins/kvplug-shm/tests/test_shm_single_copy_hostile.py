"""What a peer of single copies says that cannot be."""

from __future__ import annotations

import socket
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from kvplug import TimeoutError, TransportError
from kvplug.net.wire.frames import FrameKind, encode_header
from kvplug.net.wire.messages import tensor_prefix
from kvplug.testing import peers
from kvplug.transport import PeerIdentity, WireError, this_process
from kvplug_shm.memory.attach import PeerMemory, Word, own_word
from kvplug_shm.pipe import joining
from kvplug_shm.pipe.announcement import OFFERED, address_line
from kvplug_shm.pipe.rings import lines

HERE = Path(__file__)
ends = SimpleNamespace(**run_path(str(HERE.with_name("single_copy_ends.py"))))
near_pair = ends.near_pair

there_are_huge_pages, pair = ends.there_are_huge_pages, ends.pair

huge = ends.huge


def put(pipe: Any, *parts: bytes) -> None:
    """Into the ring, as a peer of another kind could."""
    ring = pipe._outbox._ring
    said = b"".join(part.ljust(lines(len(part)), b"\0") for part in parts)
    ring.write(ring.end.sent, said)
    ring.end.publish(len(said))


def offer(address: int, nbytes: int = 2**21) -> tuple[bytes, bytes]:
    return tensor_prefix(torch.uint8, torch.Size([nbytes]), nbytes, OFFERED), address_line(address)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (offer(0), "at an address where none can be"),
        (offer(2**63), "at an address where none can be"),
        (offer(4096), "cannot be read: Bad address"),
        ((tensor_prefix(torch.uint8, torch.Size([0]), 0, OFFERED), address_line(4096)), "does not use"),
        ((encode_header(FrameKind.NONE, 0, OFFERED),), "does not use"),
        ((tensor_prefix(torch.uint8, torch.Size([9]), 9, 2),), "does not use"),
    ],
)
def test_an_offer_that_cannot_be_is_an_error_and_the_end(pair: Any, said: Any, error: str) -> None:
    one, other = pair()
    put(one, *said)
    with pytest.raises(WireError, match=error):
        other.recv_tensor(timeout=10)
    with pytest.raises(TransportError):
        other.recv_tensor(timeout=10)


def test_an_offer_that_was_not_agreed_on_is_an_error(near_pair: Any) -> None:
    one, other = near_pair()
    tensor = huge(2**21)
    put(one, *offer(tensor.data_ptr()))
    with pytest.raises(WireError, match="not agreed on"):
        other.recv_tensor(timeout=10)


def test_an_offer_without_its_address_is_waited_for(pair: Any) -> None:
    one, other = pair()
    tensor = huge(2**21)
    prefix, line = offer(tensor.data_ptr())
    put(one, prefix)
    with pytest.raises(TimeoutError, match="not wholly arrived"):
        other.recv_tensor(timeout=0.05)
    put(one, line)
    assert torch.equal(other.recv_tensor(timeout=10), tensor)


def tell_its_word(parent: peers.Parent) -> None:
    word = own_word()
    parent.send((attrs.asdict(this_process()), word.address, word.value))
    parent.recv()


def test_who_says_that_it_is_another_process_is_not_helped_to_read_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tuning: Any = SimpleNamespace(single_copy=True)
    ours, theirs = socket.socketpair()  # of this process, as the kernel says
    with ours, theirs, peers.start(f"{HERE}:tell_its_word") as child:
        identity, *word = child.recv()
        for peer, said, is_read in [
            (PeerIdentity(**identity), Word(*word), False),
            (this_process(), own_word(), True),
        ]:
            control: Any = SimpleNamespace(sock=ours, peer=peer, describe=str(peer))
            PeerMemory(peer, said)  # could be read
            memory = joining._memory_of(control, joining.Join(step=0, word=said), tuning)
            assert (memory is not None) is is_read
        child.send(None)
    assert "of another pid than it says" in caplog.text
