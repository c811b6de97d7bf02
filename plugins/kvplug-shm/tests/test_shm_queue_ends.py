"""What the ends of the queue "shm" do beyond the kit: memory, moments, namespaces, warnings."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from kvplug import (
    BusyError,
    CapacityError,
    ClosedError,
    ConfigError,
    PeerGoneError,
    TimeoutError,
    TransportError,
)
from kvplug_shm.memory import waiting
from kvplug_shm.queue import near, writer as writer_module
from kvplug_shm.queue.joining import hang_up
from kvplug_shm.ring import order

ends = SimpleNamespace(**run_path(str(Path(__file__).with_name("queue_ends.py"))))
queue, far_reader = ends.queue, ends.far_reader
MIB = 1 << 20


@pytest.fixture
def sound_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a wake ends a sleep."""
    for module in (waiting, near, writer_module):
        monkeypatch.setattr(module, "NAP_S", 1000.0)


def asleep(ring: Any, word: int) -> bool:
    return bool(ring.words.words[word])


# -- waking ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sound_sleep")
@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("verb", ["dequeue", "wait_until_ready"])
def test_a_reader_that_sleeps_is_woken_when_it_ends(queue: Any, verb: str, end: str) -> None:
    _, (reader,) = queue()
    waits = ends.in_thread(getattr(reader, verb))
    time.sleep(0.3)
    getattr(reader, end)()
    assert isinstance(ends.end_of(waits), ClosedError)


@pytest.mark.usefixtures("sound_sleep")
@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("verb", ["enqueue", "wait_until_ready"])
def test_a_writer_that_sleeps_is_woken_when_it_ends(queue: Any, verb: str, end: str) -> None:
    writer, _ = queue()
    for number in range(ends.CHUNKS):
        writer.enqueue(number)
    calls = {"enqueue": lambda: writer.enqueue("more"), "wait_until_ready": writer.wait_until_ready}
    waits = ends.in_thread(calls[verb])
    time.sleep(0.3)
    getattr(writer, end)()
    assert isinstance(ends.end_of(waits), ClosedError)


@pytest.mark.usefixtures("sound_sleep")
def test_a_reader_that_sleeps_is_woken_by_a_message_and_by_the_writers_end(queue: Any) -> None:
    writer, readers = queue(2)
    waits = [ends.in_thread(reader.dequeue) for reader in readers]
    time.sleep(0.3)
    writer.enqueue("wake up")
    assert [ends.end_of(each) for each in waits] == ["wake up"] * 2
    waits = [ends.in_thread(reader.dequeue) for reader in readers]
    time.sleep(0.3)
    writer.close()
    assert all(isinstance(ends.end_of(each), PeerGoneError) for each in waits)


@pytest.mark.usefixtures("sound_sleep")
def test_a_writer_that_sleeps_is_woken_by_room_and_by_a_death(queue: Any) -> None:
    writer, readers = queue(2)
    for number in range(ends.CHUNKS):
        writer.enqueue(number)
        readers[0].dequeue()
    waits = ends.in_thread(lambda: writer.enqueue("room"))
    time.sleep(0.3)
    readers[1].dequeue()
    assert ends.end_of(waits) is None
    waits = ends.in_thread(lambda: writer.enqueue("more"))
    time.sleep(0.3)
    readers[1].abort()
    assert ends.end_of(waits) is None


@pytest.mark.usefixtures("sound_sleep")
def test_who_waits_to_be_ready_is_woken_by_the_last_who_is(queue: Any) -> None:
    writer, readers = queue(2)
    waits = [ends.in_thread(end.wait_until_ready) for end in (writer, readers[0])]
    time.sleep(0.3)
    readers[1].wait_until_ready()
    assert [ends.end_of(each) for each in waits] == [None, None]


def test_one_thread_at_a_time(queue: Any) -> None:
    writer, (reader,) = queue()
    waits = ends.in_thread(reader.dequeue)
    ends.until(lambda: asleep(reader._source._ring, 3))
    for call in (reader.dequeue, reader.wait_until_ready, lambda: reader.acquire_read().__enter__()):
        with pytest.raises(BusyError):
            call()
    writer.enqueue("first")
    assert ends.end_of(waits) == "first"


# -- ending ------------------------------------------------------------------------------------------


def test_a_writer_that_is_closed_within_its_own_chunk_sends_nothing(queue: Any) -> None:
    writer, (reader,) = queue()
    with pytest.raises(ClosedError), writer.acquire_write(4) as view:
        writer.close()
        view[:] = b"late"
    with pytest.raises(PeerGoneError):
        reader.dequeue(timeout=5)


