"""The lookup buffer "simple" with one fault each, and the laws that the fault breaks."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, ClassVar

import numpy as np

from kvplug.errors import CapacityError, KvplugError
from kvplug.net.deadline import Deadline
from kvplug_lab.mutants import breaks
from kvplug_lookup.buffer import store as simple
from kvplug_lookup.buffer.entries import Entries, HeldEntry, Lease
from kvplug_lookup.buffer.entry import Query, entry_of
from kvplug_lookup.buffer.index import TokenIndex
from kvplug_lookup.buffer.reach import ReachingEnd
from kvplug_lookup.buffer.session import Session
from kvplug_lookup.buffer.store import SimpleStore
from kvplug_testing import LookupBufferContract


class Made(LookupBufferContract):
    """Of its parts. ``breaks`` are the laws that it breaks."""

    transport = "simple"
    across_processes = False
    index: type[TokenIndex] = TokenIndex
    entries: type[Entries] = Entries
    session: type[Session] = Session
    store: type[SimpleStore] = SimpleStore
    reaching: type[ReachingEnd] = ReachingEnd
    parts = ("index", "entries", "session", "store", "reaching")
    evict: ClassVar[str] = "never"

    def make_endpoint(self, context: Any) -> Any:
        return Endpoint(self, context)


class Endpoint:
    """Makes either end of a suite's parts."""

    def __init__(self, suite: Made, context: Any) -> None:
        self.suite, self.context = suite, context

    def hold(self) -> SimpleStore:
        session = self.suite.session

        class Store(self.suite.store):  # type: ignore[name-defined, misc]
            def attach(self, *pipes: Any) -> None:
                simple.Session = session  # type: ignore[misc]
                try:
                    super().attach(*pipes)
                finally:
                    simple.Session = Session  # type: ignore[misc]

        context, evict = self.context, self.suite.evict
        store = Store(buffer_size=context.buffer_size, timeout_s=context.timeout_s, evict=evict)
        store._entries.__class__ = self.suite.entries
        store._entries._index.__class__ = self.suite.index
        return store

    def reach(self, signal: Any, data: Any) -> ReachingEnd:
        return self.suite.reaching(signal, data, timeout_s=self.context.timeout_s)


class Mutant(Made):
    """One fault, of one part."""


# -- the key ---------------------------------------------------------------------------------------


class Confused(TokenIndex):
    """Keys are compared after a change."""

    def confused(self, key: bytes, extra: bytes) -> tuple[bytes, bytes]:
        return key, extra

    def insert(self, entry_id: int, key: bytes, extra: bytes = b"") -> None:
        super().insert(entry_id, *self.confused(key, extra))

    def match(self, key: bytes, extra: bytes = b"") -> int:
        return super().match(*self.confused(key, extra))

    def longest_match(self, key: bytes, extra: bytes = b"", min_tokens: int = 1) -> int | None:
        return super().longest_match(*self.confused(key, extra), min_tokens)

    def oldest_match(self, key: bytes | None, extra: bytes = b"") -> int | None:
        confused, extra = self.confused(key or b"", extra)
        return super().oldest_match(None if key is None else confused, extra)


@breaks(Mutant, "LOOKUP-1")
class TestKeepsThirtyTwoBits(Confused):
    """Of an id only the lower 32 bits are compared."""

    def confused(self, key: bytes, extra: bytes) -> tuple[bytes, bytes]:
        return (np.frombuffer(key, np.int64) & 0xFFFFFFFF).tobytes(), extra


@breaks(Mutant, "LOOKUP-1")
class TestIgnoresExtra(Confused):
    """What was computed with one adapter is found by another."""

    def confused(self, key: bytes, extra: bytes) -> tuple[bytes, bytes]:
        return key, b""


@breaks(Mutant, "LOOKUP-1")
class TestIgnoresTheRoiOfAQuery(SimpleStore):
    """A match counts tokens that are not under the roi."""

    def match(self, input_tokens: Any, roi: Any = None, **given: Any) -> int:
        return super().match(input_tokens, None, **given)


# -- matching --------------------------------------------------------------------------------------


@breaks(Mutant, "LOOKUP-2")
class TestNewestWins(Entries):
    """Of several that match the newest is handed out."""

    def _find_oldest(self, query: Query) -> HeldEntry | None:
        found = super()._find_oldest(query)
        for entry in self._unused() if found is not None else ():
            if entry.description.extra == query.extra and entry.ids == found.ids:
                found = entry
        return found


@breaks(Mutant, "LOOKUP-2")
class TestPrefixOnlyOneWay(Entries):
    """An entry that is longer than the query is not found."""

    def _find_oldest(self, query: Query) -> HeldEntry | None:
        found = super()._find_oldest(query)
        return None if found and query.ids is not None and len(found.ids) > len(query.ids) else found


