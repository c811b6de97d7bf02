"""The store "memory" with one fault each, and the laws that the fault breaks."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline
from kvplug.transport.store import executor
from kvplug.transport.store.copy import PageCopy
from kvplug.transport.store.events import PageEvent
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.memory import PageRows
from kvplug.transport.store.results import MissReason, Presence, Usage
from kvplug_host.client.client import HostClient
from kvplug_host.store import HostStore
from kvplug_lab.mutants import breaks
from kvplug_testing import StoreContract
from kvplug_testing.memory.store import MemoryStore, PagePlace


class Mutant(StoreContract):
    """One fault, of ``made``, its ``place_`` or its ``seal``. ``breaks`` are the broken laws."""

    store = "memory"
    reached_by = "options"
    across_processes = False
    use_granularity_s = 0.0
    parts = ("made", "place_", "seal")
    made: type[MemoryStore] = MemoryStore
    place_: type[PagePlace] = PagePlace
    seal: type[PageSeal] = PageSeal

    def make_store(self, context: Any) -> Any:
        made = type("Made", (self.made,), {"place_type": self.place_})(context)
        made.seal = self.seal(checksums=context.seal.checksums, secret=context.seal.secret)
        return made


# -- what is got -----------------------------------------------------------------------------------


class TestLeavesWrongBytes(Mutant):
    """A page is copied and then verified, and stays in the caller's memory also if it is wrong."""

    breaks = ("STORE-1",)

    def make_store(self, context: Any) -> Any:
        class Hasty(PageCopy):
            def use(self, first: int, rows: PageRows, *more: Any) -> None:
                super().use(first, rows, *more)
                self.latest = rows

            def load(self, pages: range, *more: Any) -> list[MissReason | None] | None:
                reasons = super().load(pages, *more)
                if any(reasons or ()):
                    copy = PageCopy(self._memory)
                    copy.use(pages.start, self.latest)
                    copy.load(pages)
                return reasons

        patch = mock.patch.object(executor, "PageCopy", Hasty)
        patch.start()
        self.later(patch.stop)
        return super().make_store(context)


@breaks(Mutant, "STORE-1")
class TestComparesNoIdentity(PageSeal):
    """Tokens are not compared after the key was found."""

    def check_header(self, *args: Any) -> Any:
        found = super().check_header(*args)
        return None if found is MissReason.IDENTITY else found


@breaks(Mutant, "STORE-1")
class TestComparesNoFormat(PageSeal):
    """A page of another format with as many bytes is taken."""

    def check_header(self, *args: Any) -> Any:
        found = super().check_header(*args)
        return None if found is MissReason.FORMAT else found


@breaks(Mutant, "STORE-1")
class TestHasOneReason(PageSeal):
    """Every miss is "absent"."""

    def check_header(self, *args: Any) -> Any:
        return super().check_header(*args) and MissReason.ABSENT


@breaks(Mutant, "STORE-1")
class TestKeepsTheCallersMemory(PagePlace):
    """A page is not copied, so that what is written to the memory later comes out."""

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        kept = super().write(key, page)
        with self.lock:
            header, payload = page
            if len(payload) > 2000 and key in self.pages:
                self.pages[key] = _Joined(bytes(header), payload)  # type: ignore[assignment]
        return kept


class _Joined:
    """A page that lies in two places."""

    def __init__(self, header: bytes, payload: memoryview) -> None:
        self._parts = header, payload

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, part: Any) -> Any:
        return b"".join(self._parts)[part]


@breaks(Mutant, "STORE-1")
class TestMixesPagesUp(MemoryStore):
    """The pages of a request come in each other's places, if their keys allow it."""

    def _get(self, pages: Any, timeout: Any) -> GetJob:
        job = super()._get(pages, timeout)
        rows = pages.memory.rows()
        results = job.wait(20)
        if rows is not None and len(rows) > 1 and results[:2] == [None, None]:
            first, second = bytes(rows.row(0)), bytes(rows.row(1))
            rows.row(0)[:], rows.row(1)[:] = second, first
        return job


# -- whole or not at all ---------------------------------------------------------------------------


