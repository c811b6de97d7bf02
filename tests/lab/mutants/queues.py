"""The queue "memory" with one fault each, and the law that the fault breaks; then some between processes."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

# The other processes import this file, too.
sys.path.append(str(Path(__file__).parents[3] / "docs" / "examples" / "kvplug-relay"))

from kvplug.net.wire import encode
from kvplug.transport import DEFAULT_TIMEOUT, QueueHandle, Reader as ReaderState, Timeout
from kvplug_lab.mutants import breaks
from kvplug_relay import queue as relay
from kvplug_relay.message import Kind, Memory
from kvplug_relay.queue import RelayEndpoint
from kvplug_relay.reader import Reader
from kvplug_relay.writer import Writer
from kvplug_testing import MessageQueueContract
from kvplug_testing.memory.queue import MemoryQueue, MemoryQueueEndpoint, QueueMessage, Ring


class MemoryWriter(MemoryQueue):
    """The writer's end."""


class MemoryReader(MemoryQueue):
    """One reader's end."""

    _rank: int


class Mutant(MessageQueueContract):
    """One fault, in the ring, the writer or the reader; ``breaks`` are the laws that it breaks."""

    across_processes = False
    ring: type[Ring] = Ring
    writer_: type[MemoryWriter] = MemoryWriter
    reader_: type[MemoryReader] = MemoryReader
    parts = ("ring", "writer_", "reader_")
    breaks: tuple[str, ...] = ()

    def make_endpoint(self, context: Any) -> Any:
        parts = {"ring": self.ring, "writer": self.writer_, "reader": self.reader_}
        return type("Endpoint", (MemoryQueueEndpoint,), parts)(context)


# -- QUEUE-1 ---------------------------------------------------------------------------------------


@breaks(Mutant, "QUEUE-1", caught_by="test_a_reader_that_pauses_gets_everything_or_hears_how_many_it_lost")
class TestSwapsTwo(Ring):
    """Every fiftieth message overtakes the one before it, if that is unread."""

    count = 0

    def put(self, message: QueueMessage) -> None:
        super().put(message)
        self.count += 1
        if self.count % 50 == 0:
            for unread in self.unread.values():
                if len(unread) > 1:
                    unread[-1], unread[-2] = unread[-2], unread[-1]


@breaks(
    Mutant,
    "QUEUE-1",
    caught_by="test_what_an_end_changes_afterwards_or_what_comes_later_changes_nothing",
)
class TestSharesOneObject(MemoryReader):
    """A value is decoded once, and all readers get that object."""

    count = 0

    def dequeue(self, *args: Any, **given: Any) -> Any:
        value = super().dequeue(*args, **given)
        self.count += 1
        shared = self._ring.__dict__.setdefault("shared", {})
        return shared.setdefault(self.count, value)


@breaks(Mutant, "QUEUE-1", caught_by="test_a_value_of_each_kind_and_of_any_size_arrives_as_it_was")
class TestCutsAValueOfOneSize(MemoryReader):
    """The last byte of a value of a certain small size is lost."""

    def dequeue(self, *args: Any, **given: Any) -> Any:
        value = super().dequeue(*args, **given)
        return value[:-1] if isinstance(value, bytes) and len(value) == 509 else value


