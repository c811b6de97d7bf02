"""The calls of a blocking store that belong to one job."""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from kvplug.errors import CapacityError
from kvplug.transport.store.blocking import PageError
from kvplug.transport.store.copy import PageCopy
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.memory import PageRows
from kvplug.transport.store.page_calls import PageCalls
from kvplug.transport.store.results import MissReason, Presence, PutReason
from kvplug.transport.store.store import PageRequest

_log = logging.getLogger(__name__)

AnyJob: TypeAlias = Job[Any]

_UNKNOWN: Final = object()


class Scratch:
    """Memory of one thread for one page, which is used again for the next: fresh memory costs ten times as
    much."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def take(self, nbytes: int) -> memoryview:
        """So many bytes, of any content. What was taken before is void."""
        if len(self._memory) < nbytes:
            self._memory = bytearray(nbytes)
        return memoryview(self._memory)[:nbytes]


class CopyError(Exception):
    """The memory that the caller handed in cannot be used. The store is not to blame."""


class Task(abc.ABC):
    """The calls of one job."""

    def __init__(self, job: AnyJob, num_calls: int, blank: Any) -> None:
        self.job = job
        self.num_calls = num_calls
        self.next_call = 0
        self.num_done = 0
        self.lock = threading.Lock()
        """Held while the job ends and while its results change."""
        self.is_over = False
        self.results: list[Any] = [blank] * job.count
        self._num_copies = 0
        """Copies from or into the caller's memory that are under way."""

    @abc.abstractmethod
    def run(self, call: int, scratch: Scratch) -> None:
        """One call of the blocking store and what belongs to it. May raise whatever that raises."""

    def is_finished(self) -> bool:
        """With the executor's lock: whether all calls have returned."""
        return self.num_done == self.num_calls

    @abc.abstractmethod
    def failed(self, reason: MissReason) -> list[Any]:
        """The results of the job when it ends for this reason: what is known, and a reason for the rest."""

    def note(self, call: int, result: Any) -> None:
        """The result of one call."""
        with self.lock:
            if not self.is_over:
                self.results[call] = result

    def copy(self, move: Callable[[], None]) -> bool:
        """Copy from or into the caller's memory. Returns whether the job was not over before.

        Raises:
            CopyError: the caller's memory cannot be used.
        """
        with self.lock:
            if self.is_over:
                return False
            self._num_copies += 1
        try:
            move()
        except MemoryError:
            raise
        except Exception as e:
            raise CopyError(e) from e
        finally:
            if self._copied():
                self.job.settle()
        return True

    def _copied(self) -> bool:
        """A copy has ended. Returns whether the job settles with it."""
        with self.lock:
            self._num_copies -= 1
            return self.is_over and not self._num_copies

    def end(self, reason: MissReason | None) -> bool:
        """The job is done. Returns whether it was not before. It settles when no copy is under way."""
        with self.lock:
            if self.is_over:
                return False
            self.is_over = True
            results = self.results if reason is None else self.failed(reason)
            settled = not self._num_copies
        self.job.set(results, settled=settled)
        return True


class LookupTask(Task):
    def __init__(self, calls: PageCalls, job: AnyJob, keys: tuple[bytes, ...]) -> None:
        super().__init__(job, 1 if keys else 0, Presence.ABSENT)
        self._calls = calls
        self._keys = keys

    def run(self, call: int, scratch: Scratch) -> None:
        for index, held in enumerate(self._calls.has(self._keys)):
            self.note(index, Presence.HELD if held else Presence.ABSENT)

    def failed(self, reason: MissReason) -> list[Presence]:
        return self.results


class GetTask(Task):
    job: GetJob

    def __init__(self, calls: PageCalls, seal: PageSeal, job: GetJob, pages: PageRequest) -> None:
        super().__init__(job, job.count, _UNKNOWN)
        self._calls = calls
        self._seal = seal
        self._pages = pages
        self._copying: PageCopy | None = None

    def run(self, call: int, scratch: Scratch) -> None:
        pages, seal = self._pages, self._seal
        series, key, identity = pages.series, pages.keys[call], pages.identities[call]
        header_length = seal.header_length(series.format, identity)
        whole = scratch.take(series.format.nbytes + header_length)
        # the payload comes first, where memory is aligned as its elements are
        payload, header = whole[: series.format.nbytes], whole[series.format.nbytes :]
        try:
            length = self._calls.read(key, (header, payload))
        except PageError as e:
            _log.debug("a page is missed: %s", e)
            self.note(call, e.reason)
            return
        if length is None:
            reason: MissReason | None = MissReason.ABSENT
        elif length != len(whole):
            header = header[: min(length, header_length)]
            reason = seal.check_header(series, identity, header) or MissReason.CORRUPT
        else:
            reason = seal.check_header(series, identity, header) or seal.check_proof(header, payload)
        if reason is None:
            checks: list[MissReason | None] = []
            if not self.copy(lambda: checks.append(self._loaded(call, header, payload))):
                return
            (reason,) = checks
        if reason is not None and reason is not MissReason.ABSENT:
            self._discard(key, reason, len(whole))
        self.note(call, reason)
        self.job.advance()

    def _loaded(self, call: int, header: memoryview, payload: memoryview) -> MissReason | None:
        if self._copying is None:
            self._copying = PageCopy(self._pages.memory, self._seal)
        self._copying.use(call, PageRows.dense(payload, 1, len(payload)), (header,))
        found = self._copying.load(range(call, call + 1))
        return None if found is None else found[0]

    def _discard(self, key: bytes, reason: MissReason, nbytes: int) -> None:
        """Make room under the key: as long as a wrong page is there, a right one would not be kept.

        A key is a hash over the format and all tokens, so another format or identity under it is an accident
        as well, for example a changed bit in the header.
        """
        is_removed = self._calls.remove((key,))[0]
        if not is_removed:
            self._calls.is_unreadable(key, nbytes)
        what = "is removed" if is_removed else "stays, and is not promised again"
        _log.warning("a store returned a wrong page (%s), which %s", reason, what)

    def failed(self, reason: MissReason) -> list[MissReason | None]:
        return [reason if each is _UNKNOWN else each for each in self.results]