@breaks(Mutant, "STORE-2")
class TestTheLastPutWins(PagePlace):
    """A later put replaces the page."""

    def keep(self, key: bytes, page: bytes) -> bool:
        with self.lock:
            self._drop([key], PageEvent.Removal.REMOVED)
            return super().keep(key, page)


@breaks(Mutant, "STORE-2")
class TestMixesWriters(PagePlace):
    """Of two writers of a page, the first half of one and the second half of the other are kept."""

    def keep(self, key: bytes, page: bytes) -> bool:
        with self.lock:
            there = self.pages.get(key)
            if there is not None and len(there) == len(page):
                half = len(page) // 2
                self.pages[key] = there[:half] + page[half:]
            return super().keep(key, page)


# -- time ------------------------------------------------------------------------------------------


@breaks(Mutant, "STORE-3", "ALL-4")
class TestHasNoDeadlines(MemoryStore):
    """Jobs end when they are done."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        at = self._jobs.at
        self._jobs.at = lambda when, call: at(math.inf, call)  # type: ignore[method-assign]


@breaks(Mutant, "ALL-4")
class TestKeepsItsOwnTimeout(MemoryStore):
    """The timeout of the context is not used."""

    def _deadline(self, timeout: Any) -> Deadline:
        return Deadline.after(timeout, 60.0)


@breaks(Mutant, "STORE-3")
class TestSettlesDuringACopy(MemoryStore):
    """A job that has ended is settled, whatever is still being copied."""

    def _get(self, pages: Any, timeout: Any) -> Any:
        job = super()._get(pages, timeout)
        job.add_done_callback(lambda job: job.settle())
        return job


class TestCopiesAfterTheEnd(Mutant):
    """A page that comes too late is copied to the caller all the same."""

    breaks = ("STORE-3",)

    class place_(PagePlace):  # noqa: N801
        into: Any = None
        late: Any = None

        def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
            length = super().read(key, into)
            if self.late is not None and into and self.late.done:
                rows = self.into.rows()
                if rows is not None:
                    rows.row(0)[:1] = b"!"
            return length

    class made(MemoryStore):  # noqa: N801
        def _get(self, pages: Any, timeout: Any) -> Any:
            job = super()._get(pages, timeout)
            place: Any = self.place
            if place.late is None:
                place.into, place.late = pages.memory, job
            return job


@breaks(Mutant, "STORE-3")
class TestMakesNoProgress(MemoryStore):
    """Progress is not reported before all pages have arrived."""

    def _get(self, pages: Any, timeout: Any) -> Any:
        inner = super()._get(pages, timeout)
        job = GetJob(inner.count, pages.series.format.num_layers, inner.deadline)
        inner.add_done_callback(lambda ended: job.set(ended.results() or []))
        job.on_cancel(inner.cancel)
        return job


# -- tenants ---------------------------------------------------------------------------------------


@breaks(Mutant, "STORE-4")
class TestVerifiesNoProof(PageSeal):
    """A page that was made without the secret is taken."""

    def check_proof(self, *args: Any) -> None:
        return None


@breaks(Mutant, "STORE-4")
class TestProvesTheBytesOnly(PageSeal):
    """The proof does not bind a page to its key."""

    def check_header(self, *args: Any) -> Any:
        found = super().check_header(*args)
        return None if found is MissReason.IDENTITY else found


# -- leases ----------------------------------------------------------------------------------------


@breaks(Mutant, "STORE-5")
class TestEvictsLeasedPages(PagePlace):
    """Leases are granted, and not looked at."""

    def _make_room(self, nbytes: int) -> bool:
        self._leases.clear()
        return super()._make_room(nbytes)


@breaks(Mutant, "STORE-5")
class TestLeasesDoNotExpire(PagePlace):
    """A lease ends only when it is released."""

    def lookup(self, end: Any, keys: Sequence[bytes], lease_s: float) -> list[Presence]:
        return super().lookup(end, keys, 1e6 if lease_s else 0.0)


@breaks(Mutant, "STORE-5")
class TestReleasesLeasesOfOthers(PagePlace):
    """A release ends every lease on the page."""

    def release(self, end: Any, keys: Sequence[bytes]) -> None:
        for other in self.ends:
            super().release(other, keys)


class TestReadsInPlaceWithoutGenerations(Mutant):
    """A page is verified where it lies and then copied from there, whatever is written there meanwhile."""

    breaks = ("STORE-5",)

    class place_(PagePlace):  # noqa: N801
        slots: dict[bytes, bytearray]

        def keep(self, key: bytes, page: bytes) -> bool:
            with self.lock:
                slots = self.__dict__.setdefault("slots", {})
                before = set(self.pages)
                kept = super().keep(key, page)
                free = [slots.pop(gone) for gone in before - set(self.pages) if gone in slots]
                for slot in free:  # memory that is used again
                    slot[:] = page[: len(slot)].ljust(len(slot), b"\0")
                slots.setdefault(key, free[0] if free and len(free[0]) == len(page) else bytearray(page))
                return kept

    class made(MemoryStore):  # noqa: N801
        def _get(self, pages: Any, timeout: Any) -> Any:
            slots = getattr(self.place, "slots", {})
            if not all(key in slots for key in pages.keys) or pages.memory.rows() is not None:
                return super()._get(pages, timeout)
            job = GetJob(len(pages.keys), pages.series.format.num_layers, Deadline.after(None))
            found = [slots[key] for key in pages.keys]

            def work() -> None:
                for index, page in enumerate(found):
                    whole = memoryview(page)[len(page) - pages.series.format.nbytes :]
                    copy = PageCopy(pages.memory)
                    copy.use(index, PageRows.dense(whole, 1, len(whole)))
                    copy.load(range(index, index + 1))
                job.set([None] * job.count)

            threading.Thread(target=work, daemon=True).start()
            return job


# -- the budget ------------------------------------------------------------------------------------


@breaks(Mutant, "STORE-6")
class TestExceedsTheBudget(PagePlace):
    """Pages are not evicted."""

    def _make_room(self, nbytes: int) -> bool:
        return True


@breaks(Mutant, "STORE-6")
class TestDoesNotCountHeaders(PagePlace):
    """Only the bytes of pages count."""

    def usage(self) -> Usage:
        usage = super().usage()
        return Usage(num_pages=usage.num_pages, used_bytes=usage.num_pages, budget_bytes=usage.budget_bytes)


@breaks(Mutant, "STORE-6")
class TestTouchesNothing(MemoryStore):
    """Only reading counts as a use."""

    def touch(self, keys: Sequence[bytes]) -> None:
        return None


@breaks(Mutant, "STORE-6")
class TestWhatIsTooLargeFindsNoRoom(PagePlace):
    """A page that can never be kept has the reason of one that cannot be kept now."""

    def keep(self, key: bytes, page: bytes) -> bool:
        return len(page) <= self.budget_bytes and super().keep(key, page)


_kept: list[Any] = []


@breaks(Mutant, "STORE-6", "ALL-7")
class TestKeepsWhatWasEvicted(PagePlace):
    """Evicted pages stay in memory."""

    def _drop(self, keys: Any, reason: PageEvent.Removal) -> None:
        keys = list(keys)
        _kept.extend(self.pages.get(key) for key in keys)
        super()._drop(keys, reason)


# -- gone ------------------------------------------------------------------------------------------


@breaks(Mutant, "STORE-7")
class TestIsNotTriedAgain(MemoryStore):
    """A store that has failed once is left alone for ever."""

    def note_call(self, reason: Any, error: Any, began: float) -> None:
        super().note_call(reason, error, began)
        if self._retry_at:
            self._retry_at = time.monotonic() + 1000


class TestRaisesWhatItsLibraryRaises(Mutant):
    """The errors of a lost store reach the caller."""

    breaks = ("STORE-7",)
    raises = (ConnectionError,)

    class made(MemoryStore):  # noqa: N801
        def _get(self, pages: Any, timeout: Any) -> Any:
            if pages.keys:
                self._store.read(pages.keys[0], ())
            return super()._get(pages, timeout)


@breaks(Mutant, "STORE-1")
class TestPromisesWhatIsNotThere(MemoryStore):
    """A lookup answers from an index from which lost pages are not removed."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._promised: set[bytes] = set()

    def _put(self, pages: Any, timeout: Any) -> Any:
        self._promised.update(pages.keys)
        return super()._put(pages, timeout)

    def _lookup(self, keys: Any, *given: Any) -> Any:
        job: Job[Presence] = Job(len(keys), self._deadline(DEFAULT_TIMEOUT))
        job.set([Presence.HELD if key in self._promised else Presence.ABSENT for key in keys])
        return job


