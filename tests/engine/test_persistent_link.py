"""A link that is made again whenever it is lost: attempts, pauses, errors and ends."""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvplug import ClosedError, HandshakeError, PeerGoneError, ResourceExhaustedError
from kvplug.engine import PersistentLink, persistent_link
from kvplug_testing.waits import until


class Link:
    """A link whose peer is gone once it is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


class Kept(PersistentLink):
    """Notes its links, and why each was lost. ``answers`` are the results of its attempts."""

    def __init__(self, answers: Iterator[Any]) -> None:
        self.num_attempts = 0
        self.links: list[Link] = []
        self.errors: list[Exception | None] = []
        self.use: Callable[[Link], object] = lambda link: link.closed.wait(20)

        def connect(rank: int, purpose: str, *, timeout: float, retry: bool, peer: Any) -> Any:
            assert (rank, purpose, retry, peer) == (3, "a purpose", False, "an address")
            assert 0 < timeout < 60
            self.num_attempts += 1
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        context: Any = SimpleNamespace(peers=SimpleNamespace(connect=connect))
        super().__init__(context, 3, "a purpose", name="a worker", peer="an address", thread="kept")

    def _follow(self, link: Any) -> None:
        self.links.append(link)
        self.use(link)

    def _lose(self, error: Exception | None) -> None:
        self.errors.append(error)


@pytest.fixture
def keep() -> Iterator[Callable[..., Kept]]:
    made: list[Kept] = []

    def make(*answers: Any) -> Kept:
        """The last answer is repeated; a function makes a new one each time."""
        every = itertools.chain(answers, itertools.repeat(answers[-1]))
        made.append(Kept(each() if callable(each) else each for each in every))
        return made[-1]

    yield make
    for each in made:
        each.close()
    until(lambda: not any(thread.name == "kept" for thread in threading.enumerate()))


def test_it_connects_until_the_peer_is_up_and_again_after_each_loss(keep: Any) -> None:
    kept = keep(PeerGoneError("not up"), PeerGoneError("not up"), Link)
    kept.start()
    for count in (1, 2):
        until(lambda count=count: len(kept.links) == count)
        kept.links[-1].close()
    until(lambda: len(kept.links) == 3)
    assert [str(error) for error in kept.errors] == ["not up", "not up", "None", "None"]
    assert not kept.links[-1].closed.is_set()


def test_a_link_is_closed_and_replaced_when_its_use_fails(
    keep: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kept = keep(Link)

    def fail(link: Link) -> None:
        kept.use = lambda link: link.closed.wait(20)
        raise ValueError("malformed")

    kept.use = fail
    kept.start()
    until(lambda: len(kept.links) == 2)
    assert kept.links[0].closed.is_set()
    assert [type(error) for error in kept.errors] == [ValueError]
    assert "lost a worker: malformed" in caplog.messages


def test_the_thread_ends_when_it_is_ended_or_nothing_can_be_connected_to_any_more(keep: Any) -> None:
    ended, shut_down = keep(Link), keep(ClosedError("shut down"))
    for each in (ended, shut_down):
        each.start()
    until(lambda: ended.links)
    ended.end()
    ended.end()
    assert ended.links[0].closed.is_set()
    until(lambda: not any(thread.name == "kept" for thread in threading.enumerate()))
    assert len(ended.links) == shut_down.num_attempts == 1


def test_a_link_that_is_made_while_it_is_ended_is_closed_unused(keep: Any) -> None:
    link = Link()

    def late() -> Link:
        kept.end()
        return link

    kept = keep(late)
    kept.start()
    until(link.closed.is_set)
    assert not kept.links


def test_each_cause_is_logged_once_and_a_peer_that_is_not_up_yet_is_no_warning(
    keep: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(persistent_link, "_PAUSES_S", (0.0, 0.0))
    caplog.set_level(logging.INFO)
    kept = keep(*[PeerGoneError("not up")] * 20, *[ValueError("odd")] * 20, Link)
    kept.start()
    until(lambda: kept.links)
    mine = [(each.levelname, each.message) for each in caplog.records if "worker" in each.message]
    assert mine == [("INFO", "cannot reach a worker: not up"), ("WARNING", "cannot reach a worker: odd")]


def test_after_a_refused_handshake_it_waits_longer_than_for_a_peer_that_is_not_up(
    keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistent_link, "_PAUSES_S", (0.0, 0.0))
    refused, down = keep(HandshakeError("another model")), keep(PeerGoneError("not up"))
    for each in (refused, down):
        each.start()
    until(lambda: down.num_attempts > 1100, what="more attempts than a float has exponents")
    until(lambda: refused.errors)
    assert refused.num_attempts == 1


def test_a_resource_that_ran_out_is_named(keep: Any) -> None:
    kept = keep(OSError(errno.EMFILE, "Too many open files"), Link)
    kept.start()
    until(lambda: kept.links)
    assert isinstance(kept.errors[0], ResourceExhaustedError)
    assert "connecting to a worker" in str(kept.errors[0])
