"""A program with an open object leaves: it ends with its own exit code, soon and silently (law ALL-8).

Its threads only make calls of the object. A thread that drops a tensor itself may abort the process, whatever
the transport does, since that is a call of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from kvplug import TimeoutError
from kvplug_testing import peers

WAYS = ("abort", "close", "neither")
"""What the program does right before it leaves."""
_CODE = 7
_LEAVES_S = 20.0
"""The limit of a busy machine."""


def leave(
    parent: peers.Parent, way: str, *, abort: Callable[[], object], close: Callable[[], object]
) -> NoReturn:
    """In another process: end the object in this way, and leave the program."""
    parent.send("leaves")
    if way == "abort":
        abort()
    elif way == "close":
        close()
    parent.leave(_CODE)


def check_left(child: peers.Peer) -> None:
    """Fails unless the process leaves as law ALL-8 says."""
    assert child.recv() == "leaves"
    try:
        code = child.wait(_LEAVES_S)
    except TimeoutError as e:
        raise AssertionError(f"a program that left has not ended after {_LEAVES_S:.0f} s: {e}") from None
    wrote = f"it wrote to stderr: {child.stderr or 'nothing'}"
    assert code == _CODE, (
        f"a program that left with exit code {_CODE} ended otherwise: {peers.end_of(code)}; {wrote}"
    )
    assert not child.stderr, f"a program that left did not end silently; {wrote}"
