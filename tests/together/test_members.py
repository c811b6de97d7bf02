"""Engines that find each other by a directory: they join, leave, restart, are stopped and killed."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import psutil
import pytest

from kvplug import Config
from kvplug_testing import waits
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.peers import Parent, Peer

PAGE = 16
PROMPT_TOKENS = 6 * PAGE + 1
LATE_S = 4.0
"""How much later than its lease an engine may still be listed: etcd counts leases in whole seconds, and test
hosts are busy."""


_addresses = itertools.count()


def prompt_of(number: int) -> range:
    return range(number * 1000, number * 1000 + PROMPT_TOKENS)


def config_of(engine_id: str, url: str, lease_s: float, address: str) -> Config:
    return Config.from_dict(
        {
            "role": "both",
            "engine_id": engine_id,
            "host": address,
            "peers": [url],
            "peers_lease_s": lease_s,
            "timeout_s": 5,
            "connect_timeout_s": 20,
            "options": {
                "host": {"size": 8 << 20, "segment_bytes": 1 << 20},
                "lookup": {"load_policy": "always", "stall_timeout_s": 1},
            },
        }
    )


class Worker(FakeEngine):
    """An engine that runs commands of the test, and between them loads and saves random prompts."""

    def __init__(self, config: Config, *, seed: int) -> None:
        super().__init__(config, seed=seed, num_blocks=64)
        self.engine_id = config.engine_id
        self.chance = random.Random(seed)
        self.numbers = itertools.count()
        self.num_wrong = self.num_loaded = self.num_from_peers = self.num_failed = 0

    def work(self, number: int) -> int:
        """Run a request for that prompt. Returns how many tokens were loaded."""
        prompt = request_of(f"request {next(self.numbers)}", prompt_of(number))
        blocks, loaded, report = self.load(prompt)
        if report.invalid_block_ids:
            self.num_failed += 1
            loaded = 0
        elif not self.is_right(prompt.token_ids, blocks, PROMPT_TOKENS):
            self.num_wrong += 1
        elif loaded:
            self.num_loaded += 1
            self.num_from_peers += "peer" in self.worker.last_route
        self.finish(prompt, blocks)
        self.settle()
        self.free_blocks.extend(blocks)
        return loaded

    def sources(self) -> list[str]:
        """The engines that it follows and is connected to."""
        self.step([])  # it learns which engines have come and left
        links = [replica.link for replica in self.scheduler.replicas if replica.link is not None]
        return sorted({link.agreement.remote.engine_id for link in links} - {self.engine_id})

    def contact(self) -> str:
        return self.worker.contact

    def footprint(self) -> dict[str, int]:
        me = psutil.Process()
        threads = collections.Counter(thread.name for thread in threading.enumerate())
        return {"rss": me.memory_info().rss, "fds": me.num_fds(), **threads}

    def run(self, command: str, argument: Any) -> Any:
        if command == "work":
            return self.work(argument)
        if command == "counts":
            return [self.num_wrong, self.num_loaded, self.num_from_peers, self.num_failed]
        return getattr(self, command)()


def engine(
    parent: Parent,
    engine_id: str,
    url: str,
    lease_s: float,
    address: str,
    seed: int,
    num_prompts: int,
    pause_s: float,
) -> None:
    """One engine, until it receives "leave".

    ``num_prompts``: how many it chooses from, every ``pause_s`` seconds; 0: it works on request only.
    """
    with Worker(config_of(engine_id, url, lease_s, address), seed=seed) as worker:
        parent.send("up")
        due = time.monotonic()
        while True:
            try:
                command, argument = parent.recv(timeout=max(0.0, due - time.monotonic()))
            except TimeoutError:
                if num_prompts:
                    worker.work(min(int(worker.chance.paretovariate(0.7)) - 1, num_prompts - 1))
                due = time.monotonic() + pause_s
                continue
            if command == "leave":
                return
            parent.send(worker.run(command, argument))


@attrs.define
class Running:
    peer: Peer
    address: str

    def run(self, command: str, argument: Any = None) -> Any:
        """The result of a command."""
        self.peer.send([command, argument])
        return self.peer.recv(60)


class Fleet:
    """Engines in processes of their own."""

    def __init__(
        self,
        server: ForkServer,
        url: str,
        stack: Any,
        lease_s: float,
        num_prompts: int = 0,
        pause_s: float = 0.05,
        limit_s: float = 200.0,
    ) -> None:
        self._start, self._url, self.lease_s = server.start, url, lease_s
        self._load, self._limit_s, self._stack = (num_prompts, pause_s), limit_s, stack
        self.running: dict[str, Running] = {}

    def begin(self, engine_id: str) -> None:
        """Start one, and do not wait for it."""
        address = f"unix:@kvplug-members-{os.getpid()}-{next(_addresses)}"
        seed = len(self.running) + 1
        arguments = (engine_id, self._url, self.lease_s, address, seed, *self._load)
        peer = self._start(f"{__file__}:engine", *arguments, timeout_s=self._limit_s)
        self.running[engine_id] = Running(self._stack.enter_context(peer), address)

    def start(self, *engine_ids: str) -> None:
        for engine_id in engine_ids:
            self.begin(engine_id)
        for engine_id in engine_ids:
            assert self.running[engine_id].peer.recv(120) == "up"

    def signal(self, engine_id: str, number: int) -> None:
        os.kill(self.running[engine_id].peer.pid, number)

    def remove(self, engine_id: str) -> Running:
        return self.running.pop(engine_id)

    def is_connected(self, engine_id: str, *others: str) -> bool:
        return self.running[engine_id].run("sources") == sorted(others)

    def wait_until_all_connected(self, *engine_ids: str, within: float) -> None:
        """Until each of these is connected to all of the others of them, and to no other engine."""

        def are_connected() -> bool:
            return all(self.is_connected(each, *(set(engine_ids) - {each})) for each in engine_ids)

        waits.until(are_connected, within, f"connections between {len(engine_ids)} engines")

    def check(self, *engine_ids: str) -> list[int]:
        """Nothing wrong was loaded. Returns the sums of what they have counted."""
        counts = [self.running[each].run("counts") for each in engine_ids]
        sums = [sum(each) for each in zip(*counts, strict=True)]
        assert not sums[0], f"wrong KV was loaded: {counts}"
        return sums


@pytest.fixture(params=["etcd", pytest.param("redis", marks=pytest.mark.variant)])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("directory")
    if request.param == "etcd":
        from etcd_server import EtcdServer

        server: Any = EtcdServer(folder)
        found = f"etcd://{server.address}/fleet"
    else:
        from redis_server import RedisServer

        server = RedisServer(folder)
        found = f"redis://127.0.0.1:{server.port}/0"
    yield found
    server.kill()


@pytest.fixture
def fleet(url: str, fork_server: ForkServer) -> Iterator[Callable[..., Fleet]]:
    with contextlib.ExitStack() as stack:
        yield functools.partial(Fleet, fork_server, url, stack)


@contextlib.contextmanager
def nothing_dials(address: str, for_s: float) -> Iterator[None]:
    """In the block, and for ``for_s`` altogether, no process connects to the address of one that is dead."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("\0" + address.removeprefix("unix:@"))
        listening.listen()
        until = time.monotonic() + for_s
        yield
        listening.settimeout(max(0.1, until - time.monotonic()))
        with pytest.raises(TimeoutError):
            listening.accept()