@breaks(
    Mutant, "QUEUE-1", caught_by="test_a_reader_that_attaches_late_gets_messages_of_all_sizes_from_the_first"
)
class TestBeginsWhereItAttaches(MemoryReader):
    """A reader that comes late gets what is sent from then on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        with self._ring.changed:
            self._unread.clear()


class TestDropsTheOldestOfWhoSleeps(Mutant):
    """A reader that has made no room for half a second loses its oldest message, in silence."""

    breaks = ("QUEUE-1",)
    caught_by = "test_a_reader_that_pauses_gets_everything_or_hears_how_many_it_lost"

    class ring(Ring):  # noqa: N801
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.full_since: dict[int, float] = {}
            self.lost: dict[int, int] = {}

        def slow(self) -> list[int]:
            now = time.monotonic()
            for rank in super().slow():
                if now - self.full_since.setdefault(rank, now) > 0.5:
                    self.unread[rank].popleft()
                    self.lost[rank] = self.lost.get(rank, 0) + 1
            found = super().slow()
            self.full_since = {rank: self.full_since.get(rank, now) for rank in found}
            return found

    class writer_(MemoryWriter):  # noqa: N801
        def __init__(self, context: Any, *args: Any) -> None:
            super().__init__(attrs.evolve(context, warning_interval_s=0.1), *args)  # it looks that often


@breaks(
    Mutant, "QUEUE-1", caught_by="test_what_an_end_changes_afterwards_or_what_comes_later_changes_nothing"
)
class TestReceivesIntoTheSameMemory(MemoryReader):
    """A tensor of a reader is overwritten by the next one of its shape, if it is not a small one."""

    def dequeue(self, *args: Any, **given: Any) -> Any:
        value = super().dequeue(*args, **given)
        if not hasattr(value, "copy_") or value.nbytes < 4096:
            return value
        kept = self.__dict__.setdefault("kept", {}).setdefault((value.shape, value.dtype), value)
        return kept.copy_(value)


class TestHasAHandleThatOnlyTheWireCarries(Mutant):
    """There are bytes in the handle, and JSON has none."""

    breaks = ("QUEUE-1",)

    def make_endpoint(self, context: Any) -> Any:
        class Endpoint(MemoryQueueEndpoint):
            def create(self, reader_ranks: Any = None) -> MemoryQueue:
                writer = super().create(reader_ranks)
                handle = writer.export_handle()
                writer._ring.handle = attrs.evolve(handle, data={"name": handle.data["name"].encode()})
                return writer

            def create_from_handle(self, handle: QueueHandle, *args: Any, **given: Any) -> MemoryQueue:
                name = handle.data["name"].decode()
                return super().create_from_handle(attrs.evolve(handle, data={"name": name}), *args, **given)

        return Endpoint(context)


@breaks(Mutant, "QUEUE-1", caught_by="test_a_value_of_each_kind_and_of_any_size_arrives_as_it_was")
class TestTurnsTuplesIntoLists(MemoryReader):
    """Tuples arrive as lists, as they would in JSON."""

    def dequeue(self, *args: Any, **given: Any) -> Any:
        value = super().dequeue(*args, **given)
        return list(value) if isinstance(value, tuple) else value


@breaks(Mutant, "QUEUE-1")
class TestLetsARankInTwice(Ring):
    """A second reader of a rank gets half of the messages of the first."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.attached = _Forgetful()


class _Forgetful(set[int]):
    def __contains__(self, _: object) -> bool:
        return False


# -- QUEUE-2 ---------------------------------------------------------------------------------------


@breaks(Mutant, "QUEUE-2")
class TestEvictsInSilence(Ring):
    """Who died is forgotten: neither the log nor the writer names it."""

    def evict(self, rank: int, why: str, *, died: bool) -> None:
        self.gone[rank] = ReaderState(rank=rank, process="", lag=0)


# -- QUEUE-3 and ALL-4 -----------------------------------------------------------------------------


@breaks(Mutant, "QUEUE-3")
class TestNamesEverybody(Ring):
    """A writer that waits for one reader names all."""

    def named(self, ranks: Any) -> str:
        return super().named(self.unread)


@breaks(Mutant, "QUEUE-3")
class TestWarnsOfWhatIsIndefinite(MemoryReader):
    """Readers that wait indefinitely fill the log."""

    def _wait(self, ready: Any, what: str, waits_for: Any, timeout: Timeout, **given: Any) -> None:
        super()._wait(ready, what, waits_for, timeout, **{**given, "indefinite": False})


@breaks(Mutant, "ALL-4")
class TestIgnoresDeadlines(MemoryReader):
    """A reader waits until something comes."""

    def _wait(self, ready: Any, what: str, waits_for: Any, timeout: Timeout, **given: Any) -> None:
        super()._wait(ready, what, waits_for, None, **given)


@breaks(Mutant, "ALL-4", caught_by="test_a_wrong_timeout_is_a_value_error_and_nothing_else_happens")
class TestLooksAtTheTimeoutWhereItWaits(MemoryReader):
    """A reader for which a message is there looks at no timeout."""

    def _wait(self, ready: Any, what: str, waits_for: Any, timeout: Timeout, **given: Any) -> None:
        is_there = what == "a message" and ready()
        super()._wait(ready, what, waits_for, None if is_there else timeout, **given)


