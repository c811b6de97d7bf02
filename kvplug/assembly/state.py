"""What one process does now: its links, pipes, stores, requests and counters.

`kvplug top` asks for it. Nothing is recorded for it, and no answer waits for another process.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug.errors import KvplugError
from kvplug.metrics.record import PipeRecorder
from kvplug.metrics.stats import TransferStats
from kvplug.net.peer_text import peer_texts
from kvplug.net.wire import encode, to_plain

if TYPE_CHECKING:
    from kvplug.assembly.links import ControlLink
    from kvplug.engine.connector.scheduler import SchedulerConnector
    from kvplug.engine.connector.worker import WorkerConnector
    from kvplug.transport.pipe import Pipe
    from kvplug.transport.store.store import Store

_log = logging.getLogger(__name__)

_MAX_CHARACTERS: Final = 200
_MAX_THINGS: Final = 64
"""The most links, pipes, stores, and elements of a connector's list in one answer. The latest are kept."""


@attrs.frozen(kw_only=True)
class LinkState:
    """An open control channel to another process."""

    peer: str
    address: str
    """The address that the dialling end dialled."""
    engine_id: str
    """That of the peer."""
    purpose: str
    seconds: float
    """Its age."""

    @classmethod
    def of(cls, link: ControlLink) -> LinkState | None:
        """Return its state; ``None`` if it is closed."""
        if link.closed:
            return None
        channel = link.channel
        return cls(
            peer=str(channel.peer),
            address=channel.address,
            engine_id=link.agreement.remote.engine_id,
            purpose=link.agreement.purpose,
            seconds=time.monotonic() - channel.since,
        )


@attrs.frozen(kw_only=True)
class PipeState:
    """An open pipe. Rates are in 10^9 bytes per second."""

    transport: str
    device: str
    peer: str
    route: str
    sent_bytes: int
    received_bytes: int
    gb_per_s: float | None
    """The latest rate at which this process sent to the peer; ``None``: not measured."""
    claimed_gb_per_s: float | None
    """The rate that the transport claims; ``None``: it claims none, or rates are not compared."""

    @classmethod
    def of(cls, pipe: Pipe, transport: str, device: str) -> PipeState | None:
        """Return its state; ``None`` if it is closed. Its recorder must be set."""
        recorder = pipe.recorder
        if pipe.closed or not isinstance(recorder, PipeRecorder):
            return None
        rate = None if recorder.watch is None else recorder.watch.rate
        return cls(
            transport=transport,
            device=device,
            peer=pipe.peer,
            route=pipe.route,
            sent_bytes=recorder.sent_bytes,
            received_bytes=recorder.received_bytes,
            gb_per_s=None if rate is None else rate.latest_gb_per_s,
            claimed_gb_per_s=None if rate is None else rate.claimed_gb_per_s,
        )


@attrs.frozen(kw_only=True)
class StoreState:
    """An open store, as far as this process knows it."""

    name: str
    medium: str
    num_pages: int
    used_bytes: int
    """Bytes of the pages, their headers, and the gaps between them."""
    budget_bytes: int | None
    """``None`` if the store has no limit of its own."""
    num_clients: int | None = None
    """The number of programs that use it now; ``None`` if this process does not serve it."""

    @classmethod
    def of(cls, store: Store, name: str, num_clients: int | None = None) -> StoreState:
        """Return its state."""
        usage = store.usage()  # does not wait
        return cls(
            name=name,
            medium=store.medium,
            num_pages=usage.num_pages,
            used_bytes=usage.used_bytes,
            budget_bytes=usage.budget_bytes,
            num_clients=num_clients,
        )


@attrs.frozen(kw_only=True)
class SideState:
    """One side of a connector, or the server of a store (its ``side`` is ``"store"``)."""

    connector: str = ""
    side: str = ""
    role: str = ""
    rank: str = ""
    engine_id: str = ""
    pid: int = 0
    seconds: float = 0.0
    """Its age."""
    links: tuple[LinkState, ...] = ()
    num_links: int = 0
    """The number of all links. An answer describes the latest ones only; so for pipes."""
    pipes: tuple[PipeState, ...] = ()
    num_pipes: int = 0
    stores: tuple[StoreState, ...] = ()
    status: Mapping[str, Any] = attrs.field(factory=dict)
    """What the connector's ``get_status`` returned, and the length of each list in it, such as ``num_loads``
    for ``loads``: an answer has a part of a long list only."""
    stats: Mapping[str, Any] = attrs.field(factory=dict)
    """A snapshot of the counters, without samples."""


class ProcessState:
    """Reads the state of one side of a connector, or of a store's server.

    It keeps weak references to what was opened. Any thread may call it.
    """

    def __init__(self, stats: TransferStats, labels: Mapping[str, str] | None = None) -> None:
        """``labels``: name the process, as those of its metrics do."""
        self._stats = stats
        self.labels = labels or {}
        self._began = time.monotonic()
        self._numbers = itertools.count()
        self._things: dict[int, tuple[weakref.ref[Any], Callable[[Any], Any]]] = {}
        """What was opened, oldest first, and what reads its state."""

    def add(self, thing: Any, read: Callable[[Any], Any]) -> None:
        """Include a link, pipe, store or connector until it is closed.

        ``read`` returns its state, or ``None`` if it is closed. It must not refer to it.
        """
        number, things = next(self._numbers), self._things
        things[number] = weakref.ref(thing, lambda _: things.pop(number, None)), read

    def plain(self) -> dict[str, Any]:
        """Return a :class:`SideState` as plain values."""
        things = [
            _try(read, thing) for ref, read in list(self._things.values()) if (thing := ref()) is not None
        ]
        links = [each for each in things if isinstance(each, LinkState)]
        pipes = [each for each in things if isinstance(each, PipeState)]
        stores = [each for each in things if isinstance(each, StoreState)]
        status = next((each for each in things if isinstance(each, dict)), {})
        stats = self._stats.snapshot()
        for figures in stats["ops"].values():
            figures.pop("samples", None)  # thousands, which would take the engine milliseconds to send
        side = SideState(
            **self.labels,
            pid=os.getpid(),
            seconds=time.monotonic() - self._began,
            links=tuple(links[-_MAX_THINGS:]),
            num_links=len(links),
            pipes=tuple(pipes[-_MAX_THINGS:]),
            num_pipes=len(pipes),
            stores=tuple(stores[-_MAX_THINGS:]),
            status=status,
            stats=stats,
        )
        plain: dict[str, Any] = to_plain(side)
        return plain


def _try(read: Callable[[Any], Any], thing: Any) -> Any:
    """Return the state of ``thing``, or ``None`` if it is closed or its code fails."""
    try:
        return read(thing)
    except Exception as e:  # a plugin's fault must not hide the rest
        if not isinstance(e, KvplugError):
            _log.debug("the state of %r cannot be read", thing, exc_info=True)
        return None


def status_of(connector: SchedulerConnector | WorkerConnector) -> dict[str, Any]:
    """Return the status of this side of a connector, and the length of each list in it."""
    given = connector.get_status()
    counts = {f"num_{name}": len(found) for name, found in given.items() if isinstance(found, list)}
    status: Mapping[str, Any] = peer_texts({**counts, **given}, _MAX_CHARACTERS, _MAX_THINGS)
    encode(status)  # raises if it is not plain
    return dict(status)