# -- declared pages --------------------------------------------------------------------------------


@breaks(Mutant, "STORE-8")
class TestDeclaredPagesDoNotExpire(PagePlace):
    """A declared page is coming until it is put."""

    def declare(self, end: Any, series: bytes, keys: Sequence[bytes], for_s: float) -> None:
        super().declare(end, series, keys, for_s + 100)


@breaks(Mutant, "STORE-8")
class TestCannotGiveUpDeclaredPages(PagePlace):
    """A declared page that is given up is waited for until its time is over."""

    def withdraw(self, end: Any, keys: Sequence[bytes]) -> None:
        return None


@breaks(Mutant, "STORE-8")
class TestExpectsPagesOfClosedEnds(PagePlace):
    """What an end has declared outlives it."""

    def leave(self, end: Any) -> None:
        with self.lock:
            declared, self._declared = self._declared, {}
            super().leave(end)
            self._declared = declared


# -- forgetting ------------------------------------------------------------------------------------


@breaks(Mutant, "STORE-9")
class TestAPutBringsBackWhatWasRemoved(MemoryStore):
    """Puts that had begun go on after a removal."""

    def submit_remove(self, keys: Any, *, timeout: Any = DEFAULT_TIMEOUT) -> Any:
        job: Job[bool] = Job(1 if keys is None else len(keys), self._deadline(timeout))
        self._jobs.check_open()
        if keys is None:
            self.place.clear()
        else:
            self.place.remove(keys)
        job.set([True] * job.count)
        return job


