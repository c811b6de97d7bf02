"""A store, or an end that reaches it, has proved its identity and lies (law ALL-10).

One message is changed, of the link between the two or of its pipe. Each call of both ends must end in time.
What is got must be what was put, or a miss, and every other answer must be one to what was asked.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

import attrs

from kvplug import StoreServer
from kvplug.transport import MissReason, Presence, PutReason, Store, StoreLink
from kvplug_testing import peers, waits
from kvplug_testing.contract.lied_to import LiedToOverPipes, report_lies
from kvplug_testing.contract.store.pages import MIB, Batch, sized_format
from kvplug_testing.contract.store.suite import StoreSuite
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.tampering.falsehood import Falsehood
from kvplug_testing.tampering.link import TamperingLink
from kvplug_testing.tampering.victim import CALL_S, Ended, ended

STORES, ENDS = "the store", "the end that reaches it"
"""The two that are lied to."""
_PAGE_BYTES: Final = 10_000


class LyingPeers(StoreSuite, LiedToOverPipes):
    """What a store may say to an end that reaches it over a link, and such an end to a store."""

    _run_ends = f"{__name__}:run_both_ends"

    @property
    def lied_to_processes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        if not self.by_link:
            return f"ends of {self.called} say nothing to each other over a link"
        return self.other_processes or super().lied_to_processes


def run_both_ends(parent: peers.Parent, suite_ref: dict[str, Any], count: int, seed: int) -> str:
    """In a child process: a store, and an end that reaches it."""
    suite: Any = suite_from_ref(suite_ref)
    with ExitStack() as suite._stack:
        suite.warm_up()
        return report_lies(parent, _Conversations(suite), count, seed)


@attrs.frozen
class _Lie:
    to: str
    where: str
    falsehood: Falsehood


class _Conversations:
    def __init__(self, suite: Any) -> None:
        self._suite = suite
        self._places: list[tuple[str, str, int]] = []

    def truth(self) -> list[Ended]:
        conversation = _Conversation(self._suite, None)
        calls = conversation.hold()
        self._places = conversation.places
        return calls

    def lies(self, rng: random.Random) -> Iterator[_Lie]:
        while self._places:
            to, where, at = rng.choice(self._places)
            yield _Lie(to, where, Falsehood(at, rng.getrandbits(32)))

    def lie(self, lie: _Lie) -> tuple[str, list[Ended]]:
        conversation = _Conversation(self._suite, lie)
        calls = conversation.hold()
        return f"to {lie.to}, {lie.where}: {conversation.said or 'the message did not come'}", calls


class _Served:
    """A store whose links are given to :class:`StoreServer` in another form."""

    def __init__(self, store: Store, seen: Callable[[StoreLink], StoreLink]) -> None:
        self._store = store
        self._seen = seen

    def serve(self, link: StoreLink) -> None:
        self._store.serve(self._seen(link))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _Conversation:
    """A store, and an end that reaches it and calls it. Nothing is changed without a lie."""

    def __init__(self, suite: Any, lie: _Lie | None) -> None:
        self._suite = suite
        self._lie = lie
        self._call_s = waits.patience_s if lie is None else CALL_S
        self._calls: list[Ended] = []
        self._links: dict[str, TamperingLink] = {}

    @property
    def said(self) -> str:
        """What was changed, in words; empty: the message did not come."""
        return next((link.said for link in self._links.values() if link.said), "")

    @property
    def places(self) -> list[tuple[str, str, int]]:
        """Whom a message came to, over what, and its number."""
        return [
            (to, where, at)
            for to, link in self._links.items()
            for where, number in link.num_received.items()
            for at in range(number)
        ]

    def hold(self) -> list[Ended]:
        """How each call has ended."""
        suite = self._suite
        with suite.scope():
            place = suite.place(8 * MIB)
            store = suite.open(place)
            here = suite.batch(store, 3, sized_format(_PAGE_BYTES))
            there = suite.batch(store, 3, sized_format(_PAGE_BYTES))
            self._put("put of the store", store, here)
            served: Any = _Served(store, functools.partial(self._seen, STORES))
            server = StoreServer(served, suite._links, suite._new_address())
            suite.later(server.close)
            link = self._seen(ENDS, suite._connect(server.contact, waits.patience_s))
            suite.later(link.close)
            context = attrs.evolve(suite.context(place), timeout_s=self._call_s)
            made = ended("the maker of clients", self._call_s, lambda: suite.make_client(context, link))
            self._calls.append(attrs.evolve(made, value=None))
            if made.value is not None:
                suite.later(made.value.abort)
                self._use(made.value, here, there)
            self._get("get of the store", store, there)
        return self._calls

    def _seen(self, whose: str, link: StoreLink) -> TamperingLink:
        lie = self._lie
        seen = (
            TamperingLink(link, lie.where, lie.falsehood) if lie and lie.to == whose else TamperingLink(link)
        )
        self._links.setdefault(whose, seen)
        return seen

    def _use(self, end: Store, here: Batch, there: Batch) -> None:
        events: list[Any] = []
        if end.has_events:
            self._call("subscribe", lambda: end.subscribe(events.append))
        self._lookup(end, here)
        self._get("get", end, here)
        if self._suite.can(end, "declare"):
            self._call("declare", lambda: end.declare(there.series, there.keys, timeout=self._call_s))
        self._put("put", end, there)
        self._get("get", end, there)
        self._call("touch", lambda: end.touch(there.keys))
        self._call("expect_reader", lambda: end.expect_reader(there.keys))
        self._call("release", lambda: end.release(here.keys))
        self._call("usage", end.usage)
        if self._suite.can(end, "keys"):
            self._call("keys", lambda: end.keys(here.series))
        self._job("submit_remove", lambda: end.submit_remove(here.keys[:1], timeout=self._call_s), 1, bool)
        self._call("close", lambda: end.close(self._call_s))

    # -- calls, and what they may return -------------------------------------------------------

    def _call(self, what: str, run: Callable[[], Any]) -> None:
        self._calls.append(attrs.evolve(ended(what, self._call_s, run), value=None))

    def _job(self, what: str, submit: Callable[[], Any], count: int, *types: Any) -> list[Any] | None:
        """The results of a job, which must be so many of one of these types."""
        call = ended(what, self._call_s, lambda: submit().wait(waits.patience_s))
        results = None if call.error or call.value is None else [*call.value]
        wrong = ""
        fits = results is None or (len(results) == count and all(isinstance(each, types) for each in results))
        if not fits:
            wrong, results = f"{results!r:.300} of {count} pages", None
        self._calls.append(attrs.evolve(call, value=None, wrong=wrong))
        return results

    def _must_be(self, results: list[Any] | None, wanted: Any) -> None:
        """Where nothing was changed, all pages were kept and are got."""
        if self._lie is None and not self._calls[-1].breach() and results != [wanted] * len(results or "?"):
            self._calls[-1] = attrs.evolve(self._calls[-1], wrong=f"{results}, and nothing was changed")

    def _lookup(self, end: Store, pages: Batch) -> None:
        results = self._job(
            "lookup",
            lambda: end.submit_lookup(pages.keys, lease_s=10.0, timeout=self._call_s),
            len(pages),
            Presence,
        )
        self._must_be(results, Presence.HELD)

    def _put(self, what: str, end: Store, pages: Batch) -> None:
        results = self._job(
            what,
            lambda: end.submit_put(pages.filled(), timeout=self._call_s),
            len(pages),
            PutReason,
            type(None),
        )
        self._must_be(results, None)

    def _get(self, what: str, end: Store, pages: Batch) -> None:
        request = pages.empty()
        results = self._job(
            what,
            lambda: end.submit_get(request, timeout=self._call_s),
            len(pages),
            MissReason,
            type(None),
        )
        if results is None:
            return
        if wrong := pages.unlike(request, results):
            self._calls[-1] = attrs.evolve(self._calls[-1], wrong=wrong)
        self._must_be(results, None)