class PutTask(Task):
    def __init__(self, calls: PageCalls, seal: PageSeal, job: AnyJob, pages: PageRequest) -> None:
        super().__init__(job, job.count, _UNKNOWN)
        self._calls = calls
        self._seal = seal
        self._pages = pages
        self._copying: PageCopy | None = None
        self._forgotten: set[int] = set()
        """Calls whose pages were removed before they were written."""
        self._writing: dict[int, list[RemoveTask]] = {}
        """Calls that are writing, with the removals of their page since then."""

    def run(self, call: int, scratch: Scratch) -> None:
        pages, series = self._pages, self._pages.series
        payload = scratch.take(series.format.nbytes)
        checksums: list[bytes | None] = []
        if not self.copy(lambda: checksums.append(self._saved(call, payload))):
            return
        header = self._seal.header(series, pages.identities[call], payload, checksums[0])
        with self.lock:
            forgotten = call in self._forgotten
            if not forgotten:
                self._writing[call] = []
        if forgotten:
            self.note(call, PutReason.CANCELLED)
            return
        has_failed, result = True, None
        try:
            kept = self._calls.write(pages.keys[call], (memoryview(header), payload))
            has_failed, result = False, None if kept else PutReason.NO_ROOM
        except CapacityError:
            has_failed, result = False, PutReason.TOO_LARGE
        except PermissionError:
            has_failed, result = False, PutReason.READ_ONLY
        except PageError as e:
            _log.debug("a page is not kept: %s", e)
            has_failed, result = False, PutReason.of(e.reason)
        finally:  # a write that failed gets the reason of the whole request
            with self.lock:
                removals = self._writing.pop(call)
            if removals or not has_failed:
                self.note(call, PutReason.CANCELLED if removals else result)
            self._undo(pages.keys[call], removals)

    def _saved(self, call: int, payload: memoryview) -> bytes | None:
        if self._copying is None:
            self._copying = PageCopy(self._pages.memory, self._seal)
        self._copying.use(call, PageRows.dense(payload, 1, len(payload)))
        return self._copying.save(range(call, call + 1))[0]

    def _undo(self, key: bytes, removals: Sequence[RemoveTask]) -> None:
        """The page was removed while it was written: remove it now."""
        if not removals:
            return
        reason: MissReason | None = MissReason.STORE_GONE
        try:
            if self._calls.remove((key,))[0]:
                reason = None
        finally:
            for removal in removals:
                removal.undone(removal, reason)

    def forget(self, removal: RemoveTask) -> None:
        """With the executor's lock: do not write pages that are being removed, and undo what is written."""
        with self.lock:
            for call, key in enumerate(self._pages.keys):
                if not removal.concerns(key):
                    continue
                if call in self._writing:
                    self._writing[call].append(removal)
                    removal.num_under_way += 1
                elif self.results[call] is _UNKNOWN:
                    self._forgotten.add(call)

    def failed(self, reason: MissReason) -> list[PutReason | None]:
        known = PutReason.of(reason)
        return [known if each is _UNKNOWN else each for each in self.results]


class RemoveTask(Task):
    def __init__(
        self,
        calls: PageCalls,
        job: AnyJob,
        keys: tuple[bytes, ...] | None,
        undone: Callable[[RemoveTask, MissReason | None], None],
    ) -> None:
        super().__init__(job, 1 if job.count else 0, False)
        self._calls = calls
        self._keys = keys
        self._known = frozenset(keys or ())
        self.undone = undone
        self.num_under_way = 0
        """Writes of these pages that had begun before, and must be undone."""

    def concerns(self, key: bytes) -> bool:
        return self._keys is None or key in self._known

    def is_finished(self) -> bool:
        return super().is_finished() and not self.num_under_way

    def run(self, call: int, scratch: Scratch) -> None:
        results = [self._calls.clear()] if self._keys is None else self._calls.remove(self._keys)
        with self.lock:
            self.results = results

    def failed(self, reason: MissReason) -> list[bool]:
        return [False] * self.job.count


class TouchTask(Task):
    def __init__(self, calls: PageCalls, job: AnyJob, keys: tuple[bytes, ...]) -> None:
        super().__init__(job, 1 if keys else 0, None)
        self._calls = calls
        self._keys = keys

    def run(self, call: int, scratch: Scratch) -> None:
        self._calls.touch(self._keys)

    def failed(self, reason: MissReason) -> list[Any]:
        return []
