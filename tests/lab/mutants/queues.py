"""The queue "relay" of the docs with one fault each, and the law that the fault breaks."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import attrs

# The other processes import this file, too.
sys.path.append(str(Path(__file__).parents[3] / "docs" / "examples" / "kvplug-relay"))

from kvplug.net.wire import encode
from kvplug.transport import DEFAULT_TIMEOUT, Deadline, QueueEndpoint, Timeout
from kvplug_lab.mutants import breaks
from kvplug_relay import queue as relay
from kvplug_relay.message import Kind, Memory
from kvplug_relay.queue import RelayEndpoint
from kvplug_relay.reader import Reader
from kvplug_relay.writer import Writer
from kvplug_testing import MessageQueueContract


class Mutant(MessageQueueContract):
    """One fault, in the endpoint, the writer or the reader; ``breaks`` are the laws that it breaks."""

    endpoint_: type[RelayEndpoint] = RelayEndpoint
    writer_: type[Writer] = Writer
    reader_: type[Reader] = Reader
    parts = ("endpoint_", "writer_", "reader_")

    def make_endpoint(self, context: Any) -> Any:
        vars(relay).update(Writer=self.writer_, Reader=self.reader_)  # what endpoints make
        return self.endpoint_(context)


# -- QUEUE-1 ---------------------------------------------------------------------------------------


@breaks(Mutant, "QUEUE-1")
class TestSwapsTwo(Writer):
    """Every fiftieth value overtakes the one before it."""

    count = 0
    late: object = None

    def enqueue(self, value: object, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self.count += 1
        if self.count % 50 == 49:
            self.late = value
            return
        super().enqueue(value, timeout)
        if self.count % 50 == 0:
            super().enqueue(self.late, timeout)


@breaks(Mutant, "QUEUE-1")
class TestSharesOneObject(Reader):
    """A value is decoded once, and all readers get that object."""

    count = 0
    shared: ClassVar[dict[tuple[str, int], Any]] = {}

    def dequeue(self, *args: Any, **given: Any) -> Any:
        value = super().dequeue(*args, **given)
        self.count += 1
        return self.shared.setdefault((self._handle.data["contact"], self.count), value)


@breaks(Mutant, "QUEUE-1")
class TestCutsAValueOfOneSize(Reader):
    """The last byte of a value of a certain small size is lost."""

    def dequeue(self, *args: Any, **given: Any) -> Any:
        value = super().dequeue(*args, **given)
        return value[:-1] if isinstance(value, bytes) and len(value) == 509 else value


@breaks(Mutant, "QUEUE-1")
class TestBeginsWhereItAttaches(Reader):
    """A reader that comes late gets what is sent from then on."""

    def join(self, deadline: Any) -> None:
        super().join(deadline)
        with contextlib.suppress(TimeoutError):
            while True:
                self.dequeue(timeout=0.2)


@breaks(Mutant, "QUEUE-1")
class TestDropsTheOldestOfWhoSleeps(Reader):
    """A reader that has not read for half a second loses its oldest message, without an error."""

    asked_at = float("inf")

    def dequeue(self, *args: Any, **given: Any) -> Any:
        if time.monotonic() - self.asked_at > 0.5:
            super().dequeue(*args, **given)
        self.asked_at = time.monotonic()
        return super().dequeue(*args, **given)


@breaks(Mutant, "QUEUE-1")
class TestReceivesIntoTheSameMemory(Reader):
    """A tensor of a reader is overwritten by the next one of its shape, if it is not a small one."""

    def dequeue(self, *args: Any, **given: Any) -> Any:
        value = super().dequeue(*args, **given)
        if not hasattr(value, "copy_") or value.nbytes < 4096:
            return value
        kept = self.__dict__.setdefault("kept", {}).setdefault((value.shape, value.dtype), value)
        return kept.copy_(value)


@breaks(Mutant, "QUEUE-1")
class TestHasAHandleThatOnlyTheWireCarries(Writer):
    """The handle contains bytes, which JSON cannot carry."""

    def export_handle(self) -> QueueEndpoint.Handle:
        handle = super().export_handle()
        return attrs.evolve(handle, data={"contact": handle.data["contact"].encode()})


@breaks(Mutant, "QUEUE-1")
class TestTurnsTuplesIntoLists(Reader):
    """Tuples arrive as lists, as they would in JSON."""

    def dequeue(self, *args: Any, **given: Any) -> Any:
        value = super().dequeue(*args, **given)
        return list(value) if isinstance(value, tuple) else value


@breaks(Mutant, "QUEUE-1")
class TestLetsARankInTwice(RelayEndpoint):
    """A second reader of a rank gets half of the messages of the first."""

    made: ClassVar[dict[tuple[str, int], Reader]] = {}

    def create_from_handle(self, handle: QueueEndpoint.Handle, rank: int, *args: Any, **given: Any) -> Reader:
        key = handle.data["contact"], rank
        if key not in self.made:
            self.made[key] = super().create_from_handle(handle, rank, *args, **given)
        return self.made[key]


# -- QUEUE-2 ---------------------------------------------------------------------------------------


@breaks(Mutant, "QUEUE-2")
class TestEvictsInSilence(Writer):
    """A reader that has died is taken for one that has left."""

    def _evict(self, reader: Any, why: str, *, died: bool) -> None:
        super()._evict(reader, why, died=False)


@breaks(Mutant, "QUEUE-2")
class TestDoesNotSeeAReaderDie(Writer):
    """The writer takes the end of a reader's connection for silence."""

    def _evict(self, reader: Any, why: str, *, died: bool) -> None:
        if not died:
            super()._evict(reader, why, died=died)


