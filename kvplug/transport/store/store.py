"""The interface of a store: pages of KV under content keys."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, TypeVar

import attrs

from kvplug.config.addresses import DEFAULT_HOST
from kvplug.errors import UnsupportedError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.credentials import Credentials
from kvplug.transport.pipe import Pipe
from kvplug.transport.store.events import PageEvent
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.keys import Series
from kvplug.transport.store.memory import PageBuffers, PageMemory, ReservedPages
from kvplug.transport.store.results import MissReason, Presence, PutReason, Usage

if TYPE_CHECKING:
    from kvplug.transport.store.staging.staging import Staging

J = TypeVar("J", bound=Job[Any])
_NOW: Final = Deadline.after(0.0)


@attrs.frozen(kw_only=True)
class PageRequest:
    """Pages of one series, for a put or a get.

    Raises:
        ValueError: the numbers of keys, identities and pages of memory differ.
    """

    series: Series
    """The format and shard of all these pages."""
    keys: Sequence[bytes]
    """One key for each page: :meth:`Series.key_of` of its chain, or a foreign key."""
    identities: Sequence[bytes]
    """What identifies each page: token ids and parent, or the engine's own key. A get copies a page only if
    the page's header has the same identity."""
    memory: PageMemory
    """The memory that the pages are copied from or into."""
    is_use: bool = True
    """For a get: whether a store that evicts by use counts the get as a use. False for the one copy of each
    page into another store."""
    traceparent: str = ""
    """For a get: the context of the request in its trace, for a store in another process."""

    def __attrs_post_init__(self) -> None:
        if not len(self.keys) == len(self.identities) == len(self.memory):
            raise ValueError(
                f"{len(self.keys)} keys, {len(self.identities)} identities and memory for"
                f" {len(self.memory)} pages do not match"
            )


class Recorder(Protocol):
    """Counts and measures each request to one store, when its job ends."""

    def refuses(self, op: Literal["get", "put"]) -> bool:
        """Whether the store is too slow for such requests now."""

    def record(self, op: Literal["lookup", "get", "put"], page_nbytes: int, submit: Callable[[], J]) -> J:
        """Make the request, and count its results when its job is done. ``page_nbytes``: bytes of a page."""

    def close(self) -> None:
        """Report the remaining figures, when the store is closed."""


