"""Groups of real processes (and, where only values matter, of threads)."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvplug.errors import (
    AddressInUseError,
    AuthenticationError,
    ClosedError,
    ConfigError,
    InsecureAddressError,
    PeerGoneError,
    TimeoutError,
    WireError,
)
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.credentials import Credentials, Secret
from kvplug.net.trust.listener import Listener
from kvplug.transport.group import store
from kvplug.transport.group.group import StatelessGroup
from kvplug.transport.group.store import PURPOSE
from kvplug_testing import peers
from kvplug_testing.contract.forked_child import in_forked_child
from kvplug_testing.waits import Call

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("nothing_left")]

SECRET = Credentials(Secret("the secret of these tests"))


def in_threads(
    world_size: int,
    work: Callable[[StatelessGroup], Any],
    address: str = "unix:",
    credentials: Credentials | None = None,
) -> list[Any]:
    """Run ``work`` as each rank; results by rank. The first error is raised when all have ended."""
    listener = StatelessGroup.listen(address, credentials)

    def run(rank: int) -> Any:
        with StatelessGroup.create(
            listener if rank == 0 else listener.contact,
            rank=rank,
            world_size=world_size,
            credentials=credentials,
            timeout_s=20,
        ) as group:
            return work(group)

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(world_size)]
    return [future.result() for future in futures]


Pair = tuple[StatelessGroup, StatelessGroup, str]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ranks of a group, and its contact."""
    listener = StatelessGroup.listen("unix:")
    zero = Call(lambda: StatelessGroup.create(listener, rank=0, world_size=2, timeout=20))
    with (
        StatelessGroup.create(listener.contact, rank=1, world_size=2, timeout=20) as one,
        zero.result() as group,
    ):
        yield group, one, listener.contact


@pytest.mark.parametrize(("address", "credentials"), [("unix:", None), ("127.0.0.1:0", SECRET)])
def test_ranks_exchange_values(address: str, credentials: Credentials | None) -> None:
    def work(group: StatelessGroup) -> None:
        me, n = group.rank, group.world_size
        group.set(f"from {me}", {"rank": me, "set": {1, 2}, "tuple": (1, b"x")})
        for other in range(n):
            assert group.get(f"from {other}") == {"rank": other, "set": {1, 2}, "tuple": (1, b"x")}
        assert group.all_gather(("I am", me)) == [("I am", r) for r in range(n)]
        for src in range(n):
            assert group.broadcast(["from", me], src) == ["from", src]
        group.barrier()
        for i in range(3):
            group.send((me, i), (me + 1) % n)
        assert [group.recv((me - 1) % n) for _ in range(3)] == [((me - 1) % n, i) for i in range(3)]
        group.add("count", me)
        group.barrier()
        assert group.add("count", 0) == sum(range(n))
        group.barrier()
        assert group.delete(f"from {me}") is True
        assert group.delete(f"from {me}") is False
        group.barrier()

    in_threads(4, work, address, credentials)


def test_many_rounds_leave_nothing_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvplug.transport.group.store.MAX_BYTES", 20 * 2048
    )  # of which each value takes 1 KiB

    def work(group: StatelessGroup) -> None:
        for i in range(100):
            group.barrier()
            assert group.all_gather(i) == [i, i]
            assert group.broadcast(i, i % 2) == i
            group.send(i, 1 - group.rank)
            assert group.recv(1 - group.rank) == i

    in_threads(2, work)


def test_a_fast_rank_may_leave_before_the_others_have_fetched_what_it_gave() -> None:
    def work(group: StatelessGroup) -> Any:
        if group.rank == 0:
            group.send("letter", 1)
            return group.broadcast("news", 0)
        time.sleep(0.3)
        return group.recv(0), group.broadcast(None, 0)

    assert in_threads(2, work) == ["news", ("letter", "news")]


def test_a_timeout_names_the_missing_ranks_and_the_call_can_be_made_again() -> None:
    late = threading.Event()

    def work(group: StatelessGroup) -> Any:
        if group.rank == 2:
            assert late.wait(20)
        else:
            with pytest.raises(TimeoutError, match=r"missing .*rank 2 \(rank 2, pid") as caught:
                group.barrier(0.3)
            with pytest.raises(
                TimeoutError, match=r"message from rank 2 .*: still missing rank 2 \(rank 2, pid"
            ):
                group.recv(2, 0.05)
            assert f"pid {os.getpid()}" in str(caught.value)
            group.send("checked", 1 - group.rank)
            group.recv(1 - group.rank)
            late.set()
        group.barrier()
        return group.all_gather(group.rank)

    assert in_threads(3, work) == [[0, 1, 2]] * 3