@pytest.mark.timeout(150)
def test_engines_find_each_other_and_a_dead_one_is_not_dialled_after_its_lease(
    fleet: Callable[..., Fleet],
) -> None:
    made = fleet(2.0)
    made.start("a", "b", "c")
    made.wait_until_all_connected("a", "b", "c", within=20)
    assert made.running["a"].run("work", 1) == 0
    waits.until(lambda: made.running["b"].run("work", 1) > 0, 10, "a page of another engine")
    assert made.check("a", "b", "c")[2] > 0, "no page came from a peer"
    made.signal("a", signal.SIGKILL)
    dead = made.remove("a")
    made.wait_until_all_connected("b", "c", within=made.lease_s + LATE_S)
    time.sleep(made.lease_s + LATE_S)
    with nothing_dials(dead.address, 2 * made.lease_s):
        made.start("a")  # the same id, at another address
    made.wait_until_all_connected("a", "b", "c", within=20)
    assert made.running["c"].run("work", 2) == 0
    waits.until(lambda: made.running["a"].run("work", 2) > 0, 10, "a page for the new process")
    made.running["b"].peer.send(["leave", None])
    made.remove("b")
    made.wait_until_all_connected("a", "c", within=made.lease_s)
    made.check("a", "c")


def run_for(fleet: Fleet, seconds: float, num_engines: int, stopped_s: float) -> None:
    """Let that many engines work, while some are killed, stopped, and started again."""
    names = [f"engine-{number}" for number in range(num_engines)]
    fleet.start(*names)
    fleet.wait_until_all_connected(*names, within=60 + num_engines)
    began = time.monotonic()
    stopped, killed, leaving, steady = names[0], names[1:3], names[3], names[4:]
    fleet.signal(stopped, signal.SIGSTOP)
    for each in killed:
        fleet.signal(each, signal.SIGKILL)
        fleet.remove(each)
    fleet.running[leaving].peer.send(["leave", None])
    fleet.remove(leaving)
    fleet.wait_until_all_connected(*steady, within=fleet.lease_s + LATE_S + num_engines)
    before = {each: fleet.running[each].run("footprint") for each in steady}
    for turn in itertools.count():
        if time.monotonic() - began > seconds - stopped_s / 4 and turn > 2:
            break
        fleet.start(*killed)
        fleet.wait_until_all_connected(*steady, *killed, within=60 + num_engines)
        for each in killed:
            fleet.signal(each, signal.SIGKILL)
            fleet.remove(each)
        fleet.wait_until_all_connected(*steady, within=fleet.lease_s + LATE_S + num_engines)
    time.sleep(max(0.0, stopped_s - (time.monotonic() - began)))
    fleet.signal(stopped, signal.SIGCONT)
    fleet.wait_until_all_connected(*steady, stopped, within=60 + num_engines)
    _, loaded, from_peers, _ = fleet.check(*steady, stopped)
    assert loaded > num_engines and from_peers > num_engines, "they have hardly used each other's pages"
    for each in steady:
        rss = check_footprint(fleet.running[each], len(steady))
        assert rss - before[each]["rss"] < 24 << 20, f"{each} has grown: {before[each]['rss']} to {rss} bytes"


