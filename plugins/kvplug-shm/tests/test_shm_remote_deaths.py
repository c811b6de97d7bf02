"""Ends of the network half that die, fall silent, break or leave; and what stays of them."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import shm_remote_ends as ends
from kvplug import KvplugError, PeerGoneError, TransportError
from kvplug.transport import Deadline, PeerIdentity
from kvplug_shm.queue import reader_link, remote_writer
from kvplug_shm.queue.remote_frames import QueueFrameKind
from kvplug_testing import peers
from kvplug_testing.contract.forked_child import held, in_forked_child, more_than

REMOTE = str(Path(__file__).with_name("shm_remote_ends.py"))
context, joined, taken = ends.context, ends.joined, ends.taken


@pytest.fixture
def writer() -> Iterator[Any]:
    made = ends.Writing(context(), range(2))
    yield made
    made.network.abort()
    made.network.join(None)


def test_a_reader_that_is_killed_is_evicted_by_name_and_the_others_go_on(
    writer: Any, fork_server: Any
) -> None:
    second = joined(context(), writer.network.data, 1)
    with fork_server.start(f"{REMOTE}:idle_reader", dict(writer.network.data)) as child:
        child.recv()
        assert writer.feed.came[0] == f"pid {child.pid}"
        writer.send(b"0")
        assert taken(second)[2] == b"0"
        child.kill()
        writer.feed.until(lambda: writer.feed.gone)
    why, died = writer.feed.gone[0]  # whichever is noticed first
    assert why in ("its process ended", "its connection ended") and died
    for number in range(20):
        writer.send(b"%d" % number)
        assert taken(second)[2] == b"%d" % number
    second.leave(died=False)


@pytest.mark.parametrize(("died", "why"), [(False, "has left"), (True, "its connection ended")])
def test_a_reader_that_leaves_is_told_from_one_that_died(writer: Any, died: bool, why: str) -> None:
    for rank in range(2):
        joined(context(), writer.network.data, rank).leave(died=died)
    writer.feed.until(lambda: len(writer.feed.gone) == 2)
    assert writer.feed.gone == {0: (why, died), 1: (why, died)}


def test_a_reader_that_says_goodbye_and_exits_at_once_has_left(writer: Any, fork_server: Any) -> None:
    with fork_server.start(f"{REMOTE}:remote_reader", dict(writer.network.data), 1) as child:
        child.recv()
        writer.send(b"0")
        assert child.result() == ""
        writer.feed.until(lambda: writer.feed.gone)
    assert writer.feed.gone == {0: ("has left", False)}


def test_a_reader_on_this_host_that_is_stopped_is_alive_and_not_buried_in_beats(
    monkeypatch: pytest.MonkeyPatch, fork_server: Any
) -> None:
    monkeypatch.setattr(remote_writer, "BEATS", 4)
    writer = ends.Writing(context(heartbeat_timeout_s=0.5))
    with fork_server.start(f"{REMOTE}:idle_reader", dict(writer.network.data), 0.5) as child:
        child.recv()
        child.stop()
        (link,) = writer.network._links.values()
        writer.feed.until(lambda: link.beats == 4)
        time.sleep(1.0)
        assert not writer.feed.gone and link.beats == 4
        writer.send(b"late")
        child.cont()
        child.send("read")
        writer.close()
        first, end = child.result()
        assert first == "late" and end.startswith("PeerGoneError")


def test_a_stopped_reader_is_not_waited_for_beyond_the_callers_deadline(
    writer: Any, monkeypatch: pytest.MonkeyPatch, fork_server: Any
) -> None:
    monkeypatch.setattr(remote_writer, "ARRIVAL_S", 1000.0)
    with fork_server.start(f"{REMOTE}:idle_reader", dict(writer.network.data)) as child:
        child.recv()
        child.stop()
        sending = threading.Thread(target=writer.send, args=(b"late",), kwargs={"timeout_s": 0.1})
        sending.start()
        sending.join(ends.PATIENCE_S)
        waits = sending.is_alive()
        writer.network.abort()
        sending.join(ends.PATIENCE_S)
        child.kill()
    assert not waits and not writer.feed.gone


def test_where_its_process_cannot_be_seen_a_silent_reader_is_evicted_and_hears_what_it_lost(
    monkeypatch: pytest.MonkeyPatch, fork_server: Any
) -> None:
    monkeypatch.setattr(PeerIdentity, "open_pidfd", lambda self: None)
    writer = ends.Writing(context(heartbeat_timeout_s=1.0), places=10)
    with fork_server.start(f"{REMOTE}:idle_reader", dict(writer.network.data), 1.0) as child:
        child.recv()
        time.sleep(2.0)
        assert not writer.feed.gone  # beats keep it alive
        writer.send(b"arrived")
        child.stop()
        writer.feed.until(lambda: writer.feed.gone)
        why, died = writer.feed.gone[0]
        assert why.startswith("silent for") and died
        child.cont()
        child.send("read")
        first, end = child.result()
    writer.network.abort()
    assert first == "arrived"
    assert end.startswith("TransportError") and "has evicted this reader (silent for" in end
    assert "0 of 1 messages are lost to reader rank 0, and all that come later" in end


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "no descriptors"), RuntimeError("no thread")])
def test_a_process_that_cannot_be_watched_is_told_by_its_silence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, fork_server: Any
) -> None:
    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setattr(reader_link, "watch", fail)
    writer = ends.Writing(context(heartbeat_timeout_s=1.0))
    with fork_server.start(f"{REMOTE}:idle_reader", dict(writer.network.data), 1.0) as child:
        child.recv()
        child.stop()
        writer.feed.until(lambda: writer.feed.gone)
        assert writer.feed.gone[0][0].startswith("silent for")
    writer.network.abort()


@pytest.mark.full
def test_the_more_impatient_end_says_how_often_both_say_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerIdentity, "open_pidfd", lambda self: None)
    for ours, theirs in ((0.8, 60.0), (60.0, 0.8)):
        writer = ends.Writing(context(heartbeat_timeout_s=ours))
        reader = joined(context(heartbeat_timeout_s=theirs), writer.network.data)
        time.sleep(2.5)
        writer.send(b"still there")
        assert taken(reader)[2] == b"still there"
        reader.leave(died=False)
        assert writer.feed.gone == {0: ("has left", False)}
        writer.network.abort()


def test_of_a_writer_that_is_killed_everything_it_had_sent_is_received_first(fork_server: Any) -> None:
    with fork_server.start(f"{REMOTE}:remote_writer", 50) as child:
        data = child.recv()
        reader = joined(context(), data)
        child.send("go")
        assert child.recv() == "sent"
        child.kill()
        assert [taken(reader)[2] for _ in range(50)] == [b"%d" % at for at in range(50)]
        for _ in range(2):
            with pytest.raises(PeerGoneError, match=rf"pid {child.pid} at {data['address']}"):
                taken(reader)
        reader.leave(died=False)
        with pytest.raises(PeerGoneError, match="no process listens"):
            joined(context(), data)


def test_who_waits_hears_of_the_writers_death(fork_server: Any) -> None:
    with fork_server.start(f"{REMOTE}:remote_writer", 1) as child:
        reader = joined(context(), child.recv())
        errors: list[BaseException] = []

        def wait_on() -> None:
            try:
                reader.wait_until_ready(ends.wait_for("all"), lambda: None)
            except KvplugError as e:
                errors.append(e)

        waiting = threading.Thread(target=wait_on)
        waiting.start()
        child.kill()
        waiting.join(ends.PATIENCE_S)
    assert isinstance(errors[0], PeerGoneError)
    reader.leave(died=True)


def test_a_writer_on_this_host_that_is_stopped_is_alive_and_elsewhere_it_is_not(
    monkeypatch: pytest.MonkeyPatch, fork_server: Any
) -> None:
    for seen in (True, False):
        if not seen:
            monkeypatch.setattr(PeerIdentity, "open_pidfd", lambda self: None)
        with fork_server.start(f"{REMOTE}:remote_writer", 1, 0.5) as child:
            reader = joined(context(heartbeat_timeout_s=0.5), child.recv())
            child.stop()
            try:
                with pytest.raises(TimeoutError if seen else PeerGoneError, match=r"a message|silent"):
                    taken(reader, 2.0 if seen else ends.PATIENCE_S)
            finally:
                child.cont()
            reader.leave(died=True)


def test_a_connection_that_breaks_is_not_made_again_in_silence(writer: Any) -> None:
    relay = ends.Wire(writer.network.data)
    reader = joined(context(), relay.data)
    writer.send(b"before")
    relay.cut()
    assert taken(reader)[2] == b"before"
    with pytest.raises(PeerGoneError, match="the connection ended after 1 messages"):
        taken(reader)
    writer.feed.until(lambda: writer.feed.gone)
    assert writer.feed.gone == {0: ("its connection ended", True)}
    reader.leave(died=False)


def test_a_writer_that_is_aborted_is_gone_after_what_it_had_sent(writer: Any) -> None:
    reader = joined(context(), writer.network.data)
    for number in range(4):
        writer.send(b"%d" % number)
    writer.network.abort()
    assert [taken(reader)[2] for _ in range(4)] == [b"0", b"1", b"2", b"3"]
    with pytest.raises(PeerGoneError):
        taken(reader)
    reader.leave(died=True)


def test_a_message_that_is_missing_is_told_with_how_many(writer: Any) -> None:
    reader = joined(context(), writer.network.data)
    (link,) = writer.network._links.values()
    writer.send(b"0")
    link.sent += 3
    for number in range(1, 5):
        writer.feed.messages.append(writer.feed.message(0)._replace(body=memoryview(b"%d" % number)))
    writer.network.changed(Deadline.after(ends.PATIENCE_S))
    assert taken(reader)[2] == b"0"
    for _ in range(2):
        with pytest.raises(TransportError, match="3 messages from the writer, from number 1 on, were lost"):
            taken(reader)
    with pytest.raises(TransportError):
        reader.poll()
    reader.leave(died=True)


@pytest.mark.parametrize("kind", [QueueFrameKind.MESSAGE, QueueFrameKind.READY])
def test_a_fault_that_concerns_one_reader_ends_only_that_ones_part(
    writer: Any, monkeypatch: pytest.MonkeyPatch, kind: QueueFrameKind
) -> None:
    readers = [joined(context(), writer.network.data, rank) for rank in range(2)]
    (faulty,) = [link.routing_id for link in writer.network._links.values() if link.rank == 0]
    put = writer.network._put

    def fail(routing_id: bytes, parts: list[Any]) -> None:
        if routing_id == faulty and parts[0][0] == kind:
            raise RuntimeError("something unforeseen")
        put(routing_id, parts)

    monkeypatch.setattr(writer.network, "_put", fail)
    monkeypatch.setattr(writer.feed, "all_ready", lambda: True)
    writer.network._links[faulty].wants_ready = kind is QueueFrameKind.READY
    writer.send(b"0")
    writer.feed.until(lambda: writer.feed.gone)
    writer.send(b"1")
    assert [taken(readers[1])[2] for _ in range(2)] == [b"0", b"1"]
    assert writer.feed.gone == {0: ("a fault at the writer's end: something unforeseen", True)}
    with pytest.raises(TransportError, match="something unforeseen"):
        taken(readers[0])
    for reader in readers:
        reader.leave(died=True)


def test_nothing_is_read_from_the_ring_for_a_reader_that_is_gone(
    writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = joined(context(), writer.network.data)
    (link,) = writer.network._links.values()
    put, read = writer.network._put, []

    def unreachable(routing_id: bytes, parts: list[Any]) -> None:
        if parts[0][0] == QueueFrameKind.READY:
            raise zmq.ZMQError(errno.EHOSTUNREACH)
        put(routing_id, parts)

    monkeypatch.setattr(writer.network, "_put", unreachable)
    monkeypatch.setattr(writer.feed, "message", read.append)
    monkeypatch.setattr(writer.feed, "all_ready", lambda: True)
    link.wants_ready = True
    writer.feed.messages.append(None)
    writer.network.changed(Deadline.after(ends.PATIENCE_S))
    writer.feed.until(lambda: writer.feed.gone)
    assert writer.feed.gone == {0: ("its connection ended", True)}
    writer.network.abort()
    writer.network.join(None)
    assert not read
    reader.leave(died=True)


def test_ends_leave_nothing() -> None:
    before = peers.Resources.of()
    for politely in (True, False):
        for _ in range(5):
            each = ends.Writing(context())
            reader = joined(context(), each.network.data)
            each.send(b"x")
            assert taken(reader)[2] == b"x"
            reader.leave(died=not politely)
            if politely:
                each.close()
            else:
                each.network.abort()
    deadline = Deadline.after(ends.PATIENCE_S)
    while left := peers.Resources.of().beyond(before):
        assert not deadline.expired, left
        time.sleep(0.02)


def test_a_connection_does_not_live_on_in_a_forked_child(writer: Any, fork_server: Any) -> None:
    with fork_server.start(f"{REMOTE}:forking_reader", dict(writer.network.data)) as child:
        forked = child.recv()
        try:
            writer.feed.until(lambda: writer.feed.gone)
            assert os.path.exists(f"/proc/{forked}")
            assert writer.feed.gone == {0: ("its connection ended", True)}
        finally:
            os.kill(forked, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_keeps_the_programs_own_descriptors_and_none_of_zeromqs() -> None:
    before = in_forked_child(held)
    writer = ends.Writing(context())
    with contextlib.ExitStack() as stack:
        stack.callback(writer.network.join, None)
        stack.callback(writer.network.abort)
        reader = joined(context(), writer.network.data)
        stack.callback(reader.leave, died=True)
        host, _, number = str(writer.network.data["address"]).rpartition(":")
        port = int(number)
        datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        datagrams.bind((host, port))
        elsewhere = ("127.0.0.2", port)  # another address with the same number
        listening = stack.enter_context(socket.create_server(elsewhere))
        connected = stack.enter_context(socket.create_connection(elsewhere))
        event = os.eventfd(0)
        stack.callback(os.close, event)
        polling = stack.enter_context(select.epoll())
        polling.register(event)
        own = {each.fileno() for each in (datagrams, listening, connected, polling)} | {event}
        kept = more_than(before).split(", ")
        assert {int(line.partition(" ")[0]) for line in kept} == own, kept
        writer.send(b"still there")
        assert taken(reader) == (False, b"", b"still there")


def test_too_few_descriptors_are_an_error_and_not_the_end_of_the_process(fork_server: Any) -> None:
    with fork_server.start(f"{REMOTE}:without_descriptors") as child:
        assert "no free descriptor" in child.result()


def test_an_end_that_cannot_be_made_is_a_transport_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = ends.Writing(context())
    data = dict(writer.network.data)
    start = threading.Thread.start

    def no_thread(self: threading.Thread) -> None:
        if self.name.startswith("kvplug listener"):  # the core's
            return start(self)
        raise RuntimeError("can't start new thread")

    def no_socket(self: Any, *_: Any) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    before = peers.Resources.of()
    for where, name, fail in ((threading.Thread, "start", no_thread), (zmq.Context, "socket", no_socket)):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, fail)
            with pytest.raises(TransportError, match=r"cannot be made|no more threads|no free descriptor"):
                ends.Writing(context())
            with pytest.raises(TransportError, match=r"cannot be made|no more threads|no free descriptor"):
                joined(context(), data)
    deadline = Deadline.after(ends.PATIENCE_S)
    while left := peers.Resources.of().beyond(before):
        assert not deadline.expired, left
        time.sleep(0.02)


def test_a_handler_may_come_in_while_the_thread_is_woken() -> None:
    writer = ends.Writing(context())

    def abort() -> None:
        with writer.network._waking:  # as if a signal came in here
            writer.network.abort()

    aborting = threading.Thread(target=abort, daemon=True)
    aborting.start()
    aborting.join(ends.PATIENCE_S)
    assert not aborting.is_alive()


@pytest.mark.full
def test_a_writer_that_is_stopped_takes_readers_in_when_it_goes_on(fork_server: Any) -> None:
    with fork_server.start(f"{REMOTE}:remote_writer", 1) as child:
        data = child.recv()
        child.stop()
        with pytest.raises(TimeoutError, match="did not answer"):
            ends.attach(context(), data, 0, Deadline.after(0.5))
        joining = threading.Timer(7.0, child.cont)  # longer than strangers have to prove themselves
        joining.start()
        reader = joined(context(), data)
        child.send("go")
        assert taken(reader)[2] == b"0"
        reader.leave(died=False)
        joining.join()