def test_who_did_not_come_is_named_by_rank_zero_and_by_the_others() -> None:
    listener = StatelessGroup.listen("unix:")
    calls = [
        Call(lambda rank=rank, at=at: StatelessGroup.create(at, rank=rank, world_size=3, timeout=0.8))  # type: ignore[misc]
        for rank, at in enumerate((listener, listener.contact))
    ]
    assert "missing rank 2 (never came)" in str(calls[0].raised(TimeoutError, 10))
    assert "missing rank 2 (never came)" in str(calls[1].raised((TimeoutError, PeerGoneError), 10))  # type: ignore[arg-type]


def test_ranks_that_do_not_fit_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"rank must be in 0\.\.1"):
        StatelessGroup.create("unix:", rank=2, world_size=2)
    listener = StatelessGroup.listen("unix:")
    zero = Call(lambda: StatelessGroup.create(listener, rank=0, world_size=2, timeout=10))
    with pytest.raises(WireError, match="has world_size 3, but rank 0 has 2"):
        StatelessGroup.create(listener.contact, rank=1, world_size=3, timeout=5)
    with StatelessGroup.create(listener.contact, rank=1, world_size=2, timeout=5), zero.result() as group:
        with pytest.raises(WireError, match="rank 1 is taken"):
            StatelessGroup.create(listener.contact, rank=1, world_size=2, timeout=5)
        with pytest.raises(ConfigError, match="another rank"):
            group.send("x", 0)
        with pytest.raises(ConfigError, match="a rank"):
            group.broadcast("x", 2)
    with pytest.raises(ConfigError, match="give it the contact"):
        StatelessGroup.create(listener, rank=1, world_size=2)


def test_addresses_and_secrets_are_checked_as_everywhere() -> None:
    with pytest.raises(InsecureAddressError):
        StatelessGroup.create("192.0.2.1:29555", rank=1, world_size=2)
    with StatelessGroup.listen("127.0.0.1:0", SECRET) as listener:
        with pytest.raises(AddressInUseError):
            StatelessGroup.create(listener.contact, rank=0, world_size=2, credentials=SECRET)
        ends: Any = {"world_size": 2, "timeout": 20}
        zero = Call(lambda: StatelessGroup.create(listener, rank=0, credentials=SECRET, **ends))
        with pytest.raises(AuthenticationError, match="KVPLUG_SECRET"):
            StatelessGroup.create(
                listener.contact, rank=1, credentials=Credentials(Secret("not the secret at all")), **ends
            )
        StatelessGroup.create(listener.contact, rank=1, credentials=SECRET, **ends).close()
        zero.result().close()


def test_strangers_at_the_store_delay_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    # Strangers are tolerated for longer than the ranks wait: a rank that one delays fails.
    patience_s, wait_s = 600, 60
    monkeypatch.setattr(store, "_ANSWER_TIMEOUT_S", patience_s)
    monkeypatch.setattr("kvplug.net.trust.listener._PROOF_TIMEOUT_S", patience_s)
    listener = Listener.open("127.0.0.1:0", SECRET, PURPOSE)
    port = int(listener.contact.rsplit(":", 1)[1])
    with contextlib.ExitStack() as stack:
        for data in (b"", b"", b"\x80\x04\x95garbage", os.urandom(5000)):
            s = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):
                s.sendall(data)
        with ThreadPoolExecutor(1) as pool:
            ends: Any = {"world_size": 2, "credentials": SECRET, "timeout": wait_s}
            zero = pool.submit(StatelessGroup.create, listener, rank=0, **ends)
            # Proven, but not of this group: sends nothing, or garbage.
            mute, odd, liar = (
                Channel(Connection.dial(listener.contact, SECRET, PURPOSE, wait_s)) for _ in range(3)
            )
            odd.send({"no": "greeting"})
            liar.send(("ask", 1))
            # Before rank 1 is there: it will be of this very process, and then it would be no lie.
            assert liar.recv(wait_s)[0] == "refused"
            one = StatelessGroup.create(listener.contact, rank=1, **ends)
            group = zero.result()
        one.set("k", 1)
        assert group.get("k", wait_s) == 1
        with pytest.raises(PeerGoneError):
            odd.recv(wait_s)
        assert "silent" not in listener.refusals, "the strangers were sent away, and proved nothing"
        one.close()
        group.close()
        for channel in (mute, odd, liar):
            channel.close()