@breaks(Mutant, "STORE-9")
class TestForgetsMoreThanItIsAsked(PagePlace):
    """A removal removes every page."""

    def remove(self, keys: Sequence[bytes]) -> None:
        super().remove(list(self.pages))


# -- what is there ---------------------------------------------------------------------------------


@breaks(Mutant, "STORE-10")
class TestCountsPutsAsPages(PagePlace):
    """A page that is put again is counted again."""

    count = 0

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        self.count += 1
        return super().write(key, page)

    def usage(self) -> Usage:
        usage = super().usage()
        return Usage(num_pages=self.count, used_bytes=usage.used_bytes, budget_bytes=None)


class Silent(PagePlace):
    """Events of some kinds are not published."""

    leaves_out: Callable[[Any], bool] = lambda self, event: False

    def _publish(self, event: Any) -> None:
        if not self.leaves_out(event):
            super()._publish(event)


@breaks(Mutant, "STORE-10")
class TestTellsOfNoDeclaredPages(Silent):
    """Listeners get no events of declared pages."""

    leaves_out = lambda self, event: hasattr(event, "for_s")  # noqa: E731


@breaks(Mutant, "STORE-10")
class TestASnapshotComesLate(PagePlace):
    """A listener is entered first, and gets its snapshot when it likes to come."""

    def subscribe(self, listener: Any) -> Callable[[], None]:
        self._listeners.append(listener)
        time.sleep(0.002)
        end = super().subscribe(listener)
        self._listeners.remove(listener)
        return end


@breaks(Mutant, "STORE-10")
class TestASubscriptionDoesNotEnd(PagePlace):
    """A listener is called for ever."""

    def subscribe(self, listener: Any) -> Callable[[], None]:
        super().subscribe(listener)
        return lambda: None