@breaks(Mutant, "ALL-4", caught_by="test_who_cancels_is_heard")
class TestIgnoresCancel(MemoryReader):
    """The event that cancels is only looked at when something comes."""

    def _wait(self, ready: Any, what: str, waits_for: Any, timeout: Timeout, **given: Any) -> None:
        super()._wait(ready, what, waits_for, timeout, **{**given, "cancel": None})


@breaks(
    Mutant,
    "ALL-4",
    "QUEUE-5",
    caught_by="test_a_call_that_waits_in_vain_ends_at_its_deadline_and_says_what_for",
)
class TestSendsWhatTimedOut(MemoryWriter):
    """A message for which there was no room in time is sent all the same."""

    def enqueue(self, value: object, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        try:
            super().enqueue(value, timeout)
        except TimeoutError:
            self._put(encode(value))
            raise


@breaks(Mutant, "ALL-4", caught_by="test_a_second_thread_is_refused_and_nothing_gets_mixed")
class TestMixesTwoThreads(MemoryReader):
    """Two threads may wait at one reader, and which one gets the message is left to chance."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._turn = _Anybody()  # type: ignore[assignment]


class _Anybody:
    def taken(self) -> Any:
        return contextlib.nullcontext()


# -- QUEUE-4 ---------------------------------------------------------------------------------------


@breaks(Mutant, "QUEUE-4")
class TestSpins(MemoryReader):
    """A reader asks again and again without a pause."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        changed = self._ring.changed
        wait = changed.wait
        changed.wait = lambda timeout=None: wait(0.0)  # type: ignore[method-assign]


# -- QUEUE-5 ---------------------------------------------------------------------------------------


@breaks(Mutant, "QUEUE-5")
class TestHasNoBound(Ring):
    """There is always room."""

    def slow(self) -> list[int]:
        return []


@breaks(Mutant, "QUEUE-5")
class TestHasOneChunkLess(Ring):
    """The last chunk is never used."""

    def slow(self) -> list[int]:
        return [rank for rank in self.here() if len(self.unread[rank]) >= max(1, self.max_chunks - 1)]


@breaks(Mutant, "QUEUE-5")
class TestKeepsTheChunkOfABlockThatRaises(MemoryReader):
    """When the reader's block raises, its chunk stays taken, and comes again."""

    @contextlib.contextmanager
    def acquire_read(self, *args: Any, **given: Any) -> Iterator[memoryview]:
        advance, self._advance = self._advance, lambda: None  # type: ignore[method-assign]
        try:
            with super().acquire_read(*args, **given) as view:
                yield view
            advance()
        finally:
            del self._advance


@breaks(Mutant, "QUEUE-5")
class TestHandsOutMemoryForGood(MemoryReader):
    """The reader's view stays valid after its block, while its chunk is used anew."""

    @contextlib.contextmanager
    def acquire_read(self, *args: Any, **given: Any) -> Iterator[memoryview]:
        with super().acquire_read(*args, **given) as view:
            yield view[:]


# -- ALL -------------------------------------------------------------------------------------------


@breaks(Mutant, "ALL-1")
class TestSleepsThroughItsEnd(MemoryReader):
    """A reader that waits is not woken when it is closed in another thread."""

    def _end(self, why: str, *, died: bool) -> None:
        if not self._closed:
            with self._ring.changed:
                self._closed = True
                self._ring.gone[self._rank] = self._ring.reader(self._rank)


@breaks(Mutant, "ALL-1")
class TestWorksAfterItsEnd(MemoryWriter):
    """A writer that was closed takes messages."""

    def _check_open(self) -> None:
        pass


@breaks(Mutant, "ALL-1", "ALL-2", caught_by="test_a_writer_that_ends_is_gone_after_what_it_had_sent")
class TestTakesItsMessagesAlong(MemoryWriter):
    """A writer that ends drops what has not been read."""

    def _leave(self, why: str, *, died: bool) -> None:
        super()._leave(why, died=died)
        for unread in self._ring.unread.values():
            unread.clear()


@breaks(Mutant, "ALL-2")
class TestNeverSaysThatTheWriterIsGone(MemoryWriter):
    """Readers wait on when the writer has ended."""

    def _leave(self, why: str, *, died: bool) -> None:
        pass


@breaks(Mutant, "ALL-7")
class TestLeaksADescriptor(MemoryWriter):
    """Each queue opens something that it does not close."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._leak = os.open("/dev/null", os.O_RDONLY)


@breaks(Mutant, "ALL-7")
class TestLeaksAThread(MemoryReader):
    """Each reader has a thread, which lives on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()


@breaks(Mutant, "ALL-6")
class TestWorksAfterAFork(MemoryWriter):
    """A forked child goes on with the parent's queue."""

    def _after_fork_in_child(self) -> None:
        pass


@breaks(Mutant, "ALL-6", caught_by="test_a_forked_child_holds_none_of_the_descriptors")
class TestLeavesAForkedChildItsDescriptor(MemoryWriter):
    """In a forked child its calls raise, and a descriptor stays open."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._opened = os.open("/dev/null", os.O_RDONLY)

    def _leave(self, why: str, *, died: bool) -> None:
        super()._leave(why, died=died)
        os.close(self._opened)


# -- between processes -----------------------------------------------------------------------------


class Apart(MessageQueueContract):
    """One fault of the queue "relay" of the docs, whose ends are processes."""

    endpoint_: type[RelayEndpoint] = RelayEndpoint
    writer_: type[Writer] = Writer
    reader_: type[Reader] = Reader
    parts = ("endpoint_", "writer_", "reader_")
    breaks: tuple[str, ...] = ()

    def make_endpoint(self, context: Any) -> Any:
        vars(relay).update(Writer=self.writer_, Reader=self.reader_)  # what endpoints make
        return self.endpoint_(context)


@breaks(Apart, "QUEUE-2")
class TestDoesNotSeeAReaderDie(Writer):
    """The writer takes the end of a reader's connection for silence."""

    def _evict(self, reader: Any, why: str, *, died: bool) -> None:
        if not died:
            super()._evict(reader, why, died=died)


@breaks(Apart, "ALL-3", "QUEUE-3")
class TestTakesAStoppedReaderForDead(Writer):
    """A reader that has taken nothing for a quarter of a second is evicted."""

    full_since = 0.0

    def _slow(self) -> list[Any]:
        found = super()._slow()
        self.full_since = (self.full_since or time.monotonic()) if found else 0.0
        if found and time.monotonic() - self.full_since > 0.25:
            for reader in found:
                self._evict(reader, "is silent", died=True)
        return super()._slow()

    @staticmethod
    def _poll(descriptors: list[int], seconds: float | None) -> None:
        Writer._poll(descriptors, 0.05 if seconds is None else min(seconds, 0.05))


@breaks(Apart, "QUEUE-3")
class TestNamesNoProcess(Writer):
    """A reader that is waited for is named by its rank alone."""

    def _admit(self, connection: Any) -> None:
        super()._admit(connection)
        for reader in self._readers.values():
            reader.process = "somewhere"


@breaks(Apart, "ALL-2", "ALL-5")
class TestLosesWhatTheDeadWriterSent(Reader):
    """A reader that sees its writer die drops what it has not handed out yet."""

    def _peek(self) -> bytes | None:
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLRDHUP)
        return b"" if poll.poll(0) else super()._peek()