def test_closing_wakes_waiting_calls_and_later_calls_are_refused(pair: Pair) -> None:
    zero, one, _ = pair
    waits = [Call(lambda g=g: g.get("never", 30)) for g in (one, zero)]  # type: ignore[misc]
    assert all(wait.is_blocked(0.1) for wait in waits)
    one.close()
    waits[0].raised(ClosedError, 5)
    with pytest.raises(PeerGoneError, match=r"rank 1 .* has left"):
        zero.barrier(30)
    zero.close()
    waits[1].raised(ClosedError, 5)
    for g in (one, zero):
        g.close()
        assert g.closed and "closed" in repr(g)
        with pytest.raises(ClosedError):
            g.set("k", 1)


# -- real processes --------------------------------------------------------------------------------


def member(parent: peers.Parent, contact: str, rank: int, world_size: int, verb: str) -> str:
    """A rank of a group that makes one call. Returns the error that this raises."""
    group = StatelessGroup.create(contact, rank=rank, world_size=world_size, timeout=30, timeout_s=20)
    parent.send("met")
    try:
        if verb:
            getattr(group, verb)(*(["never"] if verb == "get" else []), 20)
        parent.recv()
    except PeerGoneError as e:
        return f"{e}"
    return ""


@contextlib.contextmanager
def members(contact: str, world_size: int, **verbs: str) -> Iterator[list[peers.Peer]]:
    """Processes that are the ranks of these verbs: ``rank_1="barrier"``."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(peers.start(member, contact, int(name[-1]), world_size, verb))
            for name, verb in verbs.items()
        ]


def killed_soon(child: peers.Peer) -> Call:
    return Call(lambda: (time.sleep(0.2), child.kill()))


def test_in_a_forked_child_messages_are_refused_though_a_thread_was_in_such_a_call(pair: Pair) -> None:
    zero, one, _ = pair

    def look() -> str:
        calls: dict[str, Callable[[], Any]] = {
            "recv": lambda: one.recv(0),
            "send": lambda: one.send(1, 0),
            "barrier": one.barrier,
        }
        return ", ".join(f"{name}: {type(Call(call).end().error).__name__}" for name, call in calls.items())

    waiting = [Call(lambda: one.recv(0, 20)), Call(lambda: one.barrier(20))]
    assert all(call.is_blocked() for call in waiting)
    assert in_forked_child(look) == "recv: ClosedError, send: ClosedError, barrier: ClosedError"
    zero.send("a message", 1)
    zero.barrier()
    assert [call.result() for call in waiting] == ["a message", None]


def test_ranks_are_processes_and_a_killed_one_is_named_at_once() -> None:
    listener = StatelessGroup.listen("unix:")
    with (
        members(listener.contact, 3, rank_1="", rank_2="barrier") as (sleeper, waiter),
        StatelessGroup.create(listener, rank=0, world_size=3, timeout=30) as group,
    ):
        assert sleeper.recv() == waiter.recv() == "met"
        sleeper.stop()
        with pytest.raises(TimeoutError, match=f"rank 1, pid {sleeper.pid}"):
            group.recv(1, 0.3)  # stopped is not dead
        killer = killed_soon(sleeper)
        began = time.monotonic()
        with pytest.raises(PeerGoneError, match=f"rank 1, pid {sleeper.pid}.* is gone"):
            group.barrier(20)
        assert time.monotonic() - began < 3
        assert f"pid {sleeper.pid}" in waiter.result()
        killer.result()


def test_the_end_of_rank_zero_is_the_end_for_all_and_while_it_is_stopped_calls_run_out_of_time() -> None:
    with StatelessGroup.listen("unix:") as placeholder:
        contact = placeholder.contact
    with (
        members(contact, 3, rank_0="", rank_2="get") as (zero, two),
        StatelessGroup.create(contact, rank=1, world_size=3, timeout=30) as group,
    ):
        assert zero.recv() == two.recv() == "met"
        zero.stop()
        with pytest.raises(TimeoutError, match=rf"rank 0 \(rank 0, pid {zero.pid}\).* did not answer"):
            group.get("k", 0.1)
        zero.cont()
        group.set("k", 1)
        assert group.get("k") == 1
        killer = killed_soon(zero)
        began = time.monotonic()
        with pytest.raises(PeerGoneError, match=rf"rank 0 \(rank 0, pid {zero.pid}\)"):
            group.barrier(20)
        assert time.monotonic() - began < 3
        assert two.result()
        with pytest.raises(PeerGoneError):
            group.set("k", 1)
        killer.result()