def check_footprint(running: Running, num_peers: int) -> int:
    """Wait until an engine has no more threads and descriptors than it needs. Returns its memory in bytes."""
    limit = time.monotonic() + 60
    while not has_left_nothing(footprint := running.run("footprint"), num_peers):
        assert time.monotonic() < limit, footprint
        time.sleep(0.5)
    return int(footprint["rss"])


def has_left_nothing(footprint: dict[str, int], num_peers: int) -> bool:
    """Whether an engine has no more threads and descriptors than those for its peers. It connects to each to
    follow it and, once it loads from it, to read; and each may have connected to it in the same ways."""
    return (
        footprint["kvplug-lookup-replica"] == num_peers + 1
        and footprint.get("kvplug-lookup-peer", 0) <= 3 * num_peers
        and footprint.get("kvplug-host-client", 0) <= num_peers
        and footprint["kvplug-host-clock"] <= num_peers + 1
        and footprint["fds"] <= 30 + 14 * num_peers
    )


@pytest.mark.full
@pytest.mark.timeout(400)
def test_engines_come_and_go(fleet: Callable[..., Fleet]) -> None:
    run_for(fleet(3.0, num_prompts=60, limit_s=400.0), seconds=60, num_engines=12, stopped_s=60)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_fifty_engines_come_and_go_for_ten_minutes(fleet: Callable[..., Fleet]) -> None:
    """Each request costs the followers of its engine 0.2 s of processor time altogether."""
    made = fleet(10.0, num_prompts=200, pause_s=15.0, limit_s=1500.0)
    run_for(made, seconds=600, num_engines=50, stopped_s=60)
