"""What an engine, or the server of a store, does now, as other programs see it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvplug import AuthenticationError, Config, TransportError
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.assembly.state import SideState
from kvplug.assembly.stores import build_store, serve_store
from kvplug.assembly.watched import LocalProcess, PeerProcess
from kvplug.assembly.watching import watched_sockets
from kvplug.cli.request import explain_request
from kvplug.engine import RequestEnd
from kvplug_testing import waits
from kvplug_testing.engine import FakeEngine, request_of

pytestmark = pytest.mark.timeout(60)

PROMPT = range(100)
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines of this test are the only ones of this user."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def an_address() -> str:
    return f"unix:@kvplug-watched-{os.getpid()}-{next(_numbers)}"


@contextlib.contextmanager
def engines(**config: Any) -> Iterator[tuple[FakeEngine, FakeEngine, str]]:
    """A pair that has moved the KV of one prompt, and the address of its producer."""
    host = an_address()
    options = {"p2p": {"async_load": False}}
    given = {"connector": "p2p", "transport": "cpu", "timeout_s": 20, "options": options, **config}
    producer = Config.from_dict({**given, "role": "producer", "host": host, "engine_id": "prefill"})
    peers = {"peers": [f"{host}-0"], "host": an_address()}
    consumer = Config.from_dict({**given, **peers, "role": "consumer", "engine_id": "decode"})
    with FakeEngine(producer, seed=1) as prefill, FakeEngine(consumer, seed=2) as decode:
        decode.scheduler.wait_until_ready(20)
        _, params = prefill.hand_off(request_of("stored", PROMPT))
        _, found, _ = decode.load(request_of("a", PROMPT, params=params))
        assert found == 96
        yield prefill, decode, f"{host}-0"


def here() -> dict[tuple[str, str], SideState]:
    """The state of each process of this user, by engine and side."""
    found = {}
    for path in watched_sockets():
        with contextlib.closing(LocalProcess(path)) as each:
            (side,) = each.states()
            found[side.engine_id, side.side] = side
    return found


def test_every_side_reports_what_is_open_and_what_was_moved() -> None:
    with engines() as (_, consumer, _):
        found = here()
        assert {*found} == {*itertools.product(("prefill", "decode"), ("scheduler", "worker"))}
        for side in found.values():
            assert (side.connector, side.rank, side.pid) == ("p2p", "0", os.getpid())
            assert side.seconds > 0
        prefill, decode = found["prefill", "worker"], found["decode", "worker"]
        assert {(link.purpose, link.engine_id) for link in prefill.links} == {
            ("p2p-ask", "decode"),
            ("p2p-pull", "decode"),
        }
        assert [link.purpose for link in decode.links] == ["p2p-pull"]
        assert not consumer.worker.contact, "an engine that only loads answers at no address"
        (ours,), (theirs,) = decode.pipes, prefill.pipes
        nbytes = decode.stats["ops"]["load"]["bytes"]
        assert (ours.transport, ours.device) == (theirs.transport, theirs.device) == ("cpu", "cpu")
        assert (ours.sent_bytes, ours.received_bytes) == (0, nbytes)
        assert (theirs.sent_bytes, theirs.received_bytes) == (nbytes, 0)
        assert theirs.claimed_gb_per_s is not None and theirs.claimed_gb_per_s > 0
        assert found["prefill", "scheduler"].status["num_held"] == 1
        consumer.worker.shutdown()
        waits.until(lambda: not here()["prefill", "worker"].pipes, what="the end of the pipe")
        assert [link.purpose for link in here()["prefill", "worker"].links] == ["p2p-ask"]
    assert not here()


def test_the_spans_of_both_ends_are_printed_in_the_order_of_time(capsys: pytest.CaptureFixture[str]) -> None:
    with engines():
        assert explain_request("stored", as_json=True)
        spans = json.loads(capsys.readouterr().out)
    assert {"request", "lease", "load"} <= {span["name"] for span in spans}
    starts = [span["start_ns"] for span in spans]
    assert starts == sorted(starts)


def test_a_load_in_flight_is_named_with_its_source() -> None:
    with engines(options={"p2p": {"async_load": True}}) as (prefill, decode, _):
        prompt = request_of("b", PROMPT, params=prefill.hand_off(request_of("again", PROMPT))[1])
        num, is_async = decode.matched(prompt)
        decode.scheduler.update_state_after_alloc(prompt, (decode.allocate(100),), num)
        planned = decode.plan([])
        decode.worker.bind_connector_metadata(planned.metadata)
        decode.worker.start_load_kv()
        loads = {load["request_id"]: load for load in here()["decode", "worker"].status["loads"]}
        assert is_async and loads["b"]["source"] == "prefill" and loads["b"]["seconds"] > 0


def test_a_thousand_loads_are_counted_and_the_first_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with engines() as (_, decode, _):
        loads = [{"request_id": f"r{number}", "source": "prefill", "seconds": 1.0} for number in range(1000)]
        monkeypatch.setattr(decode.worker, "get_status", lambda: {"loads": loads})
        status = here()["decode", "worker"].status
        assert status["num_loads"] == 1000 and status["loads"] == loads[:64]


@pytest.mark.parametrize(
    "status", [{"loads": object()}, ["no mapping"], RuntimeError("wrong")], ids=["not plain", "list", "error"]
)
def test_a_wrong_status_of_a_connector_hides_nothing_else(
    status: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engines() as (_, decode, _):
        monkeypatch.setattr(decode.worker, "get_status", Mock(side_effect=[status]))
        worker = here()["decode", "worker"]
        assert not worker.status and len(worker.pipes) == 1


# -- at an address -------------------------------------------------------------------------------------


def at(address: str) -> PeerProcess:
    return PeerProcess(ResolvedConfig(Config()), address)


@pytest.mark.parametrize("doctor", ["look", "measure"])
def test_an_engine_answers_every_query_at_its_address(doctor: str) -> None:
    with engines(doctor=doctor) as (prefill, _, address), contextlib.closing(at(address)) as peer:
        failures = prefill.worker.get_stats()["failures"]
        seen = []
        for _ in range(20):  # one conversation has at most 16 questions
            side, *schedulers = peer.states()
            assert (side.engine_id, side.side, len(side.links)) == ("prefill", "worker", 2)
            seen += [(each.engine_id, each.side, each.status["num_held"]) for each in schedulers]
        assert {*seen} == {("prefill", "scheduler", 1)}, "on a busy host it may not answer in time"
        assert not failures and not side.stats["failures"]


def test_an_engine_without_a_doctor_answers_no_query() -> None:
    with engines(doctor="off") as (_, _, address), contextlib.closing(at(address)) as peer:
        assert not here()
        with pytest.raises(TransportError, match="doctor = 'off'"):
            peer.states()


def test_without_the_secret_a_query_over_a_network_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.from_dict({"stores": ["host"], "options": {"host": {"size": "4 MiB"}}})
    monkeypatch.setenv("KVPLUG_SECRET", "5" * 32)
    with serve_store(config, "host", "127.0.0.1:0") as server:
        with contextlib.closing(at(server.contact)) as peer:
            assert [state.side for state in peer.states()] == ["store"]
        monkeypatch.setenv("KVPLUG_SECRET", "6" * 32)
        with contextlib.closing(at(server.contact)) as stranger, pytest.raises(AuthenticationError):
            stranger.states()


def test_the_server_of_a_store_reports_what_it_holds_and_its_clients() -> None:
    address = an_address()
    config = Config.from_dict({"stores": ["host"], "options": {"host": {"size": "4 MiB"}}})
    used = Config.from_dict({"stores": ["host"], "options": {"host": {"contact": address}}})
    with serve_store(config, "host", address), build_store(used) as client:
        assert client.usage().num_pages == 0
        ((key, side),) = here().items()
        waits.until(lambda: here()[key].num_links == 1, what="the link of the client")
        (store,) = side.stores
        assert (side.role, side.side) == ("", "store")
        assert (store.name, store.medium, store.budget_bytes) == ("host", "host", 4 << 20)
        with contextlib.closing(at(address)) as peer:
            assert [state.stores for state in peer.states()] == [(store,)]
    assert not here()


def test_a_peers_store_is_not_shown_as_that_of_the_engine_that_loads_from_it() -> None:
    host, options = an_address(), {"lookup": {"load_policy": "always"}}
    given = {"connector": "lookup", "timeout_s": 20, "options": options, "buffer_size": 32 << 20}
    producer = Config.from_dict({**given, "role": "producer", "host": host, "engine_id": "prefill"})
    peers = {"peers": [f"{host}-0"], "host": an_address()}
    consumer = Config.from_dict({**given, **peers, "role": "consumer", "engine_id": "decode"})

    def is_promised() -> bool:
        asking = request_of(f"asking {next(_numbers)}", PROMPT)
        found, _ = decode.matched(asking)
        decode.finish(asking, (), RequestEnd.ABORTED)
        return found == 96

    with FakeEngine(producer, seed=1) as prefill, FakeEngine(consumer, seed=2) as decode:
        prefill.prefill(request_of("stored", PROMPT))
        prefill.settle()
        waits.until(is_promised, what="a promise of the prompt")
        assert decode.load(request_of("loaded", PROMPT))[1] == 96
        stores = {engine_id: state.stores for (engine_id, side), state in here().items() if side == "worker"}
    assert [store.name for store in stores["prefill"]] == ["host"]
    assert stores["decode"] == ()
