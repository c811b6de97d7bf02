"""Eight real engines in a full mesh: what they count, and what the model predicts of the same requests.

The engines are the kit's fakes, each in a process of its own, with kvplug's own connectors, stores and links.
They serve the requests one after the other, so that the counts do not depend on who is faster.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack

import attrs
import harness

from kvplug_testing import peers
from kvplug_testing.engine import FakeEngine, request_of
from scale.children import PAGE_TOKENS, PATIENCE_S, config, taken
from scale.cluster import Cluster, Topology
from scale.constants import Constants
from scale.measure import environment

UNIT_PAGES, ANSWER_PAGES = 4, 2
UNIT_TOKENS = UNIT_PAGES * PAGE_TOKENS


@attrs.frozen(kw_only=True)
class Request:
    """A turn: its units are numbers, and the last one is new."""

    engine: int
    units: list[int]


@attrs.define(kw_only=True)
class Seen:
    """Of one engine."""

    events: int = 0
    """That its scheduler received: of its own store and of all peers'."""
    followed: int = 0
    """Stores that its scheduler follows."""
    served: int = 0
    """Links that its worker serves."""
    dialled: int = 0
    """Peers whose stores its worker has dialled."""
    own: int = 0
    """Units loaded from its own store."""
    peer: int = 0
    computed: int = 0


def trace(count: int, engines: int, seed: int = 1) -> list[Request]:
    """Turns of conversations under a few system prompts, each at any engine."""
    rng = random.Random(seed)
    numbers = iter(range(100, 1_000_000))
    conversations: list[list[int]] = []
    found = []
    for _ in range(count):
        if not conversations or rng.random() < 0.3:
            system = min(int(rng.paretovariate(1.0)) - 1, 7)
            conversations.append([2 * system, 2 * system + 1])
        units = conversations[rng.randrange(len(conversations))]
        units.append(next(numbers))
        found.append(Request(engine=rng.randrange(engines), units=list(units)))
        if len(units) > 8:
            conversations.remove(units)
    return found


def predicted(requests: list[Request], engines: int) -> list[Seen]:
    """By the model of who holds what."""
    cluster = Cluster(engines, Topology(name="mesh"), store_units=1 << 20, cache_units=0)
    seen = [Seen(followed=engines, served=engines) for _ in range(engines)]
    dialled: set[tuple[int, int]] = set()
    total = 0
    for request in requests:
        known, at = request.units[:-1], 0
        for source, count in cluster.match(request.engine, known, 0):
            at += count
            if source == request.engine:
                seen[request.engine].own += count
            else:
                seen[request.engine].peer += count
                dialled.add((request.engine, source))
        seen[request.engine].computed += len(known) - at
        cluster.save(request.engine, request.units[at:])
        total += 2 * (1 + ANSWER_PAGES)
    for engine, other in dialled:
        seen[engine].dialled += 1
        seen[other].served += 1
    for each in seen:
        each.events = total
    return seen


@attrs.frozen(kw_only=True)
class Held:
    """By one engine's process at the end."""

    threads: float
    descriptors: float


def expected(known: Constants, seen: Seen, alone: Held) -> Held:
    """By an engine that has seen this, if the same engine alone holds ``alone``."""
    followers, loaders = seen.followed, seen.served - seen.followed
    links = [
        (seen.followed - 1, known.link_of_scheduler),
        (followers - 1, known.link_to_follower),
        (seen.dialled, known.link_to_store),
        (loaders, known.link_to_loader),
    ]
    return Held(
        threads=alone.threads + sum(count * link.threads for count, link in links),
        descriptors=alone.descriptors + sum(count * link.descriptors for count, link in links),
    )


def counted(requests: list[Request], engines: int) -> list[tuple[Seen, Held]]:
    """By real engines."""
    ports, env = harness.free_ports(engines), environment()
    with ExitStack() as stack:
        children = [
            stack.enter_context(peers.start(f"{__file__}:serving", number, ports, timeout_s=300, env=env))
            for number in range(engines)
        ]
        for child in children:
            child.recv(PATIENCE_S)
        for child in children:
            child.send(["ready"])
        for child in children:
            child.recv(PATIENCE_S)
        for request in requests:
            children[request.engine].send(["serve", request.units])
            children[request.engine].recv(PATIENCE_S)
        time.sleep(1.0)  # for the last events
        found = []
        for child in children:
            child.send(["seen"])
            seen, threads, descriptors = child.recv(PATIENCE_S)
            found.append((Seen(**seen), Held(threads=threads, descriptors=descriptors)))
        for child in children:
            child.send(["end"])
        for child in children:
            child.result(PATIENCE_S)
        return found


# -- in the children ---------------------------------------------------------------------------


def serving(parent: peers.Parent, number: int, ports: list[int]) -> None:
    """One engine; its list of peers begins after itself."""
    others = [f"127.0.0.1:{port}" for port in (*ports[number + 1 :], *ports[:number])]
    seen, served = Seen(), 0
    with FakeEngine(config("both", ports[number], peers=others), num_blocks=256, num_layers=1) as engine:
        parent.send("up")
        while (message := parent.recv(600))[0] != "end":
            if message[0] == "ready":
                engine.scheduler.wait_until_ready(PATIENCE_S)
                for replica in engine.scheduler.replicas:
                    replica._listener = lambda *_: _count(seen)
                parent.send("ready")
            elif message[0] == "serve":
                served += 1
                _serve(engine, f"{number}.{served}", message[1], seen)
                parent.send(served)
            else:
                seen.followed = sum(replica.link is not None for replica in engine.scheduler.replicas)
                seen.served = engine.worker._service.num_served
                seen.dialled = sum(peer.link is not None for peer in engine.worker.peers.values())
                parent.send([attrs.asdict(seen), *taken()[:2]])


def _count(seen: Seen) -> None:
    seen.events += 1


def _serve(engine: FakeEngine, name: str, units: list[int], seen: Seen) -> None:
    """Load what is held, compute the rest of the prompt in one step, and the answer page by page."""
    tokens = [token for unit in units for token in range(unit * UNIT_TOKENS, (unit + 1) * UNIT_TOKENS)]
    prompt = len(tokens) - ANSWER_PAGES * PAGE_TOKENS
    request = request_of(name, tokens[:prompt])
    found, _ = engine.matched(request)
    for source, count in engine.scheduler._tracked[name].sources[0] if found else ():
        if source == "host":
            seen.own += count // UNIT_PAGES
        else:
            seen.peer += count // UNIT_PAGES
    seen.computed += len(units) - 1 - found // UNIT_TOKENS
    blocks = engine.allocate(len(tokens))
    engine.scheduler.update_state_after_alloc(request, (blocks,), found)
    report = engine.step([(request, blocks, found, prompt - found)])
    assert not report.invalid_block_ids, "a load failed"
    for end in range(prompt + PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
        request = request_of(name, tokens[:end])
        engine.step([(request, blocks, end - PAGE_TOKENS, PAGE_TOKENS)])
    engine.finish(request, blocks)
    engine.free_blocks.extend(blocks)
    engine.settle()