# -- QUEUE-3 and ALL-4 -----------------------------------------------------------------------------


@breaks(Mutant, "QUEUE-3")
class TestNamesEverybody(Writer):
    """A writer that waits for one reader names all."""

    def _named(self, readers: Any) -> str:
        return super()._named([*self._readers.values()])


@breaks(Mutant, "QUEUE-3")
class TestNamesNoProcess(Writer):
    """A reader that is waited for is named by its rank alone."""

    def _admit(self, connection: Any) -> None:
        super()._admit(connection)
        for reader in self._readers.values():
            reader.process = "somewhere"


@breaks(Mutant, "ALL-3", "QUEUE-3")
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


@breaks(Mutant, "QUEUE-3")
class TestWarnsOfWhatIsIndefinite(Reader):
    """Readers that wait indefinitely fill the log."""

    def _wait(self, *args: Any, **given: Any) -> Any:
        return super()._wait(*args, **{**given, "indefinite": False})


@breaks(Mutant, "ALL-4")
class TestIgnoresDeadlines(Reader):
    """A reader waits until something comes."""

    def _wait(self, what: str, peers: Any, deadline: Deadline, **given: Any) -> Any:
        return super()._wait(what, peers, Deadline.after(None), **given)


@breaks(Mutant, "ALL-4")
class TestTakesAnyTimeout(Reader):
    """A timeout that makes no sense counts as 0."""

    def _deadline(self, timeout: Timeout) -> Deadline:
        try:
            return super()._deadline(timeout)
        except ValueError:
            return super()._deadline(0)


@breaks(Mutant, "ALL-4")
class TestIgnoresCancel(Reader):
    """The event that cancels is only looked at when something comes."""

    def _wait(self, *args: Any, **given: Any) -> Any:
        return super()._wait(*args, **{**given, "cancel": None})


