"""The lookup buffer "memory" with one fault each, and the laws that the fault breaks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import attrs

from kvplug.errors import CapacityError, KvplugError, TimeoutError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline
from kvplug_lab.mutants import breaks
from kvplug_testing import LookupBufferContract
from kvplug_testing.memory.lookup import (
    MemoryLookupEndpoint,
    MemoryRemoteStore,
    MemoryStore,
    StoredEntry,
    decoded,
)


class Made(LookupBufferContract):
    """Of ``store`` and ``reaching``. ``breaks`` are the laws that it breaks."""

    transport = "memory"
    across_processes = False
    store: type[MemoryStore] = MemoryStore
    reaching: type[MemoryRemoteStore] = MemoryRemoteStore
    parts = ("store", "reaching")
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

    def _add(self, stored: StoredEntry) -> None:
        stored.key = self._blurred(stored.key)
        super()._add(stored)

    def _find_oldest(self, key: Any, extra: bytes) -> Any:
        return super()._find_oldest(self._blurred(key), extra)

    def _find_longest(self, key: Any, extra: bytes) -> Any:
        return super()._find_longest(self._blurred(key), extra)


@breaks(Mutant, "LOOKUP-1", caught_by="test_ids_are_compared_exactly")
class TestToleratesSmallDifferences(Blurred):
    """Ids that differ by a hundred-thousandth are equal, as they are for allclose."""

    blur = staticmethod(lambda token: token if token < 1 << 16 else token - token % 4)


@breaks(Mutant, "LOOKUP-1", caught_by="test_ids_are_compared_exactly")
class TestKeepsThirtyTwoBits(Blurred):
    """Of an id only the lower 32 bits are compared."""

    blur = staticmethod(lambda token: token & 0xFFFFFFFF)


@breaks(Mutant, "LOOKUP-1")
class TestIgnoresExtra(MemoryStore):
    """What was computed with one adapter is found by another."""

    def _add(self, stored: StoredEntry) -> None:
        stored.extra = b""
        super()._add(stored)

    def _find_oldest(self, key: Any, extra: bytes) -> Any:
        return super()._find_oldest(key, b"")

    def _find_longest(self, key: Any, extra: bytes) -> Any:
        return super()._find_longest(key, b"")


@breaks(Mutant, "LOOKUP-1")
class TestIgnoresTheRoiOfAQuery(MemoryStore):
    """A match counts tokens that are not under the roi."""

    def match(self, input_tokens: Any, roi: Any = None, **given: Any) -> int:
        return super().match(input_tokens, None, **given)


# -- matching --------------------------------------------------------------------------------------


@breaks(Mutant, "LOOKUP-2", caught_by="test_some_random_calls_find_what_a_slow_search_finds")
class TestNewestWins(MemoryStore):
    """Of several that match the newest is handed out."""

    def _find_oldest(self, key: Any, extra: bytes) -> Any:
        found = super()._find_oldest(key, extra)
        for stored in self._entries.values():
            if (
                found is not None
                and not stored.num_users
                and (stored.key, stored.extra) == (found.key, extra)
            ):
                found = stored
        return found


@breaks(Mutant, "LOOKUP-2", caught_by="test_some_random_calls_find_what_a_slow_search_finds")
class TestPrefixOnlyOneWay(MemoryStore):
    """An entry that is longer than the query is not found."""

    def _find_oldest(self, key: Any, extra: bytes) -> Any:
        found = super()._find_oldest(key, extra)
        return None if found and key is not None and len(found.key) > len(key) else found


@breaks(Mutant, "LOOKUP-2", caught_by="test_some_random_calls_find_what_a_slow_search_finds")
class TestMixesEntriesUp(MemoryStore):
    """An entry comes with the values of the one that was stored before it."""

    def _received(self, stored: StoredEntry, *more: Any) -> Any:
        entry, before = super()._received(stored, *more), self._entries.get(stored.entry_id - 1)
        value = before and decoded(before.tokens, before.rest).value
        if entry.value is None or value is None or entry.value.shape != value.shape:
            return entry
        return attrs.evolve(entry, value=value)


@breaks(Mutant, "LOOKUP-2")
class TestStoresTheCallersTensor(MemoryStore):
    """The key is not copied, so that what the caller writes into its own comes out."""

    def insert(self, input_tokens: Any, roi: Any, key: Any, *rest: Any, **given: Any) -> int:
        with self._changed:
            entry_id = super().insert(input_tokens, roi, key, *rest, **given)
            self.__dict__.setdefault("keys", {})[entry_id] = key
        return entry_id

    def _received(self, stored: StoredEntry, *more: Any) -> Any:
        return attrs.evolve(super()._received(stored, *more), key=self.__dict__["keys"][stored.entry_id])


@breaks(Mutant, "LOOKUP-3")
class TestMatchWaits(MemoryStore):
    """A match waits for an entry, as long as a call may."""

    def count_shared(self, key: Any, extra: bytes) -> int:
        with self._changed:
            found = lambda: self._closed or self._find_longest(key, extra)[0]  # noqa: E731
            self._changed.wait_for(found, self._timeout_s)
        return super().count_shared(key, extra)


@breaks(Mutant, "LOOKUP-3")
class TestMatchWaitsForWhatIsSent(MemoryRemoteStore):
    """While an entry is on its way a match is not answered."""

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


@breaks(Mutant, "LOOKUP-4", caught_by="test_no_wake_up_is_lost_where_room_and_entries_are_waited_for")
class TestHandsOneEntryToTwo(MemoryStore):
    """Between finding an entry and taking it out another call may find it."""

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
            if not stored.is_removed:
                self._remove(stored)
        return decoded(stored.tokens, stored.rest)


@breaks(Mutant, "LOOKUP-4", caught_by="test_the_entry_of_a_caller_whose_time_is_up_in_the_middle_is_back")
class TestLosesTheEntryOfWhoGivesUp(MemoryStore):
    """What was lent to be taken is gone, whether it was received or not."""

    def release(self, stored: StoredEntry, *, is_received: bool) -> None:
        super().release(stored, is_received=True)


@breaks(Mutant, "LOOKUP-4", caught_by="test_the_entry_of_a_caller_that_is_gone_in_the_middle_is_back")
class TestBelievesTheDead(MemoryRemoteStore):
    """A caller that is gone without a word has got its entry."""

    def _release(self, store: MemoryStore, stored: StoredEntry, is_received: bool) -> None:
        super()._release(store, stored, is_received or self._signal.closed)


@breaks(Mutant, "LOOKUP-4", caught_by="test_the_entry_of_a_caller_that_is_gone_in_the_middle_is_back")
class TestNeverNoticesThatACallerIsGone(MemoryRemoteStore):
    """What was lent to one that is gone stays lent."""

    def _release(self, store: MemoryStore, stored: StoredEntry, is_received: bool) -> None:
        if not self._signal.closed:
            super()._release(store, stored, is_received)


@breaks(Mutant, "LOOKUP-4")
class TestWakesOneOfThoseWhoWait(MemoryStore):
    """A change wakes one waiter, who may have waited for something else."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.wake_all = self._changed.notify_all
        self._changed.notify_all = partial(self._changed.notify, 1)  # type: ignore[method-assign]

    def abort(self) -> None:
        self._changed.notify_all = self.wake_all  # type: ignore[method-assign]
        super().abort()