def test_a_reader_that_is_closed_within_a_chunk_keeps_what_it_looks_at(queue: Any) -> None:
    writer, (reader,) = queue()
    with writer.acquire_write(4) as view:
        view[:] = b"here"
    with reader.acquire_read() as view:
        reader.close()
        assert view == b"here"
    assert (writer.readers[0].gone, writer.readers[0].died) == ("has left", False)


def test_many_threads_may_end_it_at_once(queue: Any) -> None:
    for _ in range(20):
        writer, (reader,) = queue()
        waits = ends.in_thread(reader.dequeue)
        ended = [
            ends.in_thread(call) for end in (writer, reader) for call in (end.close, end.abort, end.close)
        ]
        assert [ends.end_of(each) for each in ended] == [None] * 6
        assert isinstance(ends.end_of(waits), ClosedError | PeerGoneError)


class SlowFar:
    """A far half whose readers take nothing."""

    data: ClassVar[dict[str, Any]] = {}

    def __init__(self, interrupted: bool = False) -> None:
        self.closing, self.aborted = threading.Event(), threading.Event()
        self._interrupted = interrupted

    def close(self, deadline: Any) -> None:
        self.closing.set()
        if self._interrupted:
            raise KeyboardInterrupt
        assert self.aborted.wait(4 * ends.PATIENCE_S)

    def abort(self) -> None:
        self.aborted.set()


def test_abort_ends_a_close_that_waits_for_readers_elsewhere(queue: Any) -> None:
    writer, (reader,) = queue()
    writer._far = far = SlowFar()
    closes = ends.in_thread(lambda: writer.close(timeout=None))
    assert far.closing.wait(ends.PATIENCE_S)
    writer.abort()
    assert ends.end_of(closes) is None
    with pytest.raises(PeerGoneError):
        reader.dequeue()


def test_abort_ends_a_close_that_waits_for_whoever_is_inside(queue: Any) -> None:
    writer, (reader,) = queue()
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with writer.acquire_write(4):
            inside.set()
            assert go_on.wait(4 * ends.PATIENCE_S)

    holds = ends.in_thread(hold)
    assert inside.wait(ends.PATIENCE_S)
    closes = ends.in_thread(lambda: writer.close(timeout=None))
    ends.until(lambda: writer.closed)
    writer.abort()
    assert ends.end_of(closes) is None
    with pytest.raises(PeerGoneError):
        reader.dequeue()
    assert mapped() == 2, "somebody is inside with this memory"
    go_on.set()
    assert isinstance(ends.end_of(holds), ClosedError)
    assert mapped() == 1


def test_a_close_that_is_interrupted_lets_go_of_everything(queue: Any) -> None:
    writer, (reader,) = queue()
    writer._far = far = SlowFar(interrupted=True)
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    assert far.aborted.is_set() and mapped() == 1
    with pytest.raises(PeerGoneError):
        reader.dequeue()