@breaks(Mutant, "ALL-4", "QUEUE-5")
class TestSendsWhatTimedOut(Writer):
    """A message that found no room in time is sent all the same."""

    def enqueue(self, value: object, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        try:
            super().enqueue(value, timeout)
        except TimeoutError:
            data = encode(value)
            self._send(Kind.VALUE, data, Memory(len(data)))
            raise


@breaks(Mutant, "ALL-4")
class TestMixesTwoThreads(Reader):
    """Two threads may wait at one reader, and either may get the message."""

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        self._check_open()
        with self._descriptors:
            yield


# -- QUEUE-4 ---------------------------------------------------------------------------------------


@breaks(Mutant, "QUEUE-4")
class TestSpins(Reader):
    """A waiting reader polls without a pause."""

    @staticmethod
    def _poll(descriptors: list[int], seconds: float | None) -> None:
        pass


# -- QUEUE-5 ---------------------------------------------------------------------------------------


@breaks(Mutant, "QUEUE-5")
class TestHasNoBound(Writer):
    """There is always room."""

    def _slow(self) -> list[Any]:
        return []


@breaks(Mutant, "QUEUE-5")
class TestHasOneChunkLess(Writer):
    """The last chunk is never used."""

    def __init__(self, context: Any, *args: Any) -> None:
        super().__init__(attrs.evolve(context, max_chunks=max(1, context.max_chunks - 1)), *args)


@breaks(Mutant, "QUEUE-5")
class TestKeepsTheChunkOfABlockThatRaises(Reader):
    """When the reader's block raises, its chunk stays taken, and comes again."""

    def _take(self) -> None:
        if sys.exc_info()[0] is None:
            super()._take()


@breaks(Mutant, "QUEUE-5")
class TestHandsOutMemoryForGood(Reader):
    """The reader's view stays valid after its block."""

    @contextlib.contextmanager
    def acquire_read(self, *args: Any, **given: Any) -> Iterator[memoryview]:
        with super().acquire_read(*args, **given) as view:
            yield view[:]


# -- ALL -------------------------------------------------------------------------------------------


@breaks(Mutant, "ALL-1")
class TestSleepsThroughItsEnd(Reader):
    """A reader that waits is not woken when it is closed in another thread."""

    def _hang_up(self, polite: bool) -> None:
        pass


@breaks(Mutant, "ALL-1")
class TestWorksAfterItsEnd(Writer):
    """A writer that was closed takes messages."""

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        pass


@breaks(Mutant, "ALL-7")
class TestLeaksADescriptor(Writer):
    """Each queue opens something that it does not close."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._leak = os.open("/dev/null", os.O_RDONLY)


@breaks(Mutant, "ALL-7")
class TestLeaksAThread(Reader):
    """Each reader has a thread, which lives on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()


@breaks(Mutant, "ALL-6")
class TestWorksAfterAFork(Writer):
    """A forked child goes on with the parent's queue."""

    def _after_fork_in_child(self) -> None:
        pass


@breaks(Mutant, "ALL-6")
class TestLeavesAForkedChildItsDescriptors(Writer):
    """In a forked child its calls raise, and its descriptors stay open."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._descriptors._after_fork_in_child = lambda: None


@breaks(Mutant, "ALL-1", "ALL-2", "ALL-5")
class TestLosesWhatItsWriterHadSent(Reader):
    """A reader that sees its writer end drops what it has not handed out yet."""

    def _peek(self) -> bytes | None:
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLRDHUP)
        return b"" if poll.poll(0) else super()._peek()


@breaks(Mutant, "ALL-2", "ALL-5")
class TestSendsAChunkBeforeItIsWritten(Writer):
    """A chunk is on its way when the writer's block begins."""

    @contextlib.contextmanager
    def acquire_write(self, nbytes: Any = None, timeout: Any = DEFAULT_TIMEOUT) -> Iterator[memoryview]:
        with self._call():
            self._wait_for_room(timeout)
            self._send(Kind.CHUNK, nbytes, Memory(nbytes))
            with memoryview(bytearray(nbytes)) as view:
                yield view


@breaks(Mutant, "ALL-2")
class TestWaitsForADeadWriter(Reader):
    """A reader takes the end of its connection for silence."""

    def _peek(self) -> bytes | None:
        return super()._peek() or None


@breaks(Mutant, "ALL-9")
class TestLetsTheSystemsErrorThrough(RelayEndpoint):
    """Without a free descriptor an end raises the system's error, not kvplug's."""

    def create(self, reader_ranks: Any = None) -> Any:
        os.close(os.dup(0))
        return super().create(reader_ranks)


# -- the control -----------------------------------------------------------------------------------


class TestHasNoFault(Mutant):
    """The queue "relay" as it is."""

    is_control = True
