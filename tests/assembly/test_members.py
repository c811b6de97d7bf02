"""Announcements of engines: what counts, what does not, and a directory that fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import attrs
import pytest

from kvplug import Config, ConfigError, TimeoutError, check_config
from kvplug.assembly.members import Announcement, DirectoryMembers, fingerprint_of
from kvplug.assembly.resolve import EPOCH
from kvplug.engine import Engine, ModelInfo
from kvplug.errors import UnknownNameError
from kvplug.metrics.stats import TransferStats
from kvplug.net.deadline import Deadline
from kvplug.net.trust.credentials import Credentials, Secret
from kvplug.transport import Directory
from kvplug_testing import waits

MODEL = ModelInfo(num_layers=2, num_kv_heads=2, head_size=8, dtype="float32", weights="w")
LEASE_S = 0.5


class InMemory(Directory):
    """Entries in a dictionary, without leases. Calls raise :attr:`error` while there is one."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.error: Exception | None = None
        self.num_calls = 0

    def _call(self) -> None:
        self.num_calls += 1
        if self.error is not None:
            raise self.error

    def announce(self, name: str, entry: bytes, lease_s: float) -> None:
        self._call()
        self.kept[name] = entry

    def withdraw(self, name: str) -> None:
        self._call()
        self.kept.pop(name, None)

    def entries(self) -> Mapping[str, bytes]:
        self._call()
        return dict(self.kept)


class Follower:
    """Records the calls of a listener."""

    def __init__(self) -> None:
        self.engines: tuple[Engine, ...] = ()
        self.were_stale: list[bool] = []

    def __call__(self, engines: tuple[Engine, ...], is_stale: bool) -> None:
        self.engines = engines
        self.were_stale.append(is_stale)

    def has(self, *engine_ids: str) -> bool:
        return [engine.engine_id for engine in self.engines] == [*engine_ids]


@pytest.fixture
def directory() -> InMemory:
    return InMemory()


@pytest.fixture
def members(directory: InMemory, request: pytest.FixtureRequest) -> Any:
    def made(engine_id: str, rank: int = 0, num_workers: int = 1, secret: str = "", **given: Any) -> Any:
        found = DirectoryMembers(
            directory,
            url=given.get("url", "memory://127.0.0.1:1"),
            about=Announcement(
                engine_id=engine_id,
                epoch=EPOCH,
                rank=rank,
                num_workers=num_workers,
                contact="",
                role="both",
                model=fingerprint_of(given.get("model", MODEL)),
            ),
            credentials=Credentials(Secret(secret) if secret else None),
            lease_s=LEASE_S,
            stats=given.get("stats") or TransferStats(),
        )
        request.addfinalizer(found.close)
        return found

    return made


def failures(stats: TransferStats) -> dict[str, int]:
    """Failures of rounds, by reason."""
    found: Any = stats.take()
    return dict(found["failures"]["members"])


def test_an_engine_is_there_when_all_of_its_workers_are(members: Any, directory: InMemory) -> None:
    follower = Follower()
    members("reader").follow(follower)
    first, second = members("two", 0, 2), members("two", 1, 2)
    first.announce("unix:@two-0")
    waits.until(lambda: "two/0" in directory.kept)
    time.sleep(LEASE_S)
    assert follower.has()
    second.announce("unix:@two-1")
    waits.until(lambda: follower.has("two"))
    contacts = {rank: contact.partition("#")[0] for rank, contact in follower.engines[0].contacts.items()}
    assert contacts == {0: "unix:@two-0", 1: "unix:@two-1"}
    others = {
        fingerprint_of(attrs.evolve(MODEL, **{name: value}))
        for name, value in (("head_size", 4), ("weights", "x"))
    }
    assert follower.engines[0].model == fingerprint_of(MODEL) and fingerprint_of(MODEL) not in others
    second.close()
    waits.until(lambda: follower.has())


