"""The ends of a store, for the general laws. A reason of a job is the error that it would be elsewhere."""

from __future__ import annotations

import functools
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import attrs

from kvplug import ClosedError, KvplugError, PeerGoneError, TimeoutError
from kvplug.transport import Deadline, Job, MissReason, Presence, PutReason, Store
from kvplug_testing import peers, waits
from kvplug_testing.contract.ends import CHILD_S, RUN_END, Calls, End, Ends, RemoteHandle, given
from kvplug_testing.contract.general import General
from kvplug_testing.contract.store.calls import ended, is_missed, kept, looked_up
from kvplug_testing.contract.store.pages import KIB, MIB, Batch, batch, held_request, sized_format
from kvplug_testing.contract.store.suite import Place, StoreSuite
from kvplug_testing.waits import until

_BUDGET: Final = 64 * MIB
_NBYTES: Final = 512 * KIB
"""Of every page: a store of this budget may have memory for one size at a time."""
_PAGES: Final = 2
LONG_S: Final = 600.0
_AGAIN_S: Final = 0.002
_THREADS: Final = 3
"""Of a program that leaves."""
_GONE: Final = {MissReason.STORE_GONE, MissReason.TIMEOUT, MissReason.ABSENT}
_ERRORS: Final[Mapping[str, type[KvplugError]]] = {
    MissReason.CLOSED: ClosedError,
    MissReason.TIMEOUT: TimeoutError,
    MissReason.STORE_GONE: PeerGoneError,
}


def done(job: Job[Any], what: str) -> Sequence[Any]:
    """The results of a job, for whose end this waits.

    Raises:
        KvplugError: what the reason of a page stands for.
    """
    results = job.wait(None)
    for reason in results:
        if error := _ERRORS.get(str(reason)):
            raise error(f"{what} of {len(results)} pages: {reason}")
    return results


def pages_of(store: Store, namespace: bytes) -> Batch:
    """Pages that are the same in every process."""
    return batch(_PAGES, sized_format(_NBYTES), seal=store.seal, namespace=namespace)


def _must_be(allowed: set[Any], results: Sequence[Any], what: str, kind: type) -> None:
    """Raises an error about results that are others; a ``KvplugError`` if they are reasons of this kind."""
    if not {*results} <= allowed:
        are_reasons = all(reason is None or isinstance(reason, kind) for reason in results)
        raise (KvplugError if are_reasons else AssertionError)(f"{what} gave {results}")


