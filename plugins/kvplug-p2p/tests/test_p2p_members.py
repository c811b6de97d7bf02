"""Several producers and consumers, which a directory names to each other; a producer is started again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplug_testing import waits
from kvplug_testing.engine import FakeEngine, request_of
from p2p_engines import an_address, config, failures, loaded, stored, until_named
from redis_server import RedisServer


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    server = RedisServer(tmp_path)
    yield f"redis://127.0.0.1:{server.port}/0"
    server.kill()


@pytest.mark.timeout(90)
def test_engines_of_a_directory_pull_from_each_other_also_after_a_restart(url: str) -> None:
    def engine(role: str, name: str) -> FakeEngine:
        given = {"engine_id": name, "host": an_address(name), "peers": [url], "peers_lease_s": 2.0}
        return FakeEngine(config(role, **given), seed=len(name), num_blocks=256)

    def check(name: str, prefill: FakeEngine) -> None:
        """Each consumer loads what this producer hands off."""
        for number, decode in enumerate(consumers):
            prompt = range(1000 * number, 1000 * number + 100)
            lent = f"{name} {number}"
            params = stored(prefill, lent, prompt)
            assert loaded(decode, request_of(lent, prompt, params=params)) == 96, (name, number)
            decode.step([])
            until_named(prefill, lent)

    def are_known(*names: str) -> bool:
        """Whether each consumer has links to these producers, and to no others."""
        links = [decode.scheduler.links for decode in consumers]
        return all(sorted(link.agreement.remote.engine_id for link in each) == [*names] for each in links)

    with contextlib.ExitStack() as stack:
        consumers = [stack.enter_context(engine("consumer", name)) for name in ("c", "dd")]
        one, other = (stack.enter_context(engine("producer", name)) for name in ("a", "b"))
        waits.until(lambda: are_known("a", "b"), what="producers that are known")
        check("one", one)
        check("other", other)
        old = stored(one, "old", range(100))
        one.__exit__()
        waits.until(lambda: are_known("b"), what="the end of a producer")
        assert loaded(consumers[0], request_of("gone", range(100), params=old)) == 0
        assert failures(consumers[0].scheduler, "match").keys() <= {"refused", "peer_gone"}
        again = stack.enter_context(engine("producer", "a"))  # at another address
        waits.until(lambda: are_known("a", "b"), what="a producer that has come back")
        assert loaded(consumers[0], request_of("old", range(100), params=old)) == 0
        assert failures(consumers[0].scheduler, "match") == {"forged": 1}
        check("again", again)
        check("other again", other)