def test_abort_ends_what_an_interrupted_abort_has_left(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, (reader,) = queue()
    ends.until(lambda: writer._admission._joined)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("kvplug_shm.queue.admission.hang_up", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.abort()
    writer.abort()
    assert mapped() == 1
    with pytest.raises(PeerGoneError):
        reader.dequeue()


def test_a_call_that_comes_while_the_end_is_aborted_keeps_no_memory(queue: Any) -> None:
    _, (reader,) = queue()

    class Late:
        """Lets the end be aborted between the two looks of who enters."""

        def __init__(self, lock: Any) -> None:
            self._lock = lock
            self.release = lock.release
            self.come = False

        def acquire(self, **given: Any) -> bool:
            taken = self._lock.acquire(**given)
            if not self.come:
                self.come = True
                reader.abort()
            return taken

    reader._stay._lock = Late(reader._stay._lock)
    with pytest.raises(ClosedError):
        reader.dequeue()
    assert mapped() == 1


def test_a_handler_may_end_a_writer_that_is_looking_at_its_readers(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's, which runs within whatever its thread does."""
    writer, _ = queue()
    told = writer._roster._reader

    def ended(member: Any) -> Any:
        writer.abort()
        return told(member)

    monkeypatch.setattr(writer._roster, "_reader", ended)
    assert isinstance(ends.end_of(ends.in_thread(lambda: writer.readers)), ClosedError)


def test_who_hears_of_an_eviction_may_look_at_the_readers(queue: Any) -> None:
    writer, _ = queue(2)
    looked = []

    class Looks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            looked.append(ends.end_of(ends.in_thread(lambda: writer.readers)))

    handler = Looks()
    logging.getLogger("kvplug_shm.queue.roster").addHandler(handler)
    try:
        writer._roster.evict(1, "silent for 10.0 s", died=True)
    finally:
        logging.getLogger("kvplug_shm.queue.roster").removeHandler(handler)
    assert looked[0][1].died


def mapped() -> int:
    """How many mappings of queues this process has."""
    with open("/proc/self/maps", encoding="utf-8") as f:
        return sum("kvplug-queue" in line for line in f)


def test_memory_goes_with_the_end_whatever_exceptions_still_hold(queue: Any) -> None:
    writer, (reader,) = queue()
    kept = []
    for call in (lambda: reader.dequeue(timeout=0.01), lambda: reader.acquire_read(timeout=0.01).__enter__()):
        with pytest.raises(TimeoutError) as raised:
            call()
        kept.append(raised)
    assert mapped() == 2
    reader.close()
    writer.close()
    assert mapped() == 0
    assert len(kept) == 2


def test_a_handle_is_open_until_the_last_reader_has_come(queue: Any) -> None:
    def descriptors() -> int:
        links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return sum("kvplug-queue" in os.readlink(link) for link in links if os.path.islink(link))

    writer, _ = queue(2, attached=1)
    assert descriptors() == 1
    with ends.endpoint().create_from_handle(writer.export_handle(), 1):
        ends.until(lambda: descriptors() == 0)


@pytest.mark.parametrize("fails", [False, True])
def test_the_ring_is_handed_out_until_all_have_joined(
    queue: Any, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """One that was admitted has nothing yet."""
    writer, _ = queue(2, attached=0)
    admitted, other_has_joined = threading.Event(), threading.Event()
    index_of = writer._roster.index_of

    def slowly(rank: int) -> Any:
        if rank == 1 and not other_has_joined.is_set():
            admitted.set()
            assert other_has_joined.wait(ends.PATIENCE_S)
            if fails:
                raise TransportError("not this time")
        return index_of(rank)

    monkeypatch.setattr(writer._roster, "index_of", slowly)
    end, handle = ends.endpoint(), writer.export_handle()
    joins = ends.in_thread(lambda: end.create_from_handle(handle, 1))
    assert admitted.wait(ends.PATIENCE_S)
    with end.create_from_handle(handle, 0):
        ends.until(lambda: writer._admission._joined)
        other_has_joined.set()
        reader = ends.end_of(joins)
        if fails:
            assert isinstance(reader, PeerGoneError)
            reader = end.create_from_handle(handle, 1)
        with reader:
            writer.enqueue("both")
            assert reader.dequeue() == "both"


def head(writer: Any) -> int:
    return writer._ring.words.words[order.HEAD]


def test_a_reader_that_was_welcomed_and_cannot_be_watched_is_evicted(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It believes that it has joined: nobody else may have its place, and nobody else is told of an end."""
    writer, (reader,) = queue(2, attached=1)

    def refused(*_: Any) -> Any:
        raise CapacityError("no descriptors are left")

    monkeypatch.setattr("kvplug_shm.queue.joining.watched", refused)
    end, handle = ends.endpoint(), writer.export_handle()
    with end.create_from_handle(handle, 1) as unseen:
        ends.until(lambda: writer.readers[1].gone)
        assert writer.readers[1].died and "no descriptors are left" in writer.readers[1].gone
        ends.until(lambda: unseen._source._gone)
        with pytest.raises(ConfigError, match="attached to this queue already"):
            end.create_from_handle(handle, 1)
        writer.enqueue("on")
        assert reader.dequeue() == "on"
        assert not order.is_over(head(writer))
        with pytest.raises(TransportError, match="evicted this reader"):
            unseen.dequeue()


@pytest.mark.usefixtures("sound_sleep")
def test_a_living_writer_that_hangs_up_on_one_reader_is_there_for_the_others(queue: Any) -> None:
    writer, readers = queue(2)
    ends.until(lambda: len(writer._admission._joined) == 2)
    waits = ends.in_thread(readers[1].dequeue)
    ends.until(lambda: asleep(writer._ring, order.asleep(1)))
    time.sleep(0.3)
    connection, watch = writer._admission._joined[1]
    watch.close()
    hang_up(connection)
    assert isinstance(ends.end_of(waits), PeerGoneError)
    assert not order.is_over(head(writer))
    writer.enqueue("on")
    assert readers[0].dequeue() == "on"


def test_the_word_of_a_writer_whose_process_has_ended_says_so(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then no reader that is about to sleep can miss it."""
    writer, (reader,) = queue()
    source = reader._source
    with subprocess.Popen(["sleep", "60"]) as process, monkeypatch.context() as patched:
        peer = SimpleNamespace(open_pidfd=lambda: os.pidfd_open(process.pid))
        patched.setattr(source, "_connection", SimpleNamespace(peer=peer))
        try:
            source._writer_gone("it closed the connection")
            assert not order.is_over(head(writer))
        finally:
            process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        source._writer_gone("it closed the connection")
        assert order.is_over(head(writer))


# -- memory ------------------------------------------------------------------------------------------


def resident(writer: Any) -> int:
    """Bytes of shared memory that the queue takes."""
    with open("/proc/self/smaps", encoding="utf-8") as f:
        inside, found = False, 0
        for line in f:
            if "-" in line.split(" ", 1)[0]:
                inside = "kvplug-queue" in line
            elif inside and line.startswith("Rss:"):
                found = max(found, int(line.split()[1]) * 1024)
    return found


def test_a_queue_that_keeps_up_takes_the_memory_of_a_few_messages(queue: Any) -> None:
    writer, (reader,) = queue(max_chunk_bytes=4 * MIB, max_chunks=10)
    for number in range(60):
        writer.enqueue(torch.full((MIB // 2,), number, dtype=torch.float16))
        assert reader.dequeue()[-1] == number
    assert resident(writer) < 4 * MIB


def test_what_large_messages_took_goes_back_when_small_ones_follow(queue: Any) -> None:
    writer, (reader,) = queue(options={"keep_bytes": MIB})
    writer.enqueue(torch.ones(4 * MIB))
    assert resident(writer) >= 16 * MIB
    assert reader.dequeue().sum() == 4 * MIB
    writer.enqueue("small")
    assert reader.dequeue() == "small"
    if resident(writer) >= 16 * MIB:
        pytest.skip("this kernel keeps memory that is given back")
    writer.enqueue(torch.ones(4 * MIB))
    assert reader.dequeue().sum() == 4 * MIB


def test_received_tensors_use_memory_again_and_are_nobody_elses(queue: Any) -> None:
    writer, (reader,) = queue(max_chunk_bytes=4 * MIB)
    kept = []
    for number in range(10):
        writer.enqueue(torch.full((MIB,), number, dtype=torch.uint8))
        kept.append(reader.dequeue())
    assert [int(each.sum()) for each in kept] == [number * MIB for number in range(10)]
    kept.clear()
    assert 0 < reader._pool.idle_bytes <= 16 * MIB


def test_messages_that_are_too_large_are_refused_and_the_rest_passes(queue: Any) -> None:
    writer, (reader,) = queue(options={"max_message_bytes": MIB})
    for value in (torch.ones(MIB), bytes(MIB + 1)):
        with pytest.raises(CapacityError, match=f"at most {MIB} are sent.*max_message_bytes"):
            writer.enqueue(value)
    many = [torch.full((1024,), float(at)) for at in range(240)]
    for _ in range(3):
        writer.enqueue(many)
        assert all(map(torch.equal, many, reader.dequeue()))


def test_large_messages_wait_for_each_other(queue: Any) -> None:
    writer, readers = queue(2, options={"max_message_bytes": 4 * MIB})
    writer.enqueue(bytes(3 * MIB))
    with pytest.raises(TimeoutError, match=r"rank 0 .* 1 message behind.*rank 1 .* 1 message behind"):
        writer.enqueue(bytes(3 * MIB), timeout=0.1)
    writer.enqueue("small")
    assert len(readers[0].dequeue()) == 3 * MIB
    waits = ends.in_thread(lambda: writer.enqueue(bytes(3 * MIB + 1)))
    assert len(readers[1].dequeue()) == 3 * MIB
    assert ends.end_of(waits) is None
    for reader in readers:
        assert reader.dequeue() == "small"
        assert len(reader.dequeue()) == 3 * MIB + 1


def test_a_reader_that_comes_late_gets_large_messages_too(queue: Any, far_reader: Any) -> None:
    writer, (near_one,) = queue(2, attached=1)
    sent = [torch.randn(MIB), "between", torch.randn(MIB)]
    for value in sent:
        writer.enqueue(value)
    with ends.endpoint().create_from_handle(writer.export_handle(), 1) as late:
        for reader in (near_one, late):
            one, between, other = (reader.dequeue() for _ in sent)
            assert torch.equal(one, sent[0]) and between == "between" and torch.equal(other, sent[2])


# -- other processes -----------------------------------------------------------------------------------


def test_a_chunk_that_another_process_looks_at_stays_as_it_is(queue: Any, far_reader: Any) -> None:
    writer, (near_one,) = queue(2, attached=1)
    child = far_reader(writer, 1, "look_slowly")
    with writer.acquire_write(5) as view:
        view[:] = b"first"
    assert child.recv() == b"first"
    for number in range(ends.CHUNKS - 1):
        writer.enqueue(number)
    with near_one.acquire_read() as view:
        assert view == b"first"
    for number in range(ends.CHUNKS - 1):
        assert near_one.dequeue() == number
    with pytest.raises(TimeoutError, match=rf"rank 1 \(pid {child.pid}\), {ends.CHUNKS} messages behind"):
        writer.enqueue("no room", timeout=0.2)
    child.send("go on")
    assert child.recv() == "looked"


def test_a_death_is_warned_of_once(queue: Any, far_reader: Any, caplog: pytest.LogCaptureFixture) -> None:
    writer, _ = queue(2, attached=1)
    child = far_reader(writer, 1, "sit")
    child.kill()
    ends.until(lambda: writer.readers[1].gone)
    writer.enqueue("on")
    told = [record.getMessage() for record in caplog.records if "rank 1" in record.getMessage()]
    assert len(told) == 1 and f"pid {child.pid}" in told[0]


ELSEWHERE = """
import sys
{path}
import torch
from kvplug import Credentials, PeerGoneError, QueueContext, QueueHandle
from kvplug_shm.queue.endpoint import ShmQueueEndpoint

handle = QueueHandle(
    transport="shm", reader_ranks=(0, 1), local_reader_ranks=(0, 1),
    data=dict(domain=sys.argv[1], contact=sys.argv[2], network=None),
)
end = ShmQueueEndpoint(
    QueueContext(options=None, credentials=Credentials(), timeout_s=30, heartbeat_timeout_s=2.0)
)
reader = end.create_from_handle(handle, 1)
while True:
    try:
        reader.dequeue()
    except PeerGoneError:
        break
"""


@pytest.mark.parametrize("flags", [("--ipc",), ("--pid", "--fork", "--kill-child", "--ipc")])
def test_processes_in_other_namespaces_of_one_host_share_memory(queue: Any, flags: tuple[str, ...]) -> None:
    """Of pids as well: nobody has a pidfd of the other, and heartbeats take its place."""
    command = ["unshare", *flags]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=30, check=False)
    if tried.returncode:
        pytest.skip(f"namespaces cannot be made here: {tried.stderr.strip()}")
    writer, (reader,) = queue(2, attached=1, heartbeat_timeout_s=2.0)
    path = "\n".join(f"sys.path.append({each!r})" for each in sys.path if each)
    data = writer.export_handle().data
    code = textwrap.dedent(ELSEWHERE.format(path=path))
    child = subprocess.Popen([*command, sys.executable, "-c", code, data["domain"], data["contact"]])
    try:
        for _ in range(4 * ends.CHUNKS):
            sent = torch.randint(0, 255, (MIB,), dtype=torch.uint8)
            writer.enqueue(sent)
            assert torch.equal(reader.dequeue(), sent)
        time.sleep(3.0)
        assert not writer.readers[1].gone, "a reader that only waits counts as dead"
        child.kill()
        ends.until(lambda: writer.readers[1].gone)
        assert writer.readers[1].died
        for number in range(2 * ends.CHUNKS):
            writer.enqueue(number)
            assert reader.dequeue() == number
    finally:
        child.kill()
        child.wait()


def test_nothing_of_it_is_in_dev_shm(queue: Any) -> None:
    """A container limits it to 64 MB, and what is there outlives a process that is killed."""
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    writer, (reader,) = queue()
    writer.enqueue(bytes(100 * MIB))
    assert len(reader.dequeue()) == 100 * MIB
    assert not os.path.isdir("/dev/shm") or set(os.listdir("/dev/shm")) - before == set()


def test_an_end_says_what_it_is(queue: Any) -> None:
    writer, (reader,) = queue()
    assert repr(writer) == "<ShmWriter, writer>"
    assert repr(reader) == "<ShmReader, reader rank 0>"
    reader.close()
    assert "closed" in repr(reader)
