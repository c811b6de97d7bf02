"""How objects with a peer end, and the errors of their calls afterwards."""

from __future__ import annotations

import threading

from kvplug.errors import ClosedError
from kvplug.transport import DuplexPipe
from kvplug_testing.contract.forked_child import in_forked_child
from kvplug_testing.waits import Call


def test_closing_goes_before_every_other_reason() -> None:
    lifecycle = DuplexPipe.Lifecycle("the pipe to a peer")
    lifecycle.lose_peer("its process ended")
    assert lifecycle.close("is closed")
    assert not lifecycle.close("was aborted")
    assert lifecycle.closed
    assert lifecycle.peer_lost
    error = lifecycle.error()
    assert isinstance(error, ClosedError)
    assert str(error) == "the pipe to a peer is closed"


class Held(str):
    """A reason that delays the thread that reads it while that holds the lock."""

    go_on = threading.Event()

    def __bool__(self) -> bool:
        return self.go_on.wait(20)


def test_a_forked_child_learns_that_it_is_its_parents_though_the_lock_is_taken() -> None:
    lifecycle = DuplexPipe.Lifecycle("the pipe to a peer")
    lifecycle.fail(Held("nonsense came"))
    inside = Call(lambda: lifecycle.fail("again"))
    assert inside.is_blocked(0.1)
    found = in_forked_child(lambda: f"{lifecycle.closed} {lifecycle.close('again')} {lifecycle.error()!r}")
    assert found.startswith("True False ClosedError(") and "forked" in found
    Held.go_on.set()
    inside.result(5)