@breaks(Apart, "ALL-2", "ALL-5")
class TestSendsAChunkBeforeItIsWritten(Writer):
    """A chunk is on its way when the writer's block begins."""

    @contextlib.contextmanager
    def acquire_write(self, nbytes: Any = None, timeout: Any = DEFAULT_TIMEOUT) -> Iterator[memoryview]:
        with self._call():
            self._wait_for_room(timeout)
            self._send(Kind.CHUNK, nbytes, Memory(nbytes))
            with memoryview(bytearray(nbytes)) as view:
                yield view


@breaks(Apart, "ALL-9")
class TestLetsTheSystemsErrorThrough(RelayEndpoint):
    """Where no descriptor is left, an end is refused with what the system says, and no error of kvplug's."""

    def create(self, reader_ranks: Any = None) -> Any:
        os.close(os.dup(0))
        return super().create(reader_ranks)


@breaks(Apart, "ALL-2")
class TestWaitsForADeadWriter(Reader):
    """A reader takes the end of its connection for silence."""

    def _peek(self) -> bytes | None:
        return super()._peek() or None


# -- the controls ----------------------------------------------------------------------------------


class TestHasNoFault(Mutant):
    """The queue "memory" as it is."""

    is_control = True


class TestHasNoFaultApart(Apart):
    """A queue between processes as it is."""

    is_control = True