class Store(abc.ABC):
    """Pages of KV under content keys, kept in this process or elsewhere.

    Law. A get returns what was put, bit for bit, verified before the caller may use it, or a miss with a
    reason. A page is visible whole or not at all; the first complete put of a key wins. The methods
    ``submit_*`` never wait; every job ends by its deadline. After a job has settled, its memory is not
    touched. Memory and disk stay within the budget. Requests to a store that is gone are misses, and the
    store is tried again.

    Callers. Connectors and engine adapters. Any thread may call any method, and several may at once.

    Not promised. A page that a lookup found may be gone before a get: only a lease postpones eviction, and
    the store may die. A put may not be kept.

    A subclass implements ``_lookup(keys, lease_s, timeout)``, ``_put(pages, timeout)``,
    ``_get(pages, timeout)``, ``_remove(keys, timeout)``, ``_close(timeout)`` and ``_abort()``. The public
    methods call these, count the requests, and stage pages whose memory is on a device. A store whose calls
    block implements :class:`~kvplug.transport.store.blocking.BlockingStore` instead.
    """

    @attrs.frozen(kw_only=True)
    class Context:
        """The argument of a store's factory, which returns a ``Store`` or a ``BlockingStore``."""

        options: Any
        """An instance of the spec's options class, or ``None``."""
        credentials: Credentials
        """Credentials for its listeners and connections."""
        seal: PageSeal = attrs.field(factory=PageSeal)
        """How pages that other programs can write are protected: with a proof if there is a secret."""
        host: str = DEFAULT_HOST
        """Where it may listen: on an interface of this host, or on a Unix socket, for this host only."""
        allow_unauthenticated_data_plane: bool = False
        """Whether its connections between hosts may leave both ends unauthenticated."""
        buffer_size: int = 2**30
        """Bytes of memory that it may use for pages, unless its options say otherwise."""
        timeout_s: float = 30.0
        """The default deadline of a job."""
        heartbeat_timeout_s: float = 10.0
        """Seconds of silence after which a peer on another host counts as dead."""
        connect: Callable[[str, float | None], Store.Link] | None = None
        """``connect(address, timeout)`` returns a link to a program that serves a store at the address
        (``kvplug store serve``), and raises the errors of a handshake. ``None`` if the caller cannot
        connect."""
        on_served: Callable[[str, float, int], object] = lambda traceparent, begun, num_pages: None
        """``on_served(traceparent, begun, num_pages)`` is called after pages were served to another process
        that stated the context of a trace. ``begun``: by ``time.monotonic``."""

    class Link(Protocol):
        """A connection to another process, after the handshake, over which a store is served."""

        @property
        def channel(self) -> Channel:
            """A channel for small plain values, in both directions."""

        def open_pipe(self, label: str, *, device: str = "cpu", timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
            """Open a pipe over the transport that both ends agreed on. Both ends call it with the same
            label."""

        def close(self) -> None:
            """Close the channel; pipes stay open. Idempotent."""

    seal: PageSeal = PageSeal()
    """How its pages are protected. The seal's id is part of the series of every page in the store."""
    recorder: Recorder | None = None
    """Counts and measures its requests; set by the program that has opened the store."""
    staging: Staging | None = None
    """Serves memory on devices; set by the program that has opened the store. Without staging, requests must
    use CPU memory."""

    @property
    def is_shared(self) -> bool:
        """Whether every process that opens it with the same options reaches the same pages."""
        return False

    @property
    def medium(self) -> str:
        """The medium of its pages, for an engine's statistics: ``"host"`` (memory of this host), ``"disk"``
        or ``"other"``."""
        return "other"

    @property
    def location(self) -> str:
        """Where it keeps its pages, such as a folder or a server's address; empty for this process. Shown
        to people; contains no secrets."""
        return ""

    @property
    def route(self) -> str:
        """How its pages reach this process, in words, such as "its memory is mapped, staged to cuda:0"."""
        devices = self.staging.devices if self.staging is not None else ()
        return ", ".join(filter(None, (self._route, f"staged to {', '.join(devices)}" if devices else "")))

    @property
    def _route(self) -> str:
        """The part of :attr:`route` that the store knows."""
        return ""

    # -- jobs ----------------------------------------------------------------------------------

    def submit_lookup(
        self, keys: Sequence[bytes], *, lease_s: float = 0.0, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Job[Presence]:
        """Look up whether the store has the pages. Pages without an answer by the deadline are ``ABSENT``.

        Args:
            lease_s: if the store has leases, held pages are not evicted for this many seconds, or until
                :meth:`release`.
        """
        return self._submitted(
            "lookup",
            0,
            lambda: self._lookup(keys, lease_s, timeout),
            lambda: self._refused_lookup(len(keys)),
        )

    def submit_put(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[PutReason | None]:
        """Keep copies of the pages. A page that the store already has counts as kept, and is not replaced.

        Result: ``None`` for a page that the store has now, else the reason why not. Lack of room is such a
        reason, not an error.
        """
        staging = self._staging_of(pages.memory) if pages.keys else None
        put = self._put if staging is None else staging.put
        nbytes = pages.series.format.nbytes
        return self._submitted("put", nbytes, lambda: put(pages, timeout), lambda: self._refused_put(pages))

    def together(self) -> AbstractContextManager[None]:
        """Return a context for puts by the calling thread. Pages in a cache on a device are copied at its
        end, with one operation for each layer of all requests where the cache allows it."""
        return contextlib.nullcontext() if self.staging is None else self.staging.together()

    def submit_get(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> GetJob:
        """Copy the pages into ``pages.memory``.

        Result: ``None`` for a page that was copied and verified, else the reason for the miss. Each part of a
        missed page's memory is unchanged, zeros, or the page's correct bytes; never other bytes."""
        staging = self._staging_of(pages.memory) if pages.keys else None
        get = self._get if staging is None else staging.get
        return self._submitted(
            "get",
            pages.series.format.nbytes,
            lambda: get(pages, timeout),
            lambda: ended(GetJob(len(pages.keys), pages.series.format.num_layers, _NOW), MissReason.SLOW),
        )

    def submit_remove(self, keys: Sequence[bytes] | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[bool]:
        """Remove the pages. ``None`` removes all pages, in a job with one result. Result: whether the pages
        are gone.

        Pages that are declared or being put when this is called are not kept either. A get in progress may
        return its pages or miss.

        Raises:
            UnsupportedError: ``keys`` is ``None``, and other programs also keep pages in the store.
        """
        if self.staging is not None:
            self.staging.forget(keys)
        return self._remove(keys, timeout)

    def _staging_of(self, memory: PageMemory) -> Staging | None:
        """Return the staging that serves this memory, or ``None`` if the store serves it."""
        return None if memory.device.partition(":")[0] == "cpu" else self.staging

    def _submitted(
        self,
        op: Literal["lookup", "get", "put"],
        page_nbytes: int,
        submit: Callable[[], J],
        refuse: Callable[[], J],
    ) -> J:
        """Make the request, or refuse it if the store is too slow. A closed store raises its own error."""
        recorder = self.recorder
        if recorder is None:
            return submit()
        if recorder.refuses("put" if op == "put" else "get") and not self.is_lost:
            submit = refuse
        return recorder.record(op, page_nbytes, submit)

    def _refused_lookup(self, count: int) -> Job[Presence]:
        """Pages that cannot be loaded must not be promised."""
        job: Job[Presence] = Job(count, _NOW)
        job.failure = MissReason.SLOW
        return ended(job, Presence.ABSENT)

    def _refused_put(self, pages: PageRequest) -> Job[PutReason | None]:
        self.withdraw(pages.keys)
        if isinstance(pages.memory, PageBuffers):
            self.free(pages.memory)
        return ended(Job(len(pages.keys), _NOW), PutReason.SLOW)

    # -- what a store implements ---------------------------------------------------------------

    @abc.abstractmethod
    def _lookup(self, keys: Sequence[bytes], lease_s: float, timeout: Timeout) -> Job[Presence]:
        """:meth:`submit_lookup`."""

    @abc.abstractmethod
    def _put(self, pages: PageRequest, timeout: Timeout) -> Job[PutReason | None]:
        """:meth:`submit_put`."""

    def _reserve(self, pages: PageRequest, which: range) -> ReservedPages | None:
        """Return pinned memory of the store for the pages ``which``, which are on a device, or for only the
        first of them. ``None``: staging copies them through memory of its own.

        The device fills the memory, then :meth:`_put` gets it. If it is not put, :meth:`free` gets it, or it
        is dropped, once no device writes it any more.
        """
        return None

    @abc.abstractmethod
    def _get(self, pages: PageRequest, timeout: Timeout) -> GetJob:
        """:meth:`submit_get`."""

    @abc.abstractmethod
    def _remove(self, keys: Sequence[bytes] | None, timeout: Timeout) -> Job[bool]:
        """:meth:`submit_remove`."""

    @abc.abstractmethod
    def _close(self, timeout: Timeout) -> None:
        """:meth:`close`."""

    @abc.abstractmethod
    def _abort(self) -> None:
        """:meth:`abort`."""

    # -- at once -------------------------------------------------------------------------------

    def allocate(self, series: Series, count: int) -> PageBuffers | None:
        """Return memory in which to gather pages for a put, or ``None`` if there is no room now. The put may
        then need no copy.

        The memory belongs to the caller until it is put or given back to :meth:`free`.
        """
        try:
            return PageBuffers.empty(series.format, count)
        except MemoryError:
            return None

    def free(self, memory: PageBuffers) -> None:
        """Give back memory from :meth:`allocate` that is not put. Idempotent."""
        return None

    def declare(self, series: Series, keys: Sequence[bytes], *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Announce that the caller is going to put these pages. Until it does, or ``timeout`` passes,
        lookups report absent ones as ``COMING`` if the store supports it. Does not wait."""
        return None

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Announce that these declared pages will not be put. Does not wait."""
        return None

    def release(self, keys: Sequence[bytes]) -> None:
        """Give up this end's leases on the pages. Does not wait."""
        return None

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that the pages were used elsewhere, so that they are evicted later. Does not wait."""
        return None

    def expect_reader(self, keys: Sequence[bytes]) -> None:
        """Announce that one more end, other than this one, will get each of these pages, even if it is not
        put yet. Until then a store that evicts by use may evict all other pages first. Does not wait."""
        return None

    def keys(self, series: Series) -> Sequence[bytes]:
        """Return the keys of that series that the store has now, in any order. May wait.

        Raises:
            UnsupportedError: the store cannot list them.
            KvplugError: the store does not answer.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot list what it holds")

    @abc.abstractmethod
    def usage(self) -> Usage:
        """Return what the store holds, as far as this end knows. Does not wait."""

    @property
    def has_events(self) -> bool:
        """Whether :meth:`subscribe` works, so that an index of the keys can replace lookups."""
        return False

    def subscribe(self, listener: Callable[[PageEvent], None]) -> Callable[[], None]:
        """Call ``listener`` with the events of a snapshot, then with the event of every change.

        The calls come in the order of the sequence numbers, without a gap, in any thread. The listener must
        not block. Returns a function that ends the subscription.

        Raises:
            UnsupportedError: this store has no events.
        """
        raise UnsupportedError(f"{type(self).__name__} has no events")

    def serve(self, link: Store.Link) -> None:
        """Serve this store to one peer over the link. Returns when the peer is gone or this store is closed.

        The peer creates its end with the ``client`` of the store's spec.

        Raises:
            UnsupportedError: this store cannot be served.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot be served to other processes")

    def register_memory(self, memory: PageMemory) -> None:
        """Let the store prepare memory that the caller will often get into or put from.

        Raises:
            RuntimeError: a device failed, or its driver cannot allocate more memory.
        """
        staging = self._staging_of(memory)
        if staging is not None:
            staging.prepare(memory.device)

    # -- the end -------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def is_lost(self) -> bool:
        """Whether this end can never answer again: it was closed, or its other end is gone for good."""

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """End all jobs as ``CLOSED`` except puts that have begun, finish those, and close. Idempotent."""
        if self.staging is not None:
            timeout = self.staging.close(timeout)
        self._close(timeout)
        if self.staging is not None:
            self.abort()
        if self.recorder is not None:
            self.recorder.close()

    def abort(self) -> None:
        """Close at once: every job ends as ``CLOSED``. Idempotent; never waits for another process."""
        if self.staging is not None:
            self.staging.give_up()
        self._abort()
        if self.staging is not None:
            self.staging.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self.close()


def ended(job: J, result: Any) -> J:
    """End the job at once, with the same result for each key, and return it."""
    job.set([result] * job.count)
    return job
