"""The interface of a store: pages of KV under content keys."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
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
from kvplug.transport.store.memory import PageBuffers, PageMemory
from kvplug.transport.store.results import MissReason, Presence, PutReason, Usage

if TYPE_CHECKING:
    from kvplug.transport.store.staging.staging import Staging

J = TypeVar("J", bound=Job[Any])
_NOW: Final = Deadline.after(0.0)


@attrs.frozen(kw_only=True)
class PageRequest:
    """Pages of one series, for a put or a get.

    Raises:
        ValueError: there are not as many keys as identities and pages of memory.
    """

    series: Series
    """The format and shard of all these pages."""
    keys: Sequence[bytes]
    """One for each page: :meth:`Series.key_of` of its chain, or a foreign key."""
    identities: Sequence[bytes]
    """What each page is: token ids and parent, or the engine's own key. A reader gets a page only if the
    identity in the page's header is equal."""
    memory: PageMemory
    """Where the pages are, or go to."""
    is_use: bool = True
    """Of a get: whether the pages count as used, for stores that evict by use. Not where they are only copied
    into another store, which happens to each page once."""

    def __attrs_post_init__(self) -> None:
        if not len(self.keys) == len(self.identities) == len(self.memory):
            raise ValueError(
                f"{len(self.keys)} keys, {len(self.identities)} identities and memory for"
                f" {len(self.memory)} pages"
            )


class Recorder(Protocol):
    """Counts and measures the requests to one store, each in the one place where its job ends."""

    def refuses(self, op: Literal["get", "put"]) -> bool:
        """Whether the store is too slow for such requests now."""

    def record(self, op: Literal["lookup", "get", "put"], page_nbytes: int, submit: Callable[[], J]) -> J:
        """Make the request, and count its results when its job is done. ``page_nbytes``: of one page."""

    def close(self) -> None:
        """The store is closed: report what is due."""


