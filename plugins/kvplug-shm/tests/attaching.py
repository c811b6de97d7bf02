"""Whether this system lets a process read the memory of its child, and a child that of its parent."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvplug.testing import peers
from kvplug.transport import PeerIdentity, this_process
from kvplug_shm.memory.attach import PeerMemory, UnreadableError, Word, own_word


def told() -> tuple[dict[str, Any], tuple[int, bytes]]:
    """Of this process, as plain values."""
    word = own_word()
    return attrs.asdict(this_process()), (word.address, word.value)


def heard(peer: dict[str, Any], word: tuple[int, bytes]) -> tuple[PeerIdentity, Word]:
    return PeerIdentity(**peer), Word(*word)


def refusal(peer: dict[str, Any], word: tuple[int, bytes]) -> str:
    """Why the system does not let this process read there, or nothing."""
    try:
        PeerMemory(*heard(peer, word))
    except UnreadableError as e:
        if "does not let this process read there" not in str(e):
            raise
        return str(e)
    return ""


def in_child(parent: peers.Parent) -> str:
    parent.send(told())
    return refusal(*parent.recv())


@pytest.fixture(scope="module")
def readable_child() -> None:
    with peers.start(f"{__file__}:in_child") as child:
        why = refusal(*child.recv())
        child.send(told())
        child.result()
    if why:
        pytest.skip(f"a process cannot read its child's memory here: {why}")


@pytest.fixture(scope="module")
def readable_parent() -> None:
    with peers.start(f"{__file__}:in_child") as child:
        child.recv()
        child.send(told())
        why = child.result()
    if why:
        pytest.skip(f"a child cannot read its parent's memory here: {why}")