@breaks(Mutant, "LOOKUP-2")
class TestStoresTheCallersTensor(SimpleStore):
    """The key is not copied, so that what the caller writes into its own comes out."""

    def insert(self, input_tokens: Any, roi: Any, key: Any, *rest: Any, **given: Any) -> int:
        entry_id = super().insert(input_tokens, roi, key, *rest, **given)
        entry = self._entries._entries.get(entry_id)
        if entry is not None:
            entry.key = key
        return entry_id


@breaks(Mutant, "LOOKUP-3")
class TestMatchWaits(Entries):
    """A match waits for an entry, as long as a call may."""

    def match(self, query: Query) -> int:
        deadline = Deadline.after(8.0)
        while not (found := super().match(query)) and not deadline.expired:
            time.sleep(0.01)
        return found


@breaks(Mutant, "LOOKUP-3")
class TestMatchWaitsForWhatIsSent(ReachingEnd):
    """While an entry is on its way a match is not answered."""

    def __init__(self, *args: Any, **given: Any) -> None:
        self._in_transfer = threading.Lock()
        super().__init__(*args, **given)

    def _fetch(self, *args: Any) -> Any:
        with self._in_transfer:
            return super()._fetch(*args)

    def match(self, *args: Any, **given: Any) -> int:
        with self._in_transfer:
            return super().match(*args, **given)


# -- taking ----------------------------------------------------------------------------------------


@breaks(Mutant, "LOOKUP-4")
class TestHandsOneEntryToTwo(Entries):
    """An entry for which two wait is handed to both."""

    def _hand(self, entry: HeldEntry, lease: Lease) -> None:
        super()._hand(entry, lease)
        extra = entry.description.extra
        for other in [other for other in self._waiting if other.query.is_met_by(entry.ids, extra)][:1]:
            del self._waiting[other]
            other.entry = entry
            other.on_ready(other)


@breaks(Mutant, "LOOKUP-4")
class TestLosesTheEntryOfWhoGivesUp(Entries):
    """What was lent to be taken is gone, whether it was received or not."""

    def end(self, lease: Lease, *, taken: bool = False) -> bool:
        return super().end(lease, taken=lease.is_exclusive)


@breaks(Mutant, "LOOKUP-4")
class TestBelievesTheDead(Session):
    """The entry of a caller that has vanished counts as received."""

    def abort(self) -> None:
        super().abort()
        for call in list(self._calls.values()):
            self._entries.end(call.lease, taken=True)


@breaks(Mutant, "LOOKUP-4")
class TestWakesOneOfThoseWhoWait(Entries):
    """An entry is offered to one waiting caller only, which may wait for another entry."""

    def _offer_to_waiting(self, entry: HeldEntry) -> None:
        waiting = self._waiting
        self._waiting = dict(list(waiting.items())[:1])
        super()._offer_to_waiting(entry)
        self._waiting |= dict(list(waiting.items())[1:])


# -- room ------------------------------------------------------------------------------------------


@breaks(Mutant, "LOOKUP-5")
class TestWaitsWhereWaitingCannotHelp(SimpleStore):
    """An entry larger than the whole budget waits for room."""

    def insert(self, *args: Any, **given: Any) -> int:
        try:
            return super().insert(*args, **given)
        except CapacityError:
            while not self.is_lost:
                time.sleep(0.01)
            raise


@breaks(Mutant, "LOOKUP-5")
class TestForgetsTheBudget(Entries):
    """There is always room."""

    def _make_room(self, nbytes: int, now: float) -> bool:
        return True


class EvictingMutant(Made):
    """One fault of a store that makes room."""

    evicts = True
    evict = "oldest"


class TestEvicts(EvictingMutant):
    """No fault: inserts make room."""

    is_control = True


@breaks(EvictingMutant, "LOOKUP-5")
class TestEvictsWhatIsReceived(Entries):
    """The oldest entry goes, also while a caller receives it."""

    def _unused(self) -> Any:
        return self._entries.values()


class TestSaysThatItEvicts(EvictingMutant):
    """An insert waits for room, and nothing goes."""

    breaks = ("LOOKUP-5",)
    evict = "never"


@breaks(Mutant, "LOOKUP-5")
class TestSendsUnderItsLock(Session):
    """While an entry is in transfer to a slow end, no other call is served."""

    def __init__(self, entries: Entries, signal: Any, data: Any, **given: Any) -> None:
        send = data.send_tensor

        def send_tensor(*args: Any, **given: Any) -> Any:
            with entries._changed:
                return send(*args, **given)

        data.send_tensor = send_tensor
        super().__init__(entries, signal, data, **given)


# -- cost ------------------------------------------------------------------------------------------


@breaks(Mutant, "LOOKUP-6")
class TestLooksAtEveryEntry(Entries):
    """Finding is a walk through all that is stored."""

    def _find_oldest(self, query: Query) -> HeldEntry | None:
        for entry in self._unused():
            if query.is_met_by(entry.ids, entry.description.extra):
                return entry
        return None


# -- reading ---------------------------------------------------------------------------------------