class Store(abc.ABC):
    """Pages of KV under content keys, kept in this process or elsewhere.

    Law. What is got is what was put, bit for bit, verified before the caller may use it, or a miss with a
    reason. A page is visible whole or not at all; the first whole put of a key wins. The methods ``submit_*``
    never wait; every job ends by its deadline. After a job has settled, its memory is not touched. Memory and
    disk stay within the budget. A store that is gone is a miss, and is tried again.

    Callers. Connectors and adapters of engines. Every method may be called from any thread, and several at
    once.

    Not promised. That a page which was held is still there when it is got: only a lease postpones eviction,
    and the store may die. That a put is kept.

    A subclass implements ``_lookup(keys, lease_s, timeout)``, ``_put(pages, timeout)``,
    ``_get(pages, timeout)``, ``_remove(keys, timeout)``, ``_close(timeout)`` and ``_abort()``. The public
    methods call them; they also have the requests counted, and pages staged whose memory is on a device. A
    store whose calls block implements :class:`~kvplug.transport.store.blocking.BlockingStore` instead.
    """

    @attrs.frozen(kw_only=True)
    class Context:
        """For the factory of a store, which returns a ``Store`` or a ``BlockingStore``."""

        options: Any
        """An instance of the spec's options class, or ``None``."""
        credentials: Credentials
        """What its listeners and connections prove themselves with."""
        seal: PageSeal = attrs.field(factory=PageSeal)
        """How its pages are protected, where other programs can write to it: with a proof if the config has a
        secret."""
        host: str = DEFAULT_HOST
        """Where it may listen: on a host's interface, or, for a Unix socket, on this host only."""
        allow_unauthenticated_data_plane: bool = False
        """Whether it may use connections between hosts whose ends prove nothing."""
        buffer_size: int = 2**30
        """Bytes of memory that it may use for pages, where its options say nothing else."""
        timeout_s: float = 30.0
        """The default deadline of a job."""
        heartbeat_timeout_s: float = 10.0
        """Seconds of silence after which a peer on another host counts as dead."""
        connect: Callable[[str, float | None], Store.Link] | None = None
        """``connect(address, timeout)``: a link to a program that serves a store there (``kvplug store
        serve``).

        Raises what a handshake raises. ``None`` where the caller has no way to connect."""

    class Link(Protocol):
        """An agreed connection to another process, over which a store is served."""

        @property
        def channel(self) -> Channel:
            """Small plain values both ways."""

        def open_pipe(self, label: str, *, device: str = "cpu", timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
            """A pipe over the transport that both ends agreed on. Both ends call it, with the same label."""

        def close(self) -> None:
            """Close the channel; pipes live on. Idempotent."""

    seal: PageSeal = PageSeal()
    """How its pages are protected. Its id is part of the series of every page in it."""
    recorder: Recorder | None = None
    """What counts and measures its requests; set by the program that has opened it."""
    staging: Staging | None = None
    """What serves memory on devices that the store does not; set by the program that has opened it. Without
    it, requests have memory of devices that the store serves."""

    @property
    def is_shared(self) -> bool:
        """Whether every process that opens it with the same options reaches the same pages."""
        return False

    @property
    def medium(self) -> str:
        """What its pages are kept in, for an engine's statistics: ``"host"`` (memory of this host),
        ``"disk"`` or ``"other"``."""
        return "other"

    @property
    def location(self) -> str:
        """Where it keeps its pages, for people, without secrets: a folder, a server's address; empty: in this
        process."""
        return ""

    @property
    def route(self) -> str:
        """How pages come from it to this process, for people: "its memory is mapped, staged to cuda:0"."""
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
        """Whether the pages are there. At its deadline the job says ``ABSENT`` of those it does not know.

        Args:
            lease_s: the held pages are not evicted for this long, or until :meth:`release`, where the store
                has leases.
        """
        if self.recorder is None:
            return self._lookup(keys, lease_s, timeout)
        if self._is_refused("get"):  # what cannot be loaded is not promised
            return self.recorder.record("lookup", 0, lambda: ended(Job(len(keys), _NOW), Presence.ABSENT))
        return self.recorder.record("lookup", 0, lambda: self._lookup(keys, lease_s, timeout))

    def submit_put(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[PutReason | None]:
        """Keep copies of the pages. A page that is held already counts as kept, and is not replaced.

        Result: ``None`` for a page that is held now, else why not. No room is a result, not an error.
        """
        staging = self._staging_of(pages.memory) if pages.keys else None
        put = self._put if staging is None else staging.put
        if self.recorder is None:
            return put(pages, timeout)
        if self._is_refused("put"):
            put = self._refuse_put
        return self.recorder.record("put", pages.series.format.nbytes, lambda: put(pages, timeout))

    def submit_get(self, pages: PageRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> GetJob:
        """Copy the pages into ``pages.memory``.

        Result: ``None`` for a page that is there and verified, else why not. Then its memory is as it was,
        zeros, or the page's right bytes, in parts too; never bytes that are not the page's."""
        staging = self._staging_of(pages.memory) if pages.keys else None
        get = self._get if staging is None else staging.get
        if self.recorder is None:
            return get(pages, timeout)
        if self._is_refused("get"):
            get = self._refuse_get
        return self.recorder.record("get", pages.series.format.nbytes, lambda: get(pages, timeout))

    def submit_remove(self, keys: Sequence[bytes] | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Job[bool]:
        """Forget the pages; ``None``: all pages, and the job has one result. Result: whether it is done.

        Pages that were declared, or whose put had not ended, when this was called are not kept either. A
        reader that has begun may get its pages or a miss.

        Raises:
            UnsupportedError: with ``None``: other programs keep pages in the store, too.
        """
        if self.staging is not None:
            self.staging.forget(keys)
        return self._remove(keys, timeout)

    def _staging_of(self, memory: PageMemory) -> Staging | None:
        """What copies pages in this memory; ``None``: the store does."""
        staging = self.staging
        if staging is None or memory.device.partition(":")[0] in staging.direct:
            return None
        return staging

    def _is_refused(self, op: Literal["get", "put"]) -> bool:
        """Whether the store is too slow to be asked. A closed one raises that itself."""
        return self.recorder is not None and self.recorder.refuses(op) and not self.is_lost

    def _refuse_put(self, pages: PageRequest, timeout: Timeout) -> Job[PutReason | None]:
        self.withdraw(pages.keys)
        if isinstance(pages.memory, PageBuffers):
            self.free(pages.memory)
        return ended(Job(len(pages.keys), _NOW), PutReason.SLOW)

    def _refuse_get(self, pages: PageRequest, timeout: Timeout) -> GetJob:
        return ended(GetJob(len(pages.keys), pages.series.format.num_layers, _NOW), MissReason.SLOW)

    # -- what a store implements ---------------------------------------------------------------

    @abc.abstractmethod
    def _lookup(self, keys: Sequence[bytes], lease_s: float, timeout: Timeout) -> Job[Presence]:
        """:meth:`submit_lookup`."""

    @abc.abstractmethod
    def _put(self, pages: PageRequest, timeout: Timeout) -> Job[PutReason | None]:
        """:meth:`submit_put`."""

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
        """Memory to gather pages into that are put next: a put of it may need no copy.

        It belongs to the caller until it is put, or :meth:`free` returns it. ``None``: there is no room now.
        """
        try:
            return PageBuffers.empty(series.format, count)
        except MemoryError:
            return None

    def free(self, memory: PageBuffers) -> None:
        """Memory from :meth:`allocate` is not put after all. Idempotent."""
        return None

    def declare(self, series: Series, keys: Sequence[bytes], *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """The caller is going to put these pages: until then, or until ``timeout`` is over, a lookup says
        ``COMING`` of those that are absent, where the store can say that. Does not wait."""
        return None

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """The declared pages are not put after all. Does not wait."""
        return None

    def release(self, keys: Sequence[bytes]) -> None:
        """This end's leases on the pages end. Does not wait."""
        return None

    def touch(self, keys: Sequence[bytes]) -> None:
        """The pages were used elsewhere, and are evicted later than others. Does not wait."""
        return None

    def expect_reader(self, keys: Sequence[bytes]) -> None:
        """One end more, another than this one, is going to get each of these pages, also those that are put
        after this call. Until it has, a store that evicts by use may evict them later than all others. Does
        not wait."""
        return None

    def keys(self, series: Series) -> Sequence[bytes]:
        """Keys of that series that are held now, in no particular order. May wait.

        Raises:
            UnsupportedError: the store cannot list them.
            KvplugError: the store does not answer.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot list what it holds")

    @abc.abstractmethod
    def usage(self) -> Usage:
        """What the store holds, as far as this end knows. Does not wait."""

    @property
    def has_events(self) -> bool:
        """Whether :meth:`subscribe` works: then an index of the keys can answer in place of lookups."""
        return False

    def subscribe(self, listener: Callable[[PageEvent], None]) -> Callable[[], None]:
        """Call ``listener`` with a snapshot (its header, then *stored* events), then with every change.

        In the order of the sequence numbers, without a gap, in any thread; the listener must not block.
        Returns a function that ends the subscription.

        Raises:
            UnsupportedError: this store has no events.
        """
        raise UnsupportedError(f"{type(self).__name__} has no events")

    def serve(self, link: Store.Link) -> None:
        """Serve this store to one peer over the link. Returns when the peer is gone, or this store is closed.

        The peer makes its end with the ``client`` of the store's spec.

        Raises:
            UnsupportedError: this store serves no peers.
        """
        raise UnsupportedError(f"{type(self).__name__} serves no other processes")

    def register_memory(self, memory: PageMemory) -> None:
        """The caller is going to get into this memory, or put from it, often: the store may prepare it.

        Raises:
            RuntimeError: a device failed, or its driver gives no more memory.
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
        """Finish the puts that have begun, then end. Idempotent. Other jobs end as ``CLOSED`` at once."""
        if self.staging is not None:
            timeout = self.staging.close(timeout)
        self._close(timeout)
        if self.staging is not None:
            self.abort()
        if self.recorder is not None:
            self.recorder.close()

    def abort(self) -> None:
        """End at once: every job ends as ``CLOSED``. Idempotent; never waits for another process."""
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
    """The job, which is done at once, with the same result for each key."""
    job.set([result] * job.count)
    return job
