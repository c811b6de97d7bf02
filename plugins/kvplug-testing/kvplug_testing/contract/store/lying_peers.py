"""A store, or an end that reaches it, has proved its identity and lies (law ALL-10).

One message is changed, of the link between the two or of its pipe. Each call of both ends must end in time.
What is got must be what was put, or a miss, and every other answer must be one to what was asked.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import attrs

from kvplug import StoreServer
from kvplug.transport import Job, MissReason, Presence, PutReason, Store, StoreLink
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
        """Whom a message came to, over what, and its number."""

    def truth(self) -> list[Ended]:
        conversation = _Conversation(self._suite, None)
        self._places = [
            (to, where, at)
            for to, link in conversation.links.items()
            for where, number in link.num_received.items()
            for at in range(number)
        ]
        return conversation.calls

    def lies(self, rng: random.Random) -> Iterator[_Lie]:
        while self._places:
            to, where, at = rng.choice(self._places)
            yield _Lie(to, where, Falsehood(at, rng.getrandbits(32)))

    def lie(self, lie: _Lie) -> tuple[str, list[Ended]]:
        conversation = _Conversation(self._suite, lie)
        said = next((link.said for link in conversation.links.values() if link.said), "nothing came")
        return f"to {lie.to}, {lie.where}: {said}", conversation.calls


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
        self._lie = lie
        self._call_s = waits.patience_s if lie is None else CALL_S
        self.calls: list[Ended] = []
        self.links: dict[str, TamperingLink] = {}
        with suite.scope():
            self._hold(suite)

    def _hold(self, suite: Any) -> None:
        place = suite.place(8 * MIB)
        store = suite.open(place)
        here, there = (suite.batch(store, 3, sized_format(10_000)) for _ in range(2))
        self._put(store, here)
        served: Any = _Served(store, functools.partial(self._seen, STORES))
        server = StoreServer(served, suite._links, suite._new_address())
        suite.later(server.close)
        link = self._seen(ENDS, suite._connect(server.contact, waits.patience_s))
        suite.later(link.close)
        context = attrs.evolve(suite.context(place), timeout_s=self._call_s)
        if end := self._call("the maker of clients", lambda: suite.make_client(context, link)):
            suite.later(end.abort)
            self._use(end, here, there, functools.partial(suite.can, end))
        self._get(store, there)

    def _seen(self, whose: str, link: StoreLink) -> TamperingLink:
        lie = self._lie
        lied_to = lie is not None and lie.to == whose
        seen = TamperingLink(link, lie.where, lie.falsehood) if lie and lied_to else TamperingLink(link)
        self.links.setdefault(whose, seen)
        return seen

    def _use(self, end: Store, here: Batch, there: Batch, can: Callable[[str], bool]) -> None:
        if end.has_events:
            self._call("subscribe", lambda: end.subscribe(lambda event: None))
        self._job("lookup", lambda s: end.submit_lookup(here.keys, timeout=s), [Presence.HELD] * 3, Presence)
        self._get(end, here)
        if can("declare"):
            self._call("declare", lambda: end.declare(there.series, there.keys, timeout=self._call_s))
        self._put(end, there)
        self._get(end, there)
        self._call("touch", lambda: end.touch(there.keys))
        self._call("expect_reader", lambda: end.expect_reader(there.keys))
        self._call("release", lambda: end.release(here.keys))
        self._call("usage", end.usage)
        if can("keys"):
            self._call("keys", lambda: end.keys(here.series))
        self._job("submit_remove", lambda s: end.submit_remove(here.keys[:1], timeout=s), [True], bool)
        self._call("close", lambda: end.close(self._call_s))

    def _put(self, end: Store, pages: Batch) -> None:
        self._job(
            "put", lambda s: end.submit_put(pages.filled(), timeout=s), [None] * 3, (PutReason, type(None))
        )

    def _get(self, end: Store, pages: Batch) -> None:
        request = pages.empty()
        self._job(
            "get",
            lambda s: end.submit_get(request, timeout=s),
            [None] * 3,
            (MissReason, type(None)),
            functools.partial(pages.unlike, request),
        )

    def _call(self, what: str, run: Callable[[], Any]) -> Any:
        call = ended(what, self._call_s, run)
        self.calls.append(attrs.evolve(call, value=None))
        return call.value

    def _job(
        self,
        what: str,
        submit: Callable[[float], Job[Any]],
        true: list[Any],
        kinds: Any,
        unlike: Callable[[list[Any]], str] = lambda results: "",
    ) -> None:
        """The results of a job are as many, of these kinds; and the true ones where nothing was changed."""
        call = ended(what, self._call_s, lambda: [*submit(self._call_s).wait(waits.patience_s)])
        results, wrong = call.value, ""
        if results is not None:
            if len(results) != len(true) or not all(isinstance(each, kinds) for each in results):
                wrong = f"{results!r:.300}"
            else:
                wrong = unlike(results)
            if self._lie is None and results != true:
                wrong = f"{results}, and nothing was changed"
        self.calls.append(attrs.evolve(call, value=None, wrong=wrong))
