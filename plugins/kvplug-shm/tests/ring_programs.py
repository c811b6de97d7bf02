"""What writers and readers of a ring do, and what must hold of it, for the explorer."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from kvplug.transport import WireError
from ring_processes import Program, Turn


class LawError(AssertionError):
    """A law of the ring does not hold."""


class Case(NamedTuple):
    """Who uses a ring, and how. The writer is process 0, reader ``r`` process ``1 + r``."""

    sizes: tuple[int, ...]  # of the messages, in units
    places: int
    readers: int = 1
    streams: bool = False  # the writer writes what there is room for, readers read what has come
    leaves: bool = False  # reader 0 ends whenever it likes
    reader_dies: bool = False  # reader 0 is killed, or not; then it is evicted
    reader_suspected: bool = False  # reader 0 is evicted whether it was killed or not
    writer_dies: bool = False  # as above; each reader evicts the writer
    writer_suspected: bool = False
    writer_vanishes: bool = False  # it does not say that it is over
    watchers: int = 1  # of each end that is watched
    jumps: bool = False  # the writer streams, and jumps to the first place whenever it likes

    def __str__(self) -> str:
        said = self._asdict().items()
        return ", ".join(name if value is True else f"{name}={value}" for name, value in said if value)

    @property
    def total(self) -> int:
        return sum(self.sizes)


ONE = (1,)
CASES = [
    Case(sizes=ONE * 3, places=1),
    Case(sizes=(1, 2, 3), places=3, streams=True),
    Case(sizes=ONE * 3, places=2, leaves=True),
    Case(sizes=ONE * 3, places=2, leaves=True, streams=True),
    Case(sizes=ONE * 3, places=2, reader_dies=True),
    Case(sizes=ONE * 3, places=2, writer_dies=True),
    Case(sizes=ONE * 2, places=1, readers=2),
    Case(sizes=ONE * 4, places=1, reader_suspected=True, streams=True),
    Case(sizes=ONE * 3, places=1, reader_suspected=True),
    Case(sizes=ONE * 2, places=2, writer_suspected=True),
    Case(sizes=ONE, places=1, writer_suspected=True, writer_vanishes=True, watchers=2),
    Case(sizes=ONE * 5, places=3, jumps=True),
    Case(sizes=ONE * 2, places=2, jumps=True, reader_dies=True),
    Case(sizes=ONE * 3, places=2, jumps=True, writer_dies=True),
]
"""Those that find most, and fast, first."""


class Programs:
    """``ends`` and ``protocol`` are the modules that are tried."""

    def __init__(self, case: Case, protocol: ModuleType, ends: ModuleType) -> None:
        self.case = case
        self._protocol, self._ends = protocol, ends
        self._first_place = protocol.num_words(case.readers) + case.jumps
        self._first_own = self._first_place + case.places
        self.num_words = self._first_own + case.readers

    def all(self) -> list[Program]:
        case = self.case
        killable = (case.writer_dies or case.writer_suspected) and not case.writer_vanishes
        write: Turn = self._stream if case.streams else self._write
        start = (0, 0, 0) if case.jumps else 0
        if case.jumps:
            write = self._write_with_jumps
        found = [Program("writer", write, start, killable)]
        for reader in range(case.readers):
            killable = reader == 0 and (case.reader_dies or case.reader_suspected)
            read: Turn = self._read_with_jumps if case.jumps else self._reader(reader)
            found.append(Program(f"reader {reader}", read, start, killable))
        if case.reader_dies or case.reader_suspected:
            found += [Program("writer's watcher", self._evict_reader)] * case.watchers
        if case.writer_dies or case.writer_suspected:
            for reader in range(case.readers):
                found += [Program(f"watcher of reader {reader}", self._evict_writer(reader))] * case.watchers
        return found

    def check(self, words: tuple[int, ...]) -> None:
        """When all have come to their end."""
        case, protocol = self.case, self._protocol
        for reader in range(case.readers):
            if reader == 0 and (case.leaves or case.reader_dies or case.reader_suspected):
                continue
            read, published = (
                protocol.count_in(words[protocol.tail(reader)]),
                protocol.count_in(words[protocol.HEAD]),
            )
            if not case.writer_suspected and read != published:
                raise LawError(f"reader {reader} got {read} of {published} units")

    def _writing_end(self, memory: Any, sent: int) -> Any:
        return self._ends.WritingEnd(memory, self.case.readers, self.case.places, sent=sent)

    def _write(self, done: int, memory: Any) -> int | None:
        sizes = self.case.sizes
        end = self._writing_end(memory, sum(sizes[:done]))
        if done == len(sizes):
            if not self.case.writer_vanishes:
                end.end()
            return None
        if not end.poll(sizes[done], nap_s=None):
            return done
        self._fill(memory, end, sizes[done])
        return done + 1

    def _stream(self, sent: int, memory: Any) -> int | None:
        end = self._writing_end(memory, sent)
        if sent == self.case.total:
            end.end()
            return None
        room = _honest(end.room)
        if not room:
            end.poll(nap_s=None)
            return sent
        self._fill(memory, end, min(room, self.case.total - sent))
        return end.sent

    def _fill(self, memory: Any, end: Any, size: int) -> None:
        self._write_units(memory, end.sent, size)
        end.publish(size)

    def _write_units(self, memory: Any, first: int, size: int) -> None:
        for number in range(first, first + size):
            memory.words[self._first_place + number % self.case.places] = number + 1

    def _write_with_jumps(self, at: tuple[int, int, int], memory: Any) -> tuple[int, int, int] | None:
        """``at``: units sent with those left out and without, and the count at the last jump."""
        sent, number, jump = at
        end = self._writing_end(memory, sent)
        if number == self.case.total:
            end.end()
            return None
        end.state.jump = jump
        left_out = -sent % self.case.places if memory.choose() else 0
        if left_out:
            end.state.window = 1
        if _honest(end.room) <= left_out:
            end.poll(left_out + 1, nap_s=None)
            return at
        memory.words[self._first_place + (sent + left_out) % self.case.places] = number + 1
        memory.steps.publish_behind(end.pointer, 1)
        assert end.sent == sent + left_out + 1
        return end.sent, number + 1, end.state.jump

    def _read_with_jumps(self, at: tuple[int, ...], memory: Any) -> tuple[int, int] | None:
        """``at``: units released with those left out, and units read."""
        released, number, *_ = at
        end = self._reading_end(memory, 0, released)
        if end.writer_over():
            self._all_read(0, number)
            end.end()
            return None
        if not end.poll(nap_s=None):
            return at
        size = memory.steps.arrived_next(end.pointer)
        if size < 1:
            raise LawError(f"{size} units have arrived at once")
        units = self._take(memory, end, size)
        if units is None:
            end.end()
            return None
        if units != list(range(number + 1, number + size + 1)):
            raise LawError(f"the reader got {units} after {number}")
        return end.read, number + size

    def _reader(self, reader: int) -> Turn:
        case = self.case
        sizes = dict(zip([sum(case.sizes[:n]) for n in range(len(case.sizes))], case.sizes))

        def read(done: int, memory: Any) -> int | None:
            end = self._reading_end(memory, reader, done)
            if case.leaves and reader == 0 and memory.choose():
                end.end()
                return None
            size = 1 if case.streams else sizes.get(done, 1)
            if end.writer_over(size):
                self._all_read(reader, done)
                end.end()
                return None
            if not end.poll(size, nap_s=None):
                return done
            if case.streams:
                size = _honest(end.available)
            units = self._take(memory, end, size)
            if units is None:
                end.end()
                return None
            if units != list(range(done + 1, done + size + 1)):
                raise LawError(f"reader {reader} got {units} after {done}")
            return end.read

        return read

    def _take(self, memory: Any, end: Any, size: int) -> list[int] | None:
        units = self._units(memory, end.read, size)
        if end.evicted():
            return None
        end.release(size)
        return units

    def _units(self, memory: Any, first: int, size: int) -> list[int]:
        places = self.case.places
        return [memory.words[self._first_place + number % places] for number in range(first, first + size)]

    def _all_read(self, reader: int, done: int) -> None:
        writer_lives = not self.case.writer_dies and not self.case.writer_suspected
        if writer_lives and done != self.case.total:
            raise LawError(f"reader {reader} got {done} of {self.case.total} units")

    def _evict_reader(self, _: int, memory: Any) -> None:
        if self.case.reader_suspected or memory.death(1):
            self._writing_end(memory, 0).evict(0)

    def _evict_writer(self, reader: int) -> Turn:
        def evict(_: int, memory: Any) -> None:
            if self.case.writer_suspected or memory.death(0):
                self._reading_end(memory, reader, 0).evict_writer()

        return evict

    def _reading_end(self, memory: Any, reader: int, read: int) -> Any:
        """What an end remembers between turns, beside its count, is in a word that only its process uses."""
        own = self._first_own + reader

        class End(self._ends.ReadingEnd):  # type: ignore[misc]
            @property
            def writer_evicted(self) -> bool:
                return bool(memory.words[own])

            @writer_evicted.setter
            def writer_evicted(self, value: bool) -> None:
                memory.words[own] = int(value)

        return End(memory, reader, self.case.places, read=read)


def _honest(count: Callable[[], int]) -> int:
    try:
        return count()
    except WireError as error:
        raise LawError(f"an honest end was not believed: {error}") from None
