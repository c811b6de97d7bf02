"""How things with a peer end, and what they say of it."""

from __future__ import annotations

import threading

from kvplug.errors import ClosedError, PeerGoneError, TransportError
from kvplug.transport import Lifecycle


def test_what_lives_is_neither_closed_nor_ended() -> None:
    lifecycle = Lifecycle("the pipe to a peer")
    assert not (lifecycle.closed or lifecycle.ended or lifecycle.peer_lost or lifecycle.broken)
    assert isinstance(lifecycle.error(), PeerGoneError)


def test_the_first_reason_is_kept() -> None:
    lifecycle = Lifecycle("the pipe to a peer")
    assert lifecycle.lose_peer("its process ended")
    assert not lifecycle.fail("nonsense came")
    assert not lifecycle.lose_peer("it closed the connection")
    assert lifecycle.ended
    assert lifecycle.peer_lost
    assert not lifecycle.broken
    error = lifecycle.error()
    assert isinstance(error, PeerGoneError)
    assert str(error) == "the pipe to a peer: its process ended"
    assert lifecycle.error() is not error


def test_what_broke_is_no_loss_of_a_peer() -> None:
    lifecycle = Lifecycle("the pipe to a peer")
    assert lifecycle.fail("nonsense came")
    assert lifecycle.broken
    assert not lifecycle.peer_lost
    assert type(lifecycle.error()) is TransportError


def test_closing_goes_before_every_other_reason() -> None:
    lifecycle = Lifecycle("the pipe to a peer")
    lifecycle.lose_peer("its process ended")
    assert lifecycle.close("is closed")
    assert not lifecycle.close("was aborted")
    assert lifecycle.closed
    assert lifecycle.peer_lost
    error = lifecycle.error()
    assert isinstance(error, ClosedError)
    assert str(error) == "the pipe to a peer is closed"


def test_a_forked_child_learns_that_it_is_its_parents_though_the_lock_is_taken() -> None:
    lifecycle = Lifecycle("the pipe to a peer")
    with lifecycle._lock:
        lifecycle.after_fork()
        assert lifecycle.closed
        assert not lifecycle.close("is closed")
        assert isinstance(lifecycle.error(), ClosedError)
        assert "forked" in str(lifecycle.error())


def test_of_many_who_close_it_one_has() -> None:
    lifecycle, won = Lifecycle("the pipe to a peer"), []
    go = threading.Barrier(8)

    def close() -> None:
        go.wait(10)
        won.append(lifecycle.close("is closed"))

    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]