def test_an_announcement_without_the_secret_does_not_count(
    members: Any, directory: InMemory, caplog: pytest.LogCaptureFixture
) -> None:
    follower, stats = Follower(), TransferStats()
    members("reader", secret="0123456789abcdef", stats=stats).follow(follower)
    members("friend", secret="0123456789abcdef").announce("unix:@friend")
    with caplog.at_level(logging.WARNING):
        members("stranger").announce("unix:@stranger")
        members("enemy", secret="fedcba9876543210").announce("unix:@enemy")
        waits.until(lambda: {"stranger/0", "enemy/0", "friend/0"} <= directory.kept.keys())
        time.sleep(LEASE_S)
    assert follower.has("friend")
    assert caplog.text.count("has no proof made with this deployment's secret") == 2, "each is logged once"
    directory.kept["renamed/0"] = directory.kept["friend/0"]  # a proof is of one name only
    time.sleep(LEASE_S)
    assert follower.has("friend")
    assert failures(stats)["forged"] >= 2


def test_an_invalid_announcement_is_ignored(members: Any, directory: InMemory) -> None:
    entries = [b"", b"- ", b"- {}", b"- []", b"- nothing", b"\xff\xfe", b"- " + b"1" * 20_000]
    entries.append(b"- " + b"[" * 10_000)
    directory.kept |= {f"broken-{number}/0": entry for number, entry in enumerate(entries)}
    follower = Follower()
    members("reader").follow(follower)
    members("friend").announce("unix:@friend")
    waits.until(lambda: follower.has("friend"))


def test_a_directory_that_fails_changes_nothing_and_is_logged_once(
    members: Any, directory: InMemory, caplog: pytest.LogCaptureFixture
) -> None:
    follower, stats = Follower(), TransferStats()
    reader = members("reader", stats=stats)
    reader.follow(follower)
    members("friend").announce("unix:@friend")
    waits.until(lambda: follower.has("friend"))
    with caplog.at_level(logging.INFO):
        directory.error = ConnectionRefusedError("no server")
        waits.until(lambda: follower.were_stale[-1], 10, "a directory that is stale")
        assert follower.has("friend")
        assert caplog.text.count("no server") == 2, "once for each of the two"
        directory.error = None
        waits.until(lambda: "answers again" in caplog.text and not follower.were_stale[-1])
    directory.kept.pop("friend/0")  # its process announces it again
    waits.until(lambda: follower.has("friend") and not follower.were_stale[-1])
    assert failures(stats)["peer_gone"] > 0


def test_a_listener_that_failed_is_called_again(members: Any, directory: InMemory) -> None:
    members("other").announce("unix:@other")
    waits.until(lambda: directory.kept)
    calls: list[tuple[Engine, ...]] = []

    def fails_once(engines: tuple[Engine, ...], is_stale: bool) -> None:
        calls.append(engines)
        if len(calls) == 1:
            raise RuntimeError("can't start new thread")

    members("reader").follow(fails_once)
    waits.until(lambda: len(calls) == 2)
    assert calls[0] == calls[1] != ()


def test_a_wait_for_a_directory_that_never_answers_has_the_reason(members: Any, directory: InMemory) -> None:
    directory.error = ConnectionRefusedError("no server")
    reader = members("reader")
    reader.follow(Follower())
    with pytest.raises(TimeoutError, match="no server"):
        reader.wait_until_known(Deadline.after(0.3))


def test_an_engine_at_our_own_address_is_named_and_not_followed(
    members: Any, directory: InMemory, caplog: pytest.LogCaptureFixture
) -> None:
    follower, stats = Follower(), TransferStats()
    ours = members("ours", stats=stats)
    ours.follow(follower)
    ours.announce("127.0.0.1:29555")
    members("twin").announce("127.0.0.1:29555")  # of another host, for example
    members("good").announce("198.18.0.2:29555")
    waits.until(lambda: follower.has("good") and "twin" in caplog.text)
    time.sleep(LEASE_S)
    assert follower.has("good")
    assert caplog.text.count("the announcement 'twin/0' is ignored: its address is this engine's own") == 1
    assert failures(stats).keys() == {"refused"}


def test_an_unknown_directory_is_named_with_the_others() -> None:
    config = Config.from_dict({"role": "both", "peers": ["zookeeper://a:1"], "connector": "lookup"})
    assert (config.directory, config.peer_addresses) == ("zookeeper://a:1", ())
    with pytest.raises((ConfigError, UnknownNameError), match="no directory named 'zookeeper'"):
        check_config(config)
