"""Engines in processes of their own, for what is measured: one that saves and serves, and one that follows
it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import harness

import kvplug
from kvplug.engine import Request, TransferStats
from kvplug.transport import Deadline, PageBuffers
from kvplug.transport.store.keys import foreign_key
from kvplug_lookup.connector.matching import Matcher
from kvplug_lookup.connector.peers import PeerStore
from kvplug_lookup.connector.replica import Replica
from kvplug_lookup.connector.sources import Source, followed
from kvplug_testing import peers
from kvplug_testing.engine import FakeEngine, request_of

PAGE_TOKENS = 16
PATIENCE_S = 60.0


def config(role: str, port: int, **more: Any) -> kvplug.Config:
    """As for engines on several hosts: TCP, a secret (in the environment), pages over sockets."""
    return kvplug.Config.from_dict(
        {
            "connector": "lookup",
            "role": role,
            "stores": [] if role == "consumer" else ["host"],
            "host": "127.0.0.1",
            "port": port,
            "transport": "cpu",
            "connect_timeout_s": PATIENCE_S,
            "timeout_s": PATIENCE_S,
            "options": {
                "host": {"map": False, "size": "64 MiB", "segment_bytes": 1 << 20},
                "lookup": {"load_policy": "always"},
            },
            **more,
        }
    )


def taken() -> list[float]:
    """Threads, descriptors, resident bytes and seconds of processor time of this process."""
    with open("/proc/self/statm", encoding="ascii") as f:
        resident = int(f.read().split()[1]) * 4096
    here = peers.Resources.of()
    return [float(len(here.threads)), float(len(here.descriptors)), float(resident), time.process_time()]


# -- the one that saves ------------------------------------------------------------------------


def saving(parent: peers.Parent, port: int) -> None:
    """Answers ``["taken"]``; ``["events", cycles, keys, seconds]``: pages are declared, put and removed."""
    with FakeEngine(config("producer", port), num_blocks=64) as engine:
        parent.send("up")
        while (message := parent.recv(600))[0] != "end":
            if message[0] == "taken":
                parent.send(taken())
            elif message[0] == "events":
                parent.send(_events(engine, *message[1:]))


def _events(engine: FakeEngine, cycles: int, num_keys: int, seconds: float) -> list[float]:
    """Make three events a cycle, evenly over so many seconds. Returns what :func:`taken` does, and the number
    of events."""
    store, series = engine.worker.first_tier.store, engine.worker.first_tier.series
    heard = [0]

    def count(event: Any) -> None:
        heard[0] += 1

    end = store.subscribe(count)
    heard[0] = 0
    memory = PageBuffers.empty(series.format, num_keys)
    began = time.monotonic()
    for cycle in range(cycles):
        put = harness.request(series, memory, b"%d" % cycle, num_keys)
        store.declare(series, put.keys, timeout=PATIENCE_S)
        harness.put(store, put)()
        time.sleep(max(0.0, began + (cycle + 1) * seconds / cycles - time.monotonic()))
    end()
    return [*taken(), float(heard[0])]


# -- the one that follows ----------------------------------------------------------------------


def following(parent: peers.Parent, port: int, serving: int) -> None:
    """Answers ``["taken"]``, ``["follow", count]``, ``["load", count]``, ``["fence", count, rounds]``, each
    with what it has measured."""
    address = f"127.0.0.1:{serving}"
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(
            FakeEngine(config("consumer", port, peers=[address]), seed=2, num_blocks=64)
        )
        engine.scheduler.wait_until_ready(PATIENCE_S)
        sources: list[Source] = []
        parent.send("up")
        while (message := parent.recv(600))[0] != "end":
            if message[0] == "follow":
                for number in range(message[1]):
                    sources.append(followed(engine.scheduler._context, f"more {number}", address))
                    stack.callback(sources[-1].close)
                for source in sources:
                    source.replicas[0].wait_until_ready(Deadline.after(PATIENCE_S))
            elif message[0] == "load":
                for _ in range(message[1]):
                    peer = PeerStore(engine.worker._context, address, engine.worker.shard, "a peer")
                    stack.callback(peer.close)
                    peer.use(lambda store, series: None, lambda error: None, Deadline.after(PATIENCE_S))
                    peer.connected(Deadline.after(PATIENCE_S), retry=True)
            elif message[0] == "fence":
                parent.send(_fences(sources[: message[1]], message[2]))
                continue
            parent.send(taken())


def _fences(sources: list[Source], rounds: int) -> list[float]:
    """Requests for a prompt that no store has, which all are asked about. Returns the seconds of the engine's
    thread to ask, the seconds until all have answered, and of this process's processor time, for
    each round."""
    matcher = Matcher(sources, 1, 2.0, TransferStats())
    request: Request = request_of("nothing", range(128 * PAGE_TOKENS))
    chains = [
        foreign_key(b"nothing", b"%d" % number) for number in range(len(request.token_ids) // PAGE_TOKENS)
    ]
    replicas: list[Replica] = [source.replicas[0] for source in sources]
    asking = answered = 0.0
    before = time.process_time()
    for _ in range(rounds):
        began = time.perf_counter()
        search = matcher.begin()
        asking += time.perf_counter() - began
        while any(replica._ponged < replica._pinged for replica in replicas):
            time.sleep(0.0002)
        answered += time.perf_counter() - began
        began = time.perf_counter()
        found = matcher.held(search, chains, 0)
        asking += time.perf_counter() - began
        assert found == (0, ((),)), found
        time.sleep(0.005)
    used = time.process_time() - before
    return [asking / rounds, answered / rounds, used / rounds]


CHILDREN = str(Path(__file__))
