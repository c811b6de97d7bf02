"""Pages out of the memory of a store in another process, which is mapped here."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final

from kvplug.transport import GetJob, JobTask, MissReason, PageCopy, PageRequest, PageSeal
from kvplug_host import protocol
from kvplug_host.arena.segments import WORD
from kvplug_host.client.connection import Connection
from kvplug_host.client.mapping import Mapping
from kvplug_host.jobs import SlotGet

_READ_LEASE_S: Final = 30.0
"""The longest that pages are kept in their slots for a reader that does not report its end."""


class MappedGet(SlotGet):
    """One request: the store answers where the pages are, and they are copied out of its memory."""

    def __init__(
        self,
        job: GetJob,
        pages: PageRequest,
        seal: PageSeal,
        *,
        connection: Connection,
        mapping: Mapping,
        again: Callable[[JobTask], object],
    ) -> None:
        """``again``: has the steps of this task run."""
        super().__init__(job, pages, seal, again)
        self._mapping = mapping
        self._connection = connection
        self._requests = connection.requests
        self._number = self._requests.new_number()
        self._is_read = False
        """No slot is read any more."""

    def discard(self, index: int, reason: MissReason) -> None:
        self._connection.note_wrong(self.pages.keys[index], reason, self._slots[index].generation)

    def settled(self) -> None:
        self._is_read = True
        if self.job.done:
            self._notify_done()

    def _notify_done(self) -> None:
        is_read = None in (self.job.results() or ())
        self._requests.notify(protocol.Done(id=self._number, read=is_read))

    def end(self, reason: MissReason | None) -> bool:
        is_first = super().end(reason)
        if is_first and self._is_read:  # the caller is woken first; the store is notified twice at worst
            self._notify_done()
        return is_first

    def request_places(self) -> None:
        """Request the places of the pages."""
        remaining = self.job.deadline.remaining()
        lease_s = _READ_LEASE_S if remaining is None else min(_READ_LEASE_S, remaining)
        if lease_s <= 0:
            self.end(MissReason.TIMEOUT)
            return
        read = protocol.Read(
            id=self._number,
            keys=b"".join(self.pages.keys),
            lease_s=lease_s,
            traceparent=self.pages.traceparent,
        )
        self._requests.query(read, self, self._answered)
        if self.job.done:  # it may have ended before the request was sent
            self._notify_done()

    def _answered(self, answer: protocol.Places) -> None:
        mapping = self._mapping
        places = protocol.places_in(answer.places, self.job.count, len(mapping.view))
        words = array(
            "Q", [(place.offset + place.slot_bytes) // WORD - 1 if place else 0 for place in places]
        )
        generations = array("Q", [place.generation if place else 0 for place in places])
        self.found(mapping.view, places, PageCopy.Generations(mapping.words, words, generations))
        if any(places):
            self._again(self)
        else:
            self.end(None)
