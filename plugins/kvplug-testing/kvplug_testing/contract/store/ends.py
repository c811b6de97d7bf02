"""The ends of a store, for the general laws. The reason of a missed page is raised as an error here."""

from __future__ import annotations

import functools
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Final

import attrs

from kvplug import ClosedError, KvplugError, PeerGoneError, TimeoutError
from kvplug.transport import (
    Deadline,
    Job,
    MissReason,
    NamedExhaustion,
    PageRequest,
    Presence,
    PutReason,
    Store,
)
from kvplug_testing.contract.ends import CHILD_S, RUN_END, Calls, End, Ends, RemoteHandle
from kvplug_testing.contract.exhaustion import ResultError
from kvplug_testing.contract.general import General
from kvplug_testing.contract.store.calls import ended, is_missed, looked_up
from kvplug_testing.contract.store.pages import KIB, MIB, Batch, batch, held_request, sized_format
from kvplug_testing.contract.store.suite import Place, StoreSuite
from kvplug_testing.waits import until

_BUDGET: Final = 16 * MIB
_NBYTES: Final = 512 * KIB
"""The size of each page. With this budget a store may have memory for pages of one size only."""
_PAGES: Final = 2
LONG_S: Final = 600.0
_AGAIN_S: Final = 0.002
_THREADS: Final = 3
"""The number of threads of a program that exits."""
_GONE: Final = {MissReason.STORE_GONE, MissReason.TIMEOUT, MissReason.ABSENT}
_ERRORS: Final[Mapping[str, type[KvplugError]]] = {
    MissReason.CLOSED: ClosedError,
    MissReason.TIMEOUT: TimeoutError,
    MissReason.STORE_GONE: PeerGoneError,
}


def done(job: Job[Any], what: str) -> Sequence[Any]:
    """Wait for a job to end, and return its results.

    Raises:
        KvplugError: a page was missed; the class of the error follows from the reason.
    """
    results = job.wait(None)
    for reason in results:
        if isinstance(reason, (MissReason, PutReason)) and reason is not MissReason.ABSENT:
            raise _ERRORS.get(str(reason), ResultError)(f"{what} of {len(results)} pages: {reason}")
    return results


@attrs.frozen(eq=False)
class Content:
    """What an end puts in an exchange, and what it gets."""

    mine: PageRequest
    theirs: Batch
    received: PageRequest


class StoreEnd(End):
    """One end of a store. It puts pages, and gets those that the other end puts, or its own."""

    def __init__(self, role: str, suite: StoreSuite, store: Store, place: Place) -> None:
        self.role = role
        self.gone = PeerGoneError if role == "other" and suite.by_link else None
        self.thing = store
        self._place = place
        self._pid = os.getpid()
        self._can = partial(suite.can, store)
        self._is_ended = False

    @functools.cached_property
    def _there(self) -> Batch:
        return pages_of(self._place)

    def calls(self) -> Calls:
        store, pages = self.thing, self._there
        found: dict[str, Any] = {
            "submit_lookup": partial(store.submit_lookup, pages.keys),
            "submit_put": partial(store.submit_put, pages.filled()),
            "submit_get": partial(store.submit_get, pages.empty()),
            "submit_remove": partial(store.submit_remove, pages.keys),
        }
        declare = partial(store.declare, pages.series, pages.keys)
        return found | {"declare": declare} if self._can("declare") else found

    def untimed(self) -> dict[str, Any]:
        store, pages = self.thing, self._there
        found: dict[str, Any] = {
            "usage": store.usage,
            "keys": partial(store.keys, pages.series),
            "subscribe": partial(store.subscribe, lambda event: None),
        }
        for name in ("touch", "expect_reader", "withdraw", "release"):
            found[name] = partial(getattr(store, name), pages.keys)
        return {name: call for name, call in found.items() if self._can(name)}

    def lied_to(self) -> Calls:
        kinds: dict[str, Any] = {
            "submit_lookup": Presence,
            "submit_put": (PutReason, type(None)),
            "submit_get": (MissReason, type(None)),
            "submit_remove": bool,
        }

        def answer(name: str, timeout: float | None) -> None:
            results = self.calls()[name](timeout=timeout).wait(None)
            is_one = len(results) == _PAGES and all(isinstance(each, kinds[name]) for each in results)
            assert is_one, f"{results!r:.300} is not an answer"

        found: dict[str, Any] = {
            name: lambda timeout, call=call: call() for name, call in self.untimed().items()
        }
        return {**self.calls(), **found, **{name: partial(answer, name) for name in kinds}}

    def timed(self) -> Calls:
        return {**self.calls(), "close": self.close}

    def blocking(self) -> Calls:
        return {"submit_put": self._held_put, "submit_get": self._held_get}

    def unclogged(self) -> Sequence[str]:
        return ["submit_put"]

    def doomed(self) -> Sequence[str]:
        """A copy that has begun may end without the store."""
        return []

    def _held_put(self, **timeout: float | None) -> None:
        """Put pages whose copy is held up until the job has ended."""
        request, memory = held_request(pages_of(self._place), filled=True)
        with memory:
            done(self.thing.submit_put(request, **timeout), "a put")

    def _held_get(self, **timeout: float | None) -> None:
        request, memory = held_request(self._there)
        with memory:
            done(self.thing.submit_get(request, **timeout), "a get")

    def clog(self) -> int:
        """Put the pages whose get is held up. Waits for ever: the context's timeout is for the calls that are
        judged."""
        self._keep(self._there)
        return 0

    def exchange(self, content: Content, timeout: float | None) -> Sequence[Any]:
        deadline = Deadline.after(timeout)
        results = done(self.thing.submit_put(content.mine, timeout=timeout), "a put")
        assert {*results} == {None}, f"a put gave {results}"
        while MissReason.ABSENT in (results := self._get(content.received, timeout)):
            if deadline.expired:
                raise TimeoutError("the pages of an exchange have not come")
            time.sleep(_AGAIN_S)
        done(self.thing.submit_remove(content.theirs.keys, timeout=timeout), "a removal")
        return results

    def check(self, content: Content, received: Sequence[Any]) -> None:
        assert {*received} == {None}, f"a get gave {received}"
        assert not (wrong := content.theirs.unlike(content.received, received)), wrong

    def _get(self, request: PageRequest, timeout: float | None) -> Sequence[Any]:
        return done(self.thing.submit_get(request, timeout=timeout), "a get")

    def busy(self, leaves: bool) -> None:
        """Use the store in threads of the program until it exits. Only the store's end ends the threads."""
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
        pages = pages_of(self._place)
        while True:
            done(self.thing.submit_put(pages.filled(), timeout=None), "a put")
            done(self.thing.submit_lookup(pages.keys, timeout=None), "a lookup")
            self._get(pages.empty(), None)
            self.thing.touch(pages.keys)
            self.thing.usage()

    def is_gone(self) -> None:
        """Requests are misses once the end has noticed that its store is gone for good."""

        def is_lost() -> bool:
            results = ended(self.thing.submit_get(self._there.empty()))
            assert {*results} <= {None, *_GONE}, f"a get gave {results}"  # mapped memory may be read longer
            return bool(self.thing.is_lost)

        until(is_lost, what="is_lost of an end whose store is gone for good")
        is_missed(self.thing, self._there, pages_of(self._place))

    def lease(self, keys: Sequence[bytes]) -> bool:
        """Lease pages for a long time. Return whether the store has them."""
        return {*looked_up(self.thing, keys, lease_s=LONG_S)} == {Presence.HELD}

    def put(self, name: str) -> None:
        """Put the pages of that name. Fails if one is not kept."""
        self._keep(pages_of(self._place, name))

    def _keep(self, pages: Batch) -> None:
        results = done(self.thing.submit_put(pages.filled(), timeout=None), "a put")
        assert {*results} == {None}, f"a put gave {results}"

    def close(self, timeout: float | None) -> None:
        self._is_ended = True
        self.thing.close(timeout)
        self._stop_serving()

    def abort(self) -> None:
        self._is_ended = True
        self.thing.abort()
        self._stop_serving()

    def _stop_serving(self) -> None:
        """Not in a forked child: the server is the parent's."""
        if self.role == "first" and self._place.server is not None and os.getpid() == self._pid:
            self._place.server.close()

    def closed(self) -> bool:
        return bool(self.thing.is_lost)


