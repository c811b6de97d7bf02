"""Ctrl-C, wherever it comes, leaves nothing taken that another thread waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

PROGRAM = """
import os, signal, socket, threading
from kvplug import KvplugError, StatelessGroup
from kvplug.transport import Acceptor, Channel, Connection, Credentials, Listener, PeerIdentity
from kvplug.net.trust.challenge import Mode

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
elsewhere = PeerIdentity(pid=1, host="elsewhere", label="peer")
"""
ROUNDS = """
interrupted = 0
for _ in range(2000):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0002)
        while True:
            try:
                call()
            except KvplugError:  # it ran out of time
                pass
    except (KeyboardInterrupt, RuntimeError):  # the latter: in a Condition's wait, without the lock
        interrupted += 1
assert interrupted == 2000
other = threading.Thread(target=end, daemon=True)
other.start()
other.join(20)
assert not other.is_alive(), "another thread waits for what was taken before Ctrl-C"
"""
CHANNEL = """
ours, theirs = socket.socketpair()
channel = Channel(Connection(ours, elsewhere, "test", Mode.SECRET, "here"))
threading.Thread(target=lambda: [None for _ in iter(lambda: theirs.recv(65536), b"")], daemon=True).start()
call = lambda: channel.send("value", timeout=None)

def end():
    channel.send("value", timeout=None)
    channel.close()
    assert channel.fileno() == -1, "the descriptor is still open"
"""
ACCEPTOR = """
acceptor = Acceptor(
    [Listener.open("unix:", Credentials(), "test")],
    lambda connection: None,
    what="a test",
    name="kvplug-test",
    timeout_s=0,
)
call = acceptor.accept
end = acceptor.close
"""
GROUP = """
group = StatelessGroup.create("unix:", rank=0, world_size=1)
call = lambda: group.set("key", 1)
end = lambda: group.set("key", 2)
"""


@pytest.mark.parametrize("program", [CHANNEL, ACCEPTOR, GROUP], ids=["channel", "acceptor", "group"])
def test_ctrl_c_leaves_nothing_taken(program: str, output_of: Callable[..., str]) -> None:
    output_of(PROGRAM + program + ROUNDS)
