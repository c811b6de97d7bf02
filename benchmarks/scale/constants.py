"""What one engine, link, event and lookup cost: measured by ``measure.py``, used by the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

FILE = Path(__file__).parent / "constants.json"


@attrs.frozen(kw_only=True)
class Link:
    """What one more link takes at one end of it."""

    threads: float
    descriptors: float
    memory_bytes: float
    """Resident."""


@attrs.frozen(kw_only=True)
class PerEvent:
    """Seconds of processor time, or bytes, of one event, and of each page that it names."""

    event: float
    page: float

    def of(self, events: float, pages: float) -> float:
        """For so many events that name so many pages in total."""
        return self.event * events + self.page * pages


@attrs.frozen(kw_only=True)
class Constants:
    """Measured with real processes on one host, over TCP on loopback."""

    where: str
    """Date, machine and versions, for people."""
    index_page_bytes: float
    """Of a scheduler's memory for each page in a replica."""
    follow: PerEvent
    """Seconds: a scheduler receives, decodes and applies an event."""
    publish: PerEvent
    """Seconds: a worker sends an event to one follower."""
    follow_busy: PerEvent
    """As ``follow``, at a rate that keeps a core busy: with fewer wake-ups, so what a core can do at most."""
    publish_busy: PerEvent
    """The same of ``publish``."""
    wire: PerEvent
    """Bytes of an event on one link, without TCP's own."""
    stored_pages: float
    """Pages of 2 MiB in an event that says that they are stored: a put of more makes several."""
    removed_per_put: float
    """Events of evicted pages for each put into a store that is full."""
    fence_engine_s: float
    """Of the engine's thread for each replica and request: a ping, and the question about the prompt."""
    fence_scheduler_s: float
    """Processor time of the scheduler's process for each replica and request, that of the engine's thread
    too."""
    fence_worker_s: float
    """Of the process that answers it."""
    fence_bytes: float
    """Ping and pong."""
    fence_wait_s: float
    """For each replica: the time until the last of many stores has answered, by the number of stores."""
    link_of_scheduler: Link
    """It follows a store."""
    link_to_follower: Link
    """Of a worker: it serves a follower."""
    link_to_store: Link
    """Of a worker: it loads from a peer."""
    link_to_loader: Link
    """Of a worker: a peer loads from it."""
    dial_s: float
    """Processor time of a link's two ends, added up, until both have agreed and it is followed."""
    lookup_pages: int
    """Pages in a prompt that the shared store was asked about."""
    lookup_s: float
    """Round trip of that lookup, alone."""
    lookup_store_s: float
    """Processor time of the store's process for it."""
    put_store_s: PerEvent
    """Of the same process, for a put of pages over a pipe: for the put, and for each page of 2 MiB."""
    get_store_s: float
    """Of the same process, for each page of 2 MiB that it sends over a pipe."""
    link_to_client: Link
    """Of the store's process."""
    load_bytes_per_s: dict[str, float]
    """Pages of 2 MiB, 32 at once: "mapped", "shm", and "cpu" (sockets), verified."""
    router: PerEvent
    """Seconds: a router decodes the published form of an event."""
    router_wire: PerEvent
    """Bytes of that form."""
    member_bytes: float
    """Of one engine's record in a list of members."""

    @classmethod
    def load(cls, file: Path = FILE) -> Constants:
        """Those that were measured."""
        plain: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        kinds = {"PerEvent": PerEvent, "Link": Link}
        for field in attrs.fields(cls):
            if str(field.type) in kinds:
                plain[field.name] = kinds[str(field.type)](**plain[field.name])
        return cls(**plain)

    def save(self, file: Path = FILE) -> None:
        """Write them down."""
        file.write_text(json.dumps(attrs.asdict(self), indent=1) + "\n", encoding="utf-8")