class StoreEnds(Ends):
    """The end that was opened first, and another one."""

    roles: ClassVar[Sequence[str]] = ("first", "other")
    may_break = ("meet", "exchange", "close")  # then the end reports that it is lost
    gives_results = True
    suite: StoreSuite

    def shared(self) -> dict[str, Any]:
        place = self.suite.place(max(_BUDGET, self.suite.budget_bytes))
        place.timeout_s = self.context.get("timeout_s")
        return {**self.context, "place": place.plain}

    @functools.cached_property
    def _place(self) -> Place:
        return Place(**self.context["place"])

    def offer(self) -> str:
        with _opening():
            first = self._place.first or self.suite.open(self._place)  # it may be tried again
            if len(self.roles) > 1:
                self.suite.make_reachable(self._place)
        self._first = self._end(0, first)
        return self._place.address

    def accept(self) -> End:
        return self._first

    def connect(self, role: int, contact: str) -> End:
        self._place.address = contact
        with _opening():
            return self._end(role, self.suite.other(self._place))

    def _end(self, role: int, store: Store) -> End:
        end = StoreEnd(self.roles[role], self.suite, store, self._place)
        self.suite.later(end.abort)  # before the server, which closes the store politely
        return end

    def content(self, role: int, number: int) -> Content:
        mine, theirs = (pages_of(self._place, f"{number} of {self.roles[at]}") for at in (role, role - 1))
        return Content(mine.filled(), theirs, theirs.empty())


def pages_of(place: Place, name: str = "") -> Batch:
    """Return the pages of that name, which are equal at all ends; without a name, new pages."""
    namespace = f"{place.name} {name or uuid.uuid4()}".encode()
    return batch(_PAGES, sized_format(_NBYTES), seal=place.seal, namespace=namespace)


@contextmanager
def _opening() -> Iterator[None]:
    """Raise errors as kvplug does when it opens a store: name what ran out, quote any other error."""
    try:
        with NamedExhaustion("opening a store"):
            yield
    except (KvplugError, AssertionError):  # the suite's own
        raise
    except Exception as e:
        raise ResultError(f"{type(e).__name__}: {e}") from e


class OnlyEnds(StoreEnds):
    """A store that has one end."""

    roles: ClassVar[Sequence[str]] = ("first",)


class StoreGeneral(StoreSuite, General):
    """The general laws for stores."""

    @property
    def lied_to_processes(self) -> str:
        if not self.by_link:
            return f"ends of {self.called} send each other nothing over a link"
        return self.one_end or super().lied_to_processes

    def beside(self, place: Place) -> RemoteHandle:
        """Another end of the place, in another process."""
        self.make_reachable(place)
        child = self.start_forked(RUN_END, self.suite_ref(), 1, {"place": place.plain}, timeout_s=CHILD_S)
        child.send(place.address)
        return RemoteHandle(child)

    def ends(self, **context: Any) -> StoreEnds:
        return (OnlyEnds if self.one_end else StoreEnds)(self, context)