class StoreEnd(End):
    """An end of a place. It puts pages, and gets those that the other end puts, or its own."""

    def __init__(
        self, role: str, partner: str, suite: StoreSuite, store: Store, place: Place, name: bytes
    ) -> None:
        self.role = role
        self.gone = PeerGoneError if role == "other" and suite.by_link else None
        self.thing = store
        self._partner = partner
        self._store = store
        self._place = place
        self._pid = os.getpid()
        self._can = functools.partial(suite.can, store)
        self._name = name
        self._there = self._pages(uuid.uuid4().hex)
        self._is_ended = False

    def _pages(self, name: object) -> Batch:
        namespace = self._name + repr(name).encode()
        return pages_of(self._store, namespace)

    def calls(self) -> Calls:
        store, pages = self._store, self._there
        more: dict[str, Callable[[float | None], Any]] = {
            "declare": lambda timeout: store.declare(pages.series, pages.keys, timeout=timeout),
            "usage": lambda timeout: store.usage(),
            "keys": lambda timeout: store.keys(pages.series),
            "subscribe": lambda timeout: store.subscribe(lambda event: None),
            "touch": lambda timeout: store.touch(pages.keys),
            "expect_reader": lambda timeout: store.expect_reader(pages.keys),
            "withdraw": lambda timeout: store.withdraw(pages.keys),
            "release": lambda timeout: store.release(pages.keys),
        }
        return {**self._jobs(), **{name: call for name, call in more.items() if self._can(name)}}

    def _jobs(self) -> dict[str, Callable[..., Job[Any]]]:
        store, pages = self._store, self._there
        return {
            "submit_lookup": lambda timeout: store.submit_lookup(pages.keys, timeout=timeout),
            "submit_put": lambda timeout: store.submit_put(pages.filled(), timeout=timeout),
            "submit_get": lambda timeout: store.submit_get(pages.empty(), timeout=timeout),
            "submit_remove": lambda timeout: store.submit_remove(pages.keys, timeout=timeout),
        }

    def lied_to(self) -> Calls:
        kinds: dict[str, Any] = {
            "submit_lookup": Presence,
            "submit_put": (PutReason, type(None)),
            "submit_get": (MissReason, type(None)),
            "submit_remove": bool,
        }

        def answer(name: str, timeout: float | None) -> None:
            results = self._jobs()[name](timeout).wait(None)
            is_one = len(results) == _PAGES and all(isinstance(each, kinds[name]) for each in results)
            assert is_one, f"{results!r:.300} is no answer"

        return {**self.calls(), **{name: functools.partial(answer, name) for name in kinds}}

    def timed(self) -> Calls:
        takes_one = {*self._jobs(), "declare"}
        return {
            "close": self.close,
            **{name: call for name, call in self.calls().items() if name in takes_one},
        }

    def blocking(self) -> Calls:
        return {"submit_put": self._held_put, "submit_get": self._held_get}

    def unclogged(self) -> Sequence[str]:
        return ["submit_put"]

    def doomed(self) -> Sequence[str]:
        """A copy that has begun may end without the store."""
        return []

    def _held_put(self, *timeout: float | None) -> None:
        """Put pages whose copy is held up until the job has ended."""
        request, memory = held_request(self._pages(uuid.uuid4()), filled=True)
        with memory:
            done(self._store.submit_put(request, **given(timeout)), "a put")

    def _held_get(self, *timeout: float | None) -> None:
        request, memory = held_request(self._there)
        with memory:
            done(self._store.submit_get(request, **given(timeout)), "a get")

    def clog(self) -> int:
        """Put the pages whose get is held up."""
        kept(self._store, self._there)
        return 0

    def part(self, number: int, timeout: float | None) -> None:
        deadline = Deadline.after(timeout)
        self._put(self._pages((self.role, number)), timeout)
        pages = self._pages((self._partner, number))
        while not self._gets(pages, timeout):
            if deadline.expired:
                raise TimeoutError(f"the pages of exchange {number} have not come")
            time.sleep(_AGAIN_S)
        done(self._store.submit_remove(pages.keys, timeout=timeout), "a removal")

    def _put(self, pages: Batch, timeout: float | None) -> None:
        results = done(self._store.submit_put(pages.filled(), timeout=timeout), "a put")
        _must_be({None}, results, "a put", PutReason)

    def _gets(self, pages: Batch, timeout: float | None) -> bool:
        """Whether the pages are there; others than these are not got."""
        request = pages.empty()
        results = done(self._store.submit_get(request, timeout=timeout), "a get")
        assert not (wrong := pages.unlike(request, results)), wrong
        _must_be({None, MissReason.ABSENT}, results, "a get", MissReason)
        return None in results and MissReason.ABSENT not in results

    def busy(self, leaves: bool) -> None:
        """Threads of the program use the store; they do not know that it leaves, unless it ends the store."""
        if not leaves:
            self._use()
        for number in range(_THREADS):
            threading.Thread(
                target=self._use_until_ended, name=f"of the program {number}", daemon=True
            ).start()
        threading.Event().wait()

    def _use_until_ended(self) -> None:
        try:
            self._use()
        except ClosedError:
            if not self._is_ended:
                raise

    def _use(self) -> None:
        pages = self._pages(uuid.uuid4())
        while True:
            self._put(pages, None)
            done(self._store.submit_lookup(pages.keys, timeout=None), "a lookup")
            self._gets(pages, None)
            self._store.touch(pages.keys)
            self._store.usage()

    def is_gone(self) -> None:
        """Requests are misses once the end knows that its store is gone for good."""

        def is_lost() -> bool:
            results = ended(self._store.submit_get(self._there.empty()))
            assert {*results} <= {None, *_GONE}, f"a get gave {results}"  # mapped memory may be read longer
            return self._store.is_lost

        until(is_lost, what="that the end knows that its store is gone for good")
        is_missed(self._store, self._there, self._pages("more"))

    def lease(self, keys: Sequence[bytes]) -> bool:
        """Lease pages for long; whether they are there."""
        return {*looked_up(self._store, keys, lease_s=LONG_S)} == {Presence.HELD}

    def put(self, namespace: bytes) -> None:
        self._put(pages_of(self._store, namespace), None)

    def close(self, timeout: float | None) -> None:
        self._is_ended = True
        self._store.close(timeout)
        self._stop_serving()

    def abort(self) -> None:
        self._is_ended = True
        self._store.abort()
        self._stop_serving()

    def _stop_serving(self) -> None:
        """Not in a forked child: the server is the parent's."""
        if self.role == "first" and self._place.server is not None and os.getpid() == self._pid:
            self._place.server.close()

    def closed(self) -> bool:
        return self._store.is_lost


class StoreEnds(Ends):
    """The end of a place that was opened first, and another one."""

    roles: ClassVar[Sequence[str]] = ("first", "other")
    suite: StoreSuite

    def make(self, children: Sequence[peers.Peer | None], context: Mapping[str, Any]) -> list[End | None]:
        place = attrs.evolve(self.suite.place(_BUDGET), timeout_s=context.get("timeout_s"))
        name = uuid.uuid4().bytes
        found: list[End | None] = []
        for role, child in enumerate(children):
            if child is None:
                found.append(self._end(role, place, name))
                continue
            if role:
                self.suite.make_reachable(place)
            child.send([place.plain, name])
            place.address = child.recv()
            found.append(None)
        for end in found:
            if end is not None:
                self.suite.later(end.abort)  # before the server, which closes the store politely
        return found

    def join(self, parent: peers.Parent, role: int, context: Mapping[str, Any]) -> End:
        plain, name = parent.recv(None)
        place = Place(**plain)
        end = self._end(role, place, name)
        if not role and len(self.roles) > 1:
            self.suite.make_reachable(place)
        parent.send(place.address)
        return end

    def _end(self, role: int, place: Place, name: bytes) -> StoreEnd:
        store = self.suite.other(place) if role else self.suite.open(place)
        return StoreEnd(self.roles[role], self.roles[role - 1], self.suite, store, place, name)


class OnlyEnds(StoreEnds):
    """A store that has one end."""

    roles: ClassVar[Sequence[str]] = ("first",)


class StoreGeneral(StoreSuite, General):
    """The general laws for stores."""

    @property
    def lied_to_processes(self) -> str:
        if not self.by_link:
            return f"ends of {self.called} say nothing to each other over a link"
        return self.one_end or super().lied_to_processes

    def beside(self, place: Place) -> RemoteHandle:
        """Another end of the place, in another process."""
        self.make_reachable(place)
        child = self.start_forked(RUN_END, self.suite_ref(), 1, {}, timeout_s=CHILD_S)
        child.send([place.plain, b""])
        assert child.recv(2 * waits.patience_s) == place.address
        _, facts = child.recv(2 * waits.patience_s)
        return RemoteHandle(child, facts)

    def ends(self) -> StoreEnds:
        return OnlyEnds(self) if self.one_end else StoreEnds(self)
