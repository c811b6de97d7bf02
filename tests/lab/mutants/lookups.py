"""The lookup buffer "memory" with one fault each, and the laws that the fault breaks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import attrs

from kvplug.errors import CapacityError, ClosedError, KvplugError, TimeoutError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline
from kvplug_testing import LookupBufferContract
from kvplug_testing.memory.lookup import MemoryLookupEndpoint, MemoryStore
from kvplug_testing.memory.lookup_calls import MemoryRemoteStore, Wanted
from kvplug_testing.memory.store_core import LeasedEntry, StoreCore, StoredEntry


class Made(LookupBufferContract):
    """Of ``store`` and ``reaching``. ``breaks`` are the laws that it breaks."""

    transport = "memory"
    across_processes = False
    store: type[MemoryStore] = MemoryStore
    reaching: type[MemoryRemoteStore] = MemoryRemoteStore
    breaks: tuple[str, ...] = ()

    def make_endpoint(self, context: Any) -> Any:
        store, reaching = self.store, self.reaching

        class Endpoint(MemoryLookupEndpoint):
            def hold(self) -> Any:
                return store(self._context)

            def reach(self, signal: Any, data: Any) -> Any:
                return reaching(signal, data, timeout_s=self._context.timeout_s)

        return Endpoint(context)


class Mutant(Made):
    """One fault, of ``store`` or ``reaching``."""


# -- the key ---------------------------------------------------------------------------------------


class Blurred(MemoryStore):
    """Token ids are compared by something else than themselves."""

    blur: ClassVar[Callable[[int], int]]

    def _blurred(self, key: Any) -> Any:
        return None if key is None else tuple(type(self).blur(token) for token in key)

    def _publish(self, stored: StoredEntry) -> None:
        stored.key = self._blurred(stored.key)
        super()._publish(stored)

    def _find_oldest(self, key: Any, extra: bytes) -> Any:
        return super()._find_oldest(self._blurred(key), extra)

    def _find_longest(self, key: Any, extra: bytes) -> Any:
        return super()._find_longest(self._blurred(key), extra)


class TestToleratesSmallDifferences(Mutant):
    """Ids that differ by a hundred-thousandth are equal, as they are for allclose."""

    breaks = ("LOOKUP-1",)
    caught_by = "test_ids_are_compared_exactly"

    class store(Blurred):  # noqa: N801
        blur = staticmethod(lambda token: token if token < 1 << 16 else token - token % 4)


class TestComparesHashes(Mutant):
    """Ids with the same hash are equal."""

    breaks = ("LOOKUP-1",)
    caught_by = "test_ids_are_compared_exactly"

    class store(Blurred):  # noqa: N801
        blur = staticmethod(hash)


class TestKeepsThirtyTwoBits(Mutant):
    """Of an id only the lower 32 bits are compared."""

    breaks = ("LOOKUP-1",)
    caught_by = "test_ids_are_compared_exactly"

    class store(Blurred):  # noqa: N801
        blur = staticmethod(lambda token: token & 0xFFFFFFFF)


class TestIgnoresExtra(Mutant):
    """What was computed with one adapter is found by another."""

    breaks = ("LOOKUP-1",)

    class store(MemoryStore):  # noqa: N801
        def _publish(self, stored: StoredEntry) -> None:
            stored.extra = b""
            super()._publish(stored)

        def _find_oldest(self, key: Any, extra: bytes) -> Any:
            return super()._find_oldest(key, b"")

        def _find_longest(self, key: Any, extra: bytes) -> Any:
            return super()._find_longest(key, b"")


class TestIgnoresTheRoiOfAQuery(Mutant):
    """A match counts tokens that are not under the roi."""

    breaks = ("LOOKUP-1",)

    class store(MemoryStore):  # noqa: N801
        def match(self, input_tokens: Any, roi: Any = None, **given: Any) -> int:
            return super().match(input_tokens, None, **given)


# -- matching --------------------------------------------------------------------------------------


class TestNewestWins(Mutant):
    """Of several that match the newest is handed out."""

    breaks = ("LOOKUP-2",)
    caught_by = "test_of_several_the_oldest_wins_and_none_asks_for_the_oldest_of_all"

    class store(MemoryStore):  # noqa: N801
        def _find_oldest(self, key: Any, extra: bytes) -> Any:
            found = super()._find_oldest(key, extra)
            for stored in self._entries.values():
                if (
                    found is not None
                    and stored.is_published
                    and (stored.key, stored.extra) == (found.key, extra)
                ):
                    found = stored
            return found


class TestPrefixOnlyOneWay(Mutant):
    """An entry that is longer than the query is not found."""

    breaks = ("LOOKUP-2",)
    caught_by = "test_tensors_that_are_not_contiguous_or_empty_come_out_as_they_read"

    class store(MemoryStore):  # noqa: N801
        def _find_oldest(self, key: Any, extra: bytes) -> Any:
            found = super()._find_oldest(key, extra)
            return None if found and key is not None and len(found.key) > len(key) else found


class TestMixesEntriesUp(Mutant):
    """An entry comes with the values of the one that was stored before it."""

    breaks = ("LOOKUP-2",)
    caught_by = "test_nothing_of_one_entry_is_found_in_another"

    class store(MemoryStore):  # noqa: N801
        last: Any = None

        def _publish(self, stored: StoredEntry) -> None:
            mine, last = stored.entry.value, self.last
            if mine is not None and last is not None and mine.shape == last.shape:
                stored.entry = attrs.evolve(stored.entry, value=last)
            self.last = mine
            super()._publish(stored)


class TestStoresTheCallersTensor(Mutant):
    """The key is not copied, so that what the caller writes into its own comes out."""

    breaks = ("LOOKUP-2",)

    class store(MemoryStore):  # noqa: N801
        def insert(self, input_tokens: Any, roi: Any, key: Any, *rest: Any, **given: Any) -> int:
            with self._changed:
                entry_id = super().insert(input_tokens, roi, key, *rest, **given)
                stored = self._entries.get(entry_id)
                if stored is not None:
                    stored.entry = attrs.evolve(stored.entry, key=key)
            return entry_id


class TestCountsOnlyWholeEntries(Mutant):
    """A match is an entry that is wholly a prefix of the query, or nothing."""

    breaks = ("LOOKUP-3",)

    class store(MemoryStore):  # noqa: N801
        def count_shared(self, key: Any, extra: bytes) -> int:
            with self._changed:
                self._check_open()
                shared, stored = self._find_longest(key, extra)
                return shared if stored is not None and shared == len(stored.key) else 0


class TestMatchWaits(Mutant):
    """A match waits for an entry, as long as a call may."""

    breaks = ("LOOKUP-3",)

    class store(MemoryStore):  # noqa: N801
        def count_shared(self, key: Any, extra: bytes) -> int:
            with self._changed:
                found = lambda: self._closed or self._find_longest(key, extra)[0]  # noqa: E731
                self._changed.wait_for(found, self._timeout_s)
            return super().count_shared(key, extra)


class TestMatchWaitsForWhatIsSent(Mutant):
    """While an entry is on its way a match is not answered."""

    breaks = ("LOOKUP-3",)

    class reaching(MemoryRemoteStore):  # noqa: N801
        def __init__(self, *args: Any, **given: Any) -> None:
            self._in_transfer = threading.Lock()
            super().__init__(*args, **given)

        def _transfer(self, *args: Any) -> Any:
            with self._in_transfer:
                return super()._transfer(*args)

        def match(self, *args: Any, **given: Any) -> int:
            with self._in_transfer:
                return super().match(*args, **given)


# -- taking ----------------------------------------------------------------------------------------


class TestHandsOneEntryToTwo(Mutant):
    """Between finding an entry and taking it out another call may find it."""

    breaks = ("LOOKUP-4",)
    caught_by = "test_no_wake_up_is_lost_where_room_and_entries_are_waited_for"

    class store(MemoryStore):  # noqa: N801
        def drop_select(self, input_tokens: Any, roi: Any = None, **given: Any) -> Any:
            if roi is not None:
                return super().drop_select(input_tokens, roi, **given)
            key = None if input_tokens is None else tuple(input_tokens)
            deadline = Deadline.after(given.get("timeout", DEFAULT_TIMEOUT), self._timeout_s)
            find = lambda: self._closed or self._find_oldest(key, given.get("extra", b""))  # noqa: E731
            with self._changed:
                stored = self._changed.wait_for(find, deadline.remaining())
            if not isinstance(stored, StoredEntry):
                return super().drop_select(input_tokens, roi, **given | {"timeout": 0})
            time.sleep(0.001)
            with self._changed:
                if stored.is_published:
                    self._remove(stored)
                    self._changed.notify_all()
            return stored.entry


class TestLosesTheEntryOfWhoGivesUp(Mutant):
    """What was lent to be taken is gone, whether it was received or not."""

    breaks = ("LOOKUP-4",)
    caught_by = "test_the_entry_of_a_caller_whose_time_is_up_in_the_middle_is_back"

    class store(MemoryStore):  # noqa: N801
        def release(self, leased: LeasedEntry, *, is_received: bool) -> None:
            super().release(leased, is_received=leased.lease.exclusive)


class TestBelievesTheDead(Mutant):
    """A caller that is gone without a word has got its entry."""

    breaks = ("LOOKUP-4",)
    caught_by = "test_the_entry_of_a_caller_that_is_gone_in_the_middle_is_back"

    class reaching(MemoryRemoteStore):  # noqa: N801
        def _release(self, store: StoreCore, leased: LeasedEntry, is_received: bool) -> None:
            super()._release(store, leased, is_received or self._signal.closed)


class TestNeverNoticesThatACallerIsGone(Mutant):
    """What was lent to one that is gone stays lent."""

    breaks = ("LOOKUP-4",)
    caught_by = "test_the_entry_of_a_caller_that_is_gone_in_the_middle_is_back"

    class reaching(MemoryRemoteStore):  # noqa: N801
        def _release(self, store: StoreCore, leased: LeasedEntry, is_received: bool) -> None:
            if not self._signal.closed:
                super()._release(store, leased, is_received)


class TestWakesOneOfThoseWhoWait(Mutant):
    """A change wakes one waiter, who may have waited for something else."""

    breaks = ("LOOKUP-4",)

    class store(MemoryStore):  # noqa: N801
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            self.wake_all = self._changed.notify_all
            self._changed.notify_all = partial(self._changed.notify, 1)  # type: ignore[method-assign]

        def abort(self) -> None:
            self._changed.notify_all = self.wake_all  # type: ignore[method-assign]
            super().abort()


# -- room ------------------------------------------------------------------------------------------


class TestNeverGivesBytesBack(Mutant):
    """The budget is used up by what was ever stored."""

    breaks = ("LOOKUP-5",)

    class store(MemoryStore):  # noqa: N801
        def _remove(self, stored: StoredEntry) -> None:
            super()._remove(stored)
            self._used_bytes += stored.nbytes


class TestStoresWhatTimedOut(Mutant):
    """An insert that found no room in time raises, and has stored its entry."""

    breaks = ("LOOKUP-5",)

    class store(MemoryStore):  # noqa: N801
        def insert(self, *args: Any, **given: Any) -> int:
            try:
                return super().insert(*args, **given)
            except TimeoutError:
                self._max_bytes *= 2
                super().insert(*args, **given)
                raise


class TestWaitsWhereWaitingCannotHelp(Mutant):
    """An entry larger than the whole budget waits for room."""

    breaks = ("LOOKUP-5",)

    class store(MemoryStore):  # noqa: N801
        def insert(self, *args: Any, **given: Any) -> int:
            try:
                return super().insert(*args, **given)
            except CapacityError:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed)
                raise


class TestForgetsTheBudget(Mutant):
    """There is always room."""

    breaks = ("LOOKUP-5",)

    class store(MemoryStore):  # noqa: N801
        def _has_room(self, nbytes: int) -> bool:
            return True


class Evicting(MemoryStore):
    """Makes room by removing the oldest entries that none is receiving."""

    def _has_room(self, nbytes: int) -> bool:
        while not super()._has_room(nbytes):
            going = next((stored for stored in self._entries.values() if self._may_go(stored)), None)
            if going is None:
                return False
            self._remove(going)
        return True

    def _may_go(self, stored: StoredEntry) -> bool:
        return not self._leases.is_lent(stored.entry_id)


class EvictingMutant(Made):
    """One fault of a store that makes room."""

    evicts = True
    store = Evicting


class TestEvicts(EvictingMutant):
    """No fault: inserts make room."""

    is_control = True


class TestEvictsWhatIsReceived(EvictingMutant):
    """The oldest entry goes, also while a caller receives it."""

    breaks = ("LOOKUP-5",)

    class store(Evicting):  # noqa: N801
        def _may_go(self, stored: StoredEntry) -> bool:
            return True


class TestEvictsWhatHasJustCome(EvictingMutant):
    """Where there is no room, the new entry is the one that goes."""

    breaks = ("LOOKUP-5",)

    class store(Evicting):  # noqa: N801
        def insert(self, *args: Any, **given: Any) -> int:
            was_full = bool(self._entries) and not MemoryStore._has_room(self, self._max_bytes // 4)
            entry_id = super().insert(*args, **given)
            with self._changed:
                if was_full:
                    self._remove(self._entries[entry_id])
            return entry_id


class TestEvictsTooLittle(EvictingMutant):
    """Where there is no room one entry goes, and the new one counts as half as large as it is."""

    breaks = ("LOOKUP-5",)

    class store(Evicting):  # noqa: N801
        def _has_room(self, nbytes: int) -> bool:
            return super()._has_room(nbytes // 2 - self._used_bytes // 2)


class TestSaysThatItEvicts(EvictingMutant):
    """An insert waits for room, and nothing goes."""

    breaks = ("LOOKUP-5",)
    store = MemoryStore


class TestSendsUnderItsLock(Mutant):
    """While an entry is in transfer to a slow end, no other call is served."""

    breaks = ("LOOKUP-5",)
    caught_by = "test_one_who_takes_its_time_holds_up_neither_inserts_nor_others"

    class reaching(MemoryRemoteStore):  # noqa: N801
        def _transfer(self, *args: Any) -> Any:
            assert self._client is not None
            with self._client.store._changed:
                return super()._transfer(*args)


# -- cost ------------------------------------------------------------------------------------------


class TestLooksAtEveryEntry(Mutant):
    """Finding is a walk through all that is stored."""

    breaks = ("LOOKUP-6",)

    class store(MemoryStore):  # noqa: N801
        def _find_oldest(self, key: Any, extra: bytes) -> Any:
            for stored in self._entries.values():
                size = len(stored.key) if key is None else min(len(stored.key), len(key))
                matches = key is None or (size and stored.key[:size] == key[:size])
                lent = self._leases.is_lent(stored.entry_id)
                if matches and stored.extra == extra and stored.is_published and not lent:
                    return stored
            return None


# -- reading ---------------------------------------------------------------------------------------


class TestSelectTakesTheEntryOut(Mutant):
    """An entry that was read is gone."""

    breaks = ("LOOKUP-7",)

    class store(MemoryStore):  # noqa: N801
        def release(self, leased: LeasedEntry, *, is_received: bool) -> None:
            with self._changed:
                super().release(leased, is_received=is_received)
                if not (leased.lease.exclusive or leased.stored.is_removed):
                    self._remove(leased.stored)


class TestSelectWaits(Mutant):
    """Where nothing shares enough, select waits for an entry that does."""

    breaks = ("LOOKUP-7",)

    class store(MemoryStore):  # noqa: N801
        def lease_longest(self, key: Any, extra: bytes, min_tokens: int) -> LeasedEntry:
            with self._changed:
                enough = lambda: self._closed or self._find_longest(key, extra)[0] >= min_tokens  # noqa: E731
                self._changed.wait_for(enough, self._timeout_s)
            return super().lease_longest(key, extra, min_tokens)


class TestTakesUnderAReader(Mutant):
    """An entry that is being read can be taken out."""

    breaks = ("LOOKUP-7",)

    class store(MemoryStore):  # noqa: N801
        def _lease(self, stored: StoredEntry, *, exclusive: bool) -> LeasedEntry:
            if exclusive:
                return super()._lease(stored, exclusive=True)
            return LeasedEntry(stored, self._leases.take(-stored.entry_id, "a reader", exclusive=False))

        def release(self, leased: LeasedEntry, *, is_received: bool) -> None:
            if leased.lease.exclusive:
                super().release(leased, is_received=is_received)
                return
            with self._changed:
                self._leases.release(leased.lease)
                self._changed.notify_all()


class TestLosesTheEntryOfASinkThatRaises(Mutant):
    """An entry that a sink refused is thrown away."""

    breaks = ("LOOKUP-7",)
    caught_by = "test_a_sink_that_raises_ends_the_transfer_and_the_entry_stays"

    class store(MemoryStore):  # noqa: N801
        def select(self, input_tokens: Any, *args: Any, **given: Any) -> Any:
            try:
                return super().select(input_tokens, *args, **given)
            except KvplugError:
                raise
            except Exception:
                with self._changed:
                    found = self._find_longest(tuple(input_tokens), b"")[1]
                    if found is not None:
                        self._remove(found)
                raise


class TestReadersGetTheEntryItself(Mutant):
    """What a reader writes into its entry is read by the next one."""

    breaks = ("LOOKUP-7",)

    class store(MemoryStore):  # noqa: N801
        def select(self, *args: Any, **given: Any) -> Any:
            got = super().select(*args, **given)
            stored = self._entries.get(got.header.entry_id)
            return got if stored is None or given.get("sink") is not None else stored.entry


class TestGivesACallWhatCameForAnother(Mutant):
    """What comes over the data pipe is given to the call before."""

    breaks = ("LOOKUP-7",)

    class reaching(MemoryRemoteStore):  # noqa: N801
        last: Any = None

        def _transfer(self, *args: Any) -> Any:
            parts = super()._transfer(*args)
            last, self.last = self.last, parts
            return parts if last is None else last


# -- everything with an end ------------------------------------------------------------------------


class TestCloseLeavesThoseWhoWait(Mutant):
    """Who waits when the store is closed goes on waiting."""

    breaks = ("ALL-1",)

    class store(MemoryStore):  # noqa: N801
        def close(self, timeout: Any = 5.0) -> None:
            wake_all, self._changed.notify_all = self._changed.notify_all, lambda: None  # type: ignore[method-assign]
            super().close(timeout)
            self._changed.notify_all = wake_all  # type: ignore[method-assign]


class TestAnswersAfterItsEnd(Mutant):
    """A store that is closed still says what it holds: nothing."""

    breaks = ("ALL-1",)

    class store(MemoryStore):  # noqa: N801
        def count_shared(self, key: Any, extra: bytes) -> int:
            return 0 if self._closed else super().count_shared(key, extra)


class TestCannotBeClosedTwice(Mutant):
    """The second close fails."""

    breaks = ("ALL-1",)

    class store(MemoryStore):  # noqa: N801
        def close(self, *args: Any, **given: Any) -> None:
            self._check_open()
            super().close(*args, **given)


class TestTheStoresEndIsNotHeardOf(Mutant):
    """A reaching end does not notice that its store is gone."""

    breaks = ("ALL-2",)

    class reaching(MemoryRemoteStore):  # noqa: N801
        def _end(self, error: KvplugError) -> None:
            if isinstance(error, ClosedError):
                super()._end(error)


class TestIgnoresTimeouts(Mutant):
    """Who waits for an entry waits for ever."""

    breaks = ("ALL-4", "LOOKUP-4")

    class store(MemoryStore):  # noqa: N801
        def lease_oldest(self, key: Any, extra: bytes, deadline: Deadline, *given: Any) -> LeasedEntry:
            return super().lease_oldest(key, extra, Deadline.after(None), *given)


class TestGivesUpEarly(Mutant):
    """Who waits for room waits half as long as it may."""

    breaks = ("ALL-4",)

    class store(MemoryStore):  # noqa: N801
        def _wait_for_capacity(self, nbytes: int, deadline: Deadline) -> None:
            left = deadline.remaining()
            super()._wait_for_capacity(nbytes, Deadline.after(None if left is None else left / 2))


class TestWaitsForAnAnswerForEver(Mutant):
    """A reaching end waits for an answer as long as it takes."""

    breaks = ("ALL-4",)

    class reaching(MemoryRemoteStore):  # noqa: N801
        def _copied(self, entry: Any, wanted: Any, deadline: Deadline) -> Any:
            return super()._copied(entry, wanted, Deadline.after(None))


class TestWorksInAForkedChild(Mutant):
    """A forked child goes on with a copy of the store."""

    breaks = ("ALL-6",)

    class store(MemoryStore):  # noqa: N801
        def _after_fork_in_child(self) -> None:
            self._changed = threading.Condition()


class TestLeavesAForkedChildItsDescriptor(Mutant):
    """In a forked child its calls raise, and a descriptor stays open."""

    breaks = ("ALL-6",)
    caught_by = "test_a_forked_child_holds_none_of_the_descriptors"

    class reaching(MemoryRemoteStore):  # noqa: N801
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            self._opened: int | None = os.open("/dev/null", os.O_RDONLY)

        def _end(self, error: KvplugError) -> None:
            super()._end(error)
            opened, self._opened = self._opened, None
            if opened is not None:
                os.close(opened)


class TestLeavesAThread(Mutant):
    """Each reaching end leaves a thread behind."""

    breaks = ("ALL-7",)

    class reaching(MemoryRemoteStore):  # noqa: N801
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            threading.Thread(target=threading.Event().wait, daemon=True).start()


_kept: list[Any] = []


class TestKeepsWhatWasTaken(Mutant):
    """Entries that were taken stay in memory."""

    breaks = ("ALL-7",)
    caught_by = "test_a_thousand_of_them_leave_no_memory_either"

    class store(MemoryStore):  # noqa: N801
        def _remove(self, stored: StoredEntry) -> None:
            _kept.append(stored.entry.hidden)
            super()._remove(stored)


class TestHandsOutAnotherEntry(Mutant):
    """What comes is not compared with what was asked for."""

    breaks = ("ALL-10",)
    caught_by = "test_whatever_the_other_end_says_each_call_ends_in_time_in_what_was_asked_for"

    class reaching(MemoryRemoteStore):  # noqa: N801
        def _copied(self, entry: Any, wanted: Any, deadline: Deadline) -> Any:
            return super()._copied(entry, Wanted(None), deadline)


# -- the control -----------------------------------------------------------------------------------


class TestHasNoFault(Mutant):
    """The lookup buffer "memory" as it is."""

    is_control = True