# -- room ------------------------------------------------------------------------------------------


@breaks(Mutant, "LOOKUP-5")
class TestWaitsWhereWaitingCannotHelp(MemoryStore):
    """An entry larger than the whole budget waits for room."""

    def insert(self, *args: Any, **given: Any) -> int:
        try:
            return super().insert(*args, **given)
        except CapacityError:
            with self._changed:
                self._changed.wait_for(lambda: self._closed)
            raise


@breaks(Mutant, "LOOKUP-5")
class TestForgetsTheBudget(MemoryStore):
    """There is always room."""

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
        return not stored.num_users


class EvictingMutant(Made):
    """One fault of a store that makes room."""

    evicts = True
    store = Evicting


class TestEvicts(EvictingMutant):
    """No fault: inserts make room."""

    is_control = True


@breaks(EvictingMutant, "LOOKUP-5")
class TestEvictsWhatIsReceived(Evicting):
    """The oldest entry goes, also while a caller receives it."""

    def _may_go(self, stored: StoredEntry) -> bool:
        return True


@breaks(EvictingMutant, "LOOKUP-5")
class TestEvictsTooLittle(Evicting):
    """Where there is no room one entry goes, and the new one counts as half as large as it is."""

    def _has_room(self, nbytes: int) -> bool:
        return super()._has_room(nbytes // 2 - self._used_bytes // 2)


class TestSaysThatItEvicts(EvictingMutant):
    """An insert waits for room, and nothing goes."""

    breaks = ("LOOKUP-5",)
    store = MemoryStore


@breaks(Mutant, "LOOKUP-5", caught_by="test_one_who_takes_its_time_holds_up_nobody")
class TestSendsUnderItsLock(MemoryRemoteStore):
    """While an entry is in transfer to a slow end, no other call is served."""

    def _transfer(self, *args: Any) -> Any:
        assert self._client is not None
        with self._client.store._changed:
            return super()._transfer(*args)


# -- cost ------------------------------------------------------------------------------------------


@breaks(Mutant, "LOOKUP-6")
class TestLooksAtEveryEntry(MemoryStore):
    """Finding is a walk through all that is stored."""

    def _find_oldest(self, key: Any, extra: bytes) -> Any:
        for stored in self._entries.values():
            size = len(stored.key) if key is None else min(len(stored.key), len(key))
            matches = key is None or (size and stored.key[:size] == key[:size])
            if matches and stored.extra == extra and not stored.num_users:
                return stored
        return None


# -- reading ---------------------------------------------------------------------------------------


@breaks(Mutant, "LOOKUP-7")
class TestSelectTakesTheEntryOut(MemoryStore):
    """An entry that was read is gone."""

    def release(self, stored: StoredEntry, *, is_received: bool) -> None:
        with self._changed:
            was_taken = stored.is_taken
            super().release(stored, is_received=is_received)
            if not (was_taken or stored.is_removed):
                self._remove(stored)


@breaks(Mutant, "LOOKUP-7")
class TestSelectWaits(MemoryStore):
    """Where nothing shares enough, select waits for an entry that does."""

    def lease_longest(self, key: Any, extra: bytes, min_tokens: int) -> StoredEntry:
        with self._changed:
            enough = lambda: self._closed or self._find_longest(key, extra)[0] >= min_tokens  # noqa: E731
            self._changed.wait_for(enough, self._timeout_s)
        return super().lease_longest(key, extra, min_tokens)


@breaks(Mutant, "LOOKUP-7")
class TestTakesUnderAReader(MemoryStore):
    """An entry that is being read can be taken out."""

    def _find_oldest(self, key: Any, extra: bytes) -> Any:
        read = [stored for stored in self._entries.values() if not stored.is_taken]
        users = [stored.num_users for stored in read]
        for stored in read:
            stored.num_users = 0
        found = super()._find_oldest(key, extra)
        for stored, number in zip(read, users, strict=True):
            stored.num_users = number
        return found


@breaks(Mutant, "LOOKUP-7", caught_by="test_a_sink_that_raises_ends_the_transfer_and_the_entry_stays")
class TestLosesTheEntryOfASinkThatRaises(MemoryStore):
    """An entry that a sink refused is thrown away."""

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


@breaks(Mutant, "LOOKUP-7")
class TestReadersGetTheEntryItself(MemoryStore):
    """What a reader writes into its entry is read by the next one."""

    def _received(self, stored: StoredEntry, *more: Any) -> Any:
        return self.__dict__.setdefault("given", {}).setdefault(
            stored.entry_id, super()._received(stored, *more)
        )


# -- everything with an end ------------------------------------------------------------------------


@breaks(Mutant, "ALL-1")
class TestCloseLeavesThoseWhoWait(MemoryStore):
    """Who waits when the store is closed goes on waiting."""

    def close(self, timeout: Any = 5.0) -> None:
        self._changed.notify_all = lambda: None  # type: ignore[method-assign]
        super().close(timeout)


@breaks(Mutant, "ALL-1")
class TestAnswersAfterItsEnd(MemoryStore):
    """A store that is closed still says what it holds: nothing."""

    def count_shared(self, key: Any, extra: bytes) -> int:
        return 0 if self._closed else super().count_shared(key, extra)


@breaks(Mutant, "ALL-1")
class TestCannotBeClosedTwice(MemoryStore):
    """The second close fails."""

    def close(self, *args: Any, **given: Any) -> None:
        self._check_open()
        super().close(*args, **given)


@breaks(Mutant, "ALL-2")
class TestTheStoresEndIsNotHeardOf(MemoryRemoteStore):
    """A reaching end does not notice that its store is gone."""

    def _lose(self, reason: str) -> None:
        pass


@breaks(
    Mutant,
    "ALL-4",
    "LOOKUP-4",
    caught_by="test_a_call_that_waits_in_vain_ends_at_its_deadline_and_says_what_for",
)
class TestIgnoresTimeouts(MemoryStore):
    """Who waits for an entry waits for ever."""

    def lease_oldest(self, key: Any, extra: bytes, deadline: Deadline, *given: Any) -> StoredEntry:
        return super().lease_oldest(key, extra, Deadline.after(None), *given)


@breaks(Mutant, "ALL-4")
class TestGivesUpEarly(MemoryStore):
    """Who waits for room waits half as long as it may."""

    def _wait_for_room(self, nbytes: int, deadline: Deadline) -> None:
        left = deadline.remaining()
        super()._wait_for_room(nbytes, Deadline.after(None if left is None else left / 2))


@breaks(Mutant, "ALL-4")
class TestWaitsForAnAnswerForEver(MemoryRemoteStore):
    """A reaching end waits for an answer as long as it takes."""

    def _received(self, stored: StoredEntry, wanted: Any, deadline: Deadline) -> Any:
        return super()._received(stored, wanted, Deadline.after(None))


@breaks(Mutant, "ALL-6")
class TestWorksInAForkedChild(MemoryStore):
    """A forked child goes on with a copy of the store."""

    def _after_fork_in_child(self) -> None:
        self._changed = threading.Condition()


@breaks(Mutant, "ALL-6", caught_by="test_a_forked_child_holds_none_of_the_descriptors")
class TestLeavesAForkedChildItsDescriptor(MemoryRemoteStore):
    """In a forked child its calls raise, and a descriptor stays open."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._opened: int | None = os.open("/dev/null", os.O_RDONLY)

    def _end(self) -> None:
        super()._end()
        opened, self._opened = self._opened, None
        if opened is not None:
            os.close(opened)


@breaks(Mutant, "ALL-7")
class TestLeavesAThread(MemoryRemoteStore):
    """Each reaching end leaves a thread behind."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


_kept: list[Any] = []


@breaks(Mutant, "ALL-7", caught_by="test_ends_that_come_and_go_leave_nothing")
class TestKeepsWhatWasTaken(MemoryStore):
    """Entries that were taken stay in memory."""

    def _remove(self, stored: StoredEntry) -> None:
        _kept.append(stored.rest)
        super()._remove(stored)


@breaks(
    Mutant,
    "ALL-10",
    caught_by="test_whatever_the_other_end_says_each_call_ends_in_time_in_what_was_asked_for",
)
class TestHandsOutAnotherEntry(MemoryRemoteStore):
    """What comes is not compared with what was asked for."""

    def _received(self, stored: StoredEntry, wanted: Any, deadline: Deadline) -> Any:
        return super()._received(stored, bool, deadline)


# -- the control -----------------------------------------------------------------------------------


class TestHasNoFault(Mutant):
    """The lookup buffer "memory" as it is."""

    is_control = True
