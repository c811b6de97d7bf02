"""How things with a peer end, and what they say of it."""

from __future__ import annotations

import threading

from kvplug.errors import ClosedError, PeerGoneError, TransportError
from kvplug.net.fate import Fate


def test_what_lives_is_neither_closed_nor_sealed() -> None:
    fate = Fate("the pipe to a peer")
    assert not (fate.closed or fate.sealed or fate.peer_lost or fate.broken)
    assert isinstance(fate.error(), PeerGoneError)


def test_the_first_reason_is_kept() -> None:
    fate = Fate("the pipe to a peer")
    assert fate.lose_peer("its process ended")
    assert not fate.break_down("nonsense came")
    assert not fate.lose_peer("it closed the connection")
    assert fate.sealed
    assert fate.peer_lost
    assert not fate.broken
    error = fate.error()
    assert isinstance(error, PeerGoneError)
    assert str(error) == "the pipe to a peer: its process ended"
    assert fate.error() is not error


def test_what_broke_is_no_loss_of_a_peer() -> None:
    fate = Fate("the pipe to a peer")
    assert fate.break_down("nonsense came")
    assert fate.broken
    assert not fate.peer_lost
    assert type(fate.error()) is TransportError


def test_closing_goes_before_every_other_reason() -> None:
    fate = Fate("the pipe to a peer")
    fate.lose_peer("its process ended")
    assert fate.close("is closed")
    assert not fate.close("was aborted")
    assert fate.closed
    assert fate.peer_lost
    error = fate.error()
    assert isinstance(error, ClosedError)
    assert str(error) == "the pipe to a peer is closed"


def test_a_forked_child_learns_that_it_is_its_parents_though_the_lock_is_taken() -> None:
    fate = Fate("the pipe to a peer")
    with fate._lock:
        fate.inherit()
        assert fate.closed
        assert not fate.close("is closed")
        assert isinstance(fate.error(), ClosedError)
        assert "forked" in str(fate.error())


def test_of_many_who_close_it_one_has() -> None:
    fate, won = Fate("the pipe to a peer"), []
    go = threading.Barrier(8)

    def close() -> None:
        go.wait(10)
        won.append(fate.close("is closed"))

    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]