@breaks(Mutant, "STORE-10")
class TestAllLivesHaveOneEpoch(PagePlace):
    """A restart of the store does not show."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self._log = PageEvent.Log("the only one")


# -- everything with an end ------------------------------------------------------------------------


@breaks(Mutant, "ALL-1")
class TestAnswersAfterItsEnd(MemoryStore):
    """An end that was closed answers lookups."""

    def _lookup(self, keys: Any, *given: Any) -> Any:
        job: Job[Presence] = Job(len(keys), Deadline.after(None))
        job.set(self.place.lookup(self, keys, 0.0))
        return job


@breaks(Mutant, "ALL-1")
class TestClosingDropsPuts(MemoryStore):
    """``close`` ends puts that had begun."""

    def close(self, timeout: Any = DEFAULT_TIMEOUT) -> None:
        self.abort()


@breaks(Mutant, "ALL-1", "ALL-4")
class TestClosingWaitsForPutsForEver(MemoryStore):
    """The timeout of ``close`` is not used."""

    def close(self, timeout: Any = DEFAULT_TIMEOUT) -> None:
        super().close(None)


@breaks(Mutant, "ALL-1", "ALL-5")
class TestAbortingLeavesJobs(MemoryStore):
    """Jobs that were under way never end."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        begin = self._jobs.begin

        def keep(task: Any) -> bool:
            end = task.end
            task.end = lambda reason: reason is not MissReason.CLOSED and end(reason)
            return begin(task)

        self._jobs.begin = keep  # type: ignore[method-assign]


@breaks(Mutant, "ALL-1")
class TestAnEndTakesItsPlaceWithIt(PagePlace):
    """The pages go when the first of several ends is closed."""

    def leave(self, end: Any) -> None:
        super().leave(end)
        self.clear()


@breaks(Mutant, "ALL-6")
class TestWorksInAForkedChild(MemoryStore):
    """A forked child goes on with a copy of the store."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._jobs._after_fork_in_child = lambda: None  # type: ignore[method-assign]


@breaks(Mutant, "ALL-6")
class TestAForkedChildHoldsItsDescriptor(MemoryStore):
    """A descriptor of the store is open in a forked child."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._fd = os.dup(0)

    def _abort(self) -> None:
        super()._abort()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


# -- ends that reach a store by a link -------------------------------------------------------------


class LinkMutant(StoreContract):
    """One fault of the store "host": of ``made``, which serves, or of ``client``, which reaches it."""

    store = "host"
    parts = ("made", "client")
    made: type[HostStore] = HostStore
    client: type[HostClient] = HostClient

    def make_store(self, context: Any) -> Any:
        return self.made(context)

    def make_client(self, context: Any, link: Any) -> Any:
        return self.client(context, link)


@breaks(LinkMutant, "STORE-6")
class TestForgetsThatAReaderIsExpected(HostStore):
    """Pages that another end is to read go like all others."""

    def expect_reader(self, keys: Sequence[bytes]) -> None:
        return None


@breaks(LinkMutant, "STORE-7", "ALL-2")
class TestDoesNotKnowThatItsStoreIsGone(HostClient):
    """An end whose store is gone for good is tried for ever."""

    @property
    def is_lost(self) -> bool:
        return self._jobs.is_closing


@breaks(LinkMutant, "STORE-7")
class TestTakesAStoppedStoreForDead(HostClient):
    """A store that does not answer for a moment counts as gone for good."""

    def _ended(self, task: Any, requests: Any) -> None:
        super()._ended(task, requests)
        if task.job.deadline.expired and self._connection is not None:
            self._connection.lose()


@breaks(LinkMutant, "ALL-10")
class TestWaitsForAnswersForEver(HostClient):
    """An answer that does not come is waited for."""

    def _deadline(self, timeout: Any) -> Deadline:
        return Deadline.after(600.0)


# -- the controls ----------------------------------------------------------------------------------


class TestHasNoFault(Mutant):
    """The store "memory" as it is."""

    is_control = True


class TestHasNoFaultByALink(LinkMutant):
    """The store "host", and ends that reach it by a link."""

    is_control = True


# -- the end of the program ------------------------------------------------------------------------


@breaks(LinkMutant, "ALL-8")
class TestKeepsTheProgramFromLeaving(HostStore):
    """When the program leaves, a thread of the store is waited for, and it does not end."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        threading.Thread(target=threading.Event().wait, args=(60.0,), name="mutant").start()