@breaks(Mutant, "LOOKUP-7")
class TestSelectWaits(Entries):
    """If no entry shares enough tokens, select waits for one."""

    def find(self, query: Query, on_ready: Any) -> Lease:
        deadline = Deadline.after(8.0)
        while not self.closed and self.match(query) < query.min_tokens and not deadline.expired:
            time.sleep(0.01)
        return super().find(query, on_ready)


@breaks(Mutant, "LOOKUP-7")
class TestTakesUnderAReader(Entries):
    """An entry that is being read can be taken out."""

    def _hand(self, entry: HeldEntry, lease: Lease) -> None:
        super()._hand(entry, lease)
        if not lease.is_exclusive and entry.readers == 1:
            self._index.resume(entry.entry_id)


@breaks(Mutant, "LOOKUP-7")
class TestLosesTheEntryOfASinkThatRaises(SimpleStore):
    """An entry that a sink refused is thrown away."""

    def select(self, input_tokens: Any, *args: Any, **given: Any) -> Any:
        try:
            return super().select(input_tokens, *args, **given)
        except KvplugError:
            raise
        except Exception:
            self.drop_select(input_tokens, timeout=0)
            raise


@breaks(Mutant, "LOOKUP-7")
class TestReadersGetTheEntryItself(SimpleStore):
    """What a reader writes into its entry is read by the next one."""

    def select(self, *args: Any, **given: Any) -> Any:
        got = super().select(*args, **given)
        entry = self._entries._entries.get(got.header.entry_id)
        if entry is None or given.get("sink") is not None:
            return got
        return entry_of(got.header, entry.key, entry.value, entry.hidden)


# -- everything with an end ------------------------------------------------------------------------


@breaks(Mutant, "ALL-1")
class TestCloseLeavesThoseWhoWait(Entries):
    """A caller that waits when the store is closed keeps waiting."""

    def close(self) -> None:
        self.closed = True


@breaks(Mutant, "ALL-1")
class TestAnswersAfterItsEnd(Entries):
    """A closed store answers a match with 0."""

    def match(self, query: Query) -> int:
        return 0 if self.closed else super().match(query)


@breaks(Mutant, "ALL-1")
class TestCannotBeClosedTwice(SimpleStore):
    """The second close fails."""

    def close(self, *args: Any, **given: Any) -> None:
        self._entries._check_open()
        super().close(*args, **given)


@breaks(Mutant, "ALL-2")
class TestTheStoresEndIsNotHeardOf(ReachingEnd):
    """A reaching end does not notice that its store is gone."""

    def _lose(self, error: KvplugError) -> None:
        pass


@breaks(Mutant, "ALL-4", "LOOKUP-4")
class TestIgnoresTimeouts(SimpleStore):
    """A caller that waits for an entry waits for ever."""

    def drop_select(self, *args: Any, **given: Any) -> Any:
        return super().drop_select(*args, **given | {"timeout": None})


@breaks(Mutant, "ALL-4")
class TestGivesUpEarly(Entries):
    """A caller that waits for room waits half of its timeout."""

    def reserve(self, nbytes: int, deadline: Deadline) -> None:
        left = deadline.remaining()
        super().reserve(nbytes, Deadline.after(None if left is None else left / 2))


@breaks(Mutant, "ALL-10")
class TestWaitsForAnAnswerForEver(ReachingEnd):
    """A reaching end waits for an answer as long as it takes."""

    def _answer(self, call: Any, kind: Any, deadline: Deadline, what: str) -> Any:
        return super()._answer(call, kind, Deadline.after(None), what)


@breaks(Mutant, "ALL-6")
class TestWorksInAForkedChild(SimpleStore):
    """A forked child goes on with a store of its own."""

    def _after_fork_in_child(self) -> None:
        self._entries = Entries(self._buffer_size, evict="never", ttl_s=None)


@breaks(Mutant, "ALL-6")
class TestLeavesAForkedChildItsDescriptor(ReachingEnd):
    """In a forked child its calls raise, and a descriptor stays open."""

    def __init__(self, *args: Any, **given: Any) -> None:
        self._opened: int | None = os.open("/dev/null", os.O_RDONLY)
        super().__init__(*args, **given)

    def _end(self, *args: Any, **given: Any) -> bool:
        opened, self._opened = self._opened, None
        if opened is not None:
            os.close(opened)
        return super()._end(*args, **given)


@breaks(Mutant, "ALL-7")
class TestLeavesAThread(ReachingEnd):
    """Each reaching end leaves a thread behind."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


_kept: list[Any] = []


@breaks(Mutant, "ALL-7")
class TestKeepsWhatWasTaken(Entries):
    """Entries that were taken stay in memory."""

    def _forget(self, entry: HeldEntry) -> None:
        _kept.append(entry.hidden)
        super()._forget(entry)


# -- the control -----------------------------------------------------------------------------------


class TestHasNoFault(Mutant):
    """The lookup buffer "simple" as it is."""

    is_control = True
