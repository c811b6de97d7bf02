"""Hit rates of ways to evict pages, on traces of requests to language models.

    python benchmarks/eviction.py [--requests N] [--seed N] [--markdown FILE] [--handed-over]

A trace is a sequence of prompts, each a sequence of pages. A page is used with the pages before it, so a
hit counts only up to the first page that is missing; the missing pages are then computed and kept. The hit
rate is the part of all pages of the prompts that were found. The budget is a part of the distinct pages of
the trace.

- **chats**: conversations of several turns, whose system prompts follow a Zipf law; a user takes a while for
  the next turn, and the other conversations go on meanwhile.
- **chats and scans**: the same, and each third prompt is a long document that is seen once.
- **agents**: a few long prefixes (instructions and tools), under each of which many runs take short steps.

``forward`` notes the use of a prompt's pages from the first to the last, ``backward`` from the last to the
first, so that of two pages that were used together the one further back is evicted first. vLLM's offloading
to CPU memory and LMCache evict by LRU unless told otherwise; both note uses backward, and new pages as they
come, forward. "host" is what the store "host" runs; "ARC" is the algorithm as its paper has it.

With ``--handed-over``: prefill saves the pages of each prompt, and decode loads them while prefill saves
those of others. Up to 1, 8 or 32 prompts are in flight: saved, and not loaded. Decode loads any of them
next. Sizes of the store are multiples of the most pages that wait for decode at any time. The figures are
prompts for which decode does not find every page.

- **documents**: each prompt is seen once.
- **chats**: as above, so that prompts in flight share pages with each other and with earlier ones.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol

import harness

from kvplug_host.eviction import Eviction

Prompt = Sequence[Hashable]
BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.4)
IN_FLIGHT = (1, 8, 32)
TIMES = (1, 1.5, 2, 5, 20)


class Policy(Protocol):
    """Decides which keys stay, of at most ``size``."""

    def __contains__(self, key: Hashable) -> bool: ...
    def use(self, key: Hashable) -> None:
        """A key that is held was used."""

    def add(self, key: Hashable) -> None:
        """A key comes, and another one may go."""


# -- the candidates ----------------------------------------------------------------------------


class Lru:
    """The least recently used key goes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys: OrderedDict[Hashable, None] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def use(self, key: Hashable) -> None:
        self._keys.move_to_end(key)

    def add(self, key: Hashable) -> None:
        while len(self._keys) >= self._size:
            self._keys.popitem(last=False)
        self._keys[key] = None


class S3Fifo:
    """Three queues (Yang and others, "FIFO queues are all you need for cache eviction", SOSP 2023).

    A new key begins in a small queue; one that was used there moves on to the main queue, the others go, and
    are remembered for a while: one that comes back begins in the main queue.
    """

    SMALL, MOST = 0.1, 3

    def __init__(self, size: int) -> None:
        self._size = size
        self._small_size = max(1, int(size * self.SMALL))
        self._small: OrderedDict[Hashable, None] = OrderedDict()
        self._main: OrderedDict[Hashable, None] = OrderedDict()
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._uses: dict[Hashable, int] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._uses

    def use(self, key: Hashable) -> None:
        self._uses[key] = min(self._uses[key] + 1, self.MOST)

    def add(self, key: Hashable) -> None:
        while len(self._uses) >= self._size:
            self._evict()
        if self._ghosts.pop(key, False) is None:
            self._main[key] = None
        else:
            self._small[key] = None
        self._uses[key] = 0

    def _evict(self) -> None:
        if len(self._small) >= self._small_size or not self._main:
            while self._small:
                key, _ = self._small.popitem(last=False)
                if self._uses[key]:
                    self._main[key] = None
                    self._uses[key] = 0
                    continue
                del self._uses[key]
                self._ghosts[key] = None
                while len(self._ghosts) > self._size:
                    self._ghosts.popitem(last=False)
                return
        while self._main:
            key, _ = self._main.popitem(last=False)
            if not self._uses[key]:
                del self._uses[key]
                return
            self._main[key] = None
            self._uses[key] -= 1


class Arc:
    """Adapts between recency and frequency (Megiddo and Modha, "ARC", FAST 2003)."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._goal = 0.0
        self._once: OrderedDict[Hashable, None] = OrderedDict()
        self._often: OrderedDict[Hashable, None] = OrderedDict()
        self._once_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._often_ghosts: OrderedDict[Hashable, None] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._once or key in self._often

    def use(self, key: Hashable) -> None:
        self._once.pop(key, None)
        self._often[key] = None
        self._often.move_to_end(key)

    def add(self, key: Hashable) -> None:
        once, often = len(self._once_ghosts), len(self._often_ghosts)
        if key in self._once_ghosts:
            self._goal = min(self._size, self._goal + max(1.0, often / once))
            self._replace(False)
            del self._once_ghosts[key]
            self._often[key] = None
        elif key in self._often_ghosts:
            self._goal = max(0.0, self._goal - max(1.0, once / often))
            self._replace(True)
            del self._often_ghosts[key]
            self._often[key] = None
        else:
            held_once = len(self._once) + once
            if held_once == self._size:
                if len(self._once) < self._size:
                    self._once_ghosts.popitem(last=False)
                    self._replace(False)
                else:
                    self._once.popitem(last=False)
            elif held_once < self._size and held_once + len(self._often) + often >= self._size:
                if held_once + len(self._often) + often == 2 * self._size:
                    self._often_ghosts.popitem(last=False)
                self._replace(False)
            self._once[key] = None

    def _replace(self, from_often: bool) -> None:
        if len(self._once) + len(self._often) < self._size:
            return
        once = len(self._once)
        if once and (once > self._goal or (from_often and once == self._goal)):
            key, _ = self._once.popitem(last=False)
            self._once_ghosts[key] = None
        elif self._often:
            key, _ = self._often.popitem(last=False)
            self._often_ghosts[key] = None
        else:
            key, _ = self._once.popitem(last=False)
            self._once_ghosts[key] = None


class Host:
    """What the store "host" runs."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._order = Eviction(lambda: 0.0)
        self._keys: dict[bytes, None] = {}
        self._expected: dict[bytes, int] = {}

    def __contains__(self, key: Hashable) -> bool:
        return _bytes(key) in self._keys

    def use(self, key: Hashable) -> None:
        self._order.use(_bytes(key))

    def add(self, key: Hashable) -> None:
        while len(self._keys) >= self._size:
            victim = self._order.victim(lambda key: True) or self._order.longest_waiting(lambda key: True)
            assert victim is not None
            del self._keys[victim]
        self._keys[_bytes(key)] = None
        self._order.add(_bytes(key), self._expected.pop(_bytes(key), 0))

    def expect(self, key: Hashable) -> None:
        if key in self:
            self._order.expect(_bytes(key))
        else:
            self._expected[_bytes(key)] = self._expected.get(_bytes(key), 0) + 1

    def read(self, key: Hashable) -> None:
        self._order.read(_bytes(key))


@functools.cache
def _bytes(key: Hashable) -> bytes:
    return repr(key).encode()


POLICIES: dict[str, tuple[Callable[[int], Policy], bool, bool]] = {
    "LRU, as vLLM and LMCache": (Lru, True, False),
    "LRU, backward": (Lru, True, True),
    "S3-FIFO, backward": (S3Fifo, True, True),
    "ARC, backward": (Arc, True, True),
    "host": (Host, True, True),
}
"""Makes the policy; whether uses, and whether new pages, are noted backward."""


# -- the traces --------------------------------------------------------------------------------


def zipf(rng: random.Random, count: int, exponent: float) -> Callable[[], int]:
    """Draws 0 to ``count`` - 1, each with a probability of 1 / (rank to the power of ``exponent``)."""
    sums = list(itertools.accumulate(1 / rank**exponent for rank in range(1, count + 1)))
    return lambda: bisect.bisect_left(sums, rng.random() * sums[-1])


def chats(rng: random.Random, num_requests: int, scans: float = 0.0) -> Iterator[Prompt]:
    """System prompts of 10 to 60 pages, 200 of them; turns of 2 to 20 pages; 6 turns in the mean."""
    draw = zipf(rng, 200, 1.0)
    systems = [[("system", number, page) for page in range(rng.randint(10, 60))] for number in range(200)]
    waiting: list[tuple[int, int, list[Hashable]]] = []
    """(when, which, its pages): conversations whose users think about the next turn."""
    fresh = itertools.count()
    for now in range(num_requests):
        if rng.random() < scans:
            number = next(fresh)
            yield [("document", number, page) for page in range(rng.randint(60, 240))]
            continue
        if waiting and waiting[0][0] <= now:
            _, number, pages = waiting.pop(0)
        else:
            number, pages = next(fresh), list(systems[draw()])
        pages = [*pages, *(("chat", number, len(pages) + page) for page in range(rng.randint(2, 20)))]
        yield pages
        if rng.random() < 5 / 6:
            later = now + 1 + int(rng.expovariate(1 / 150))
            bisect.insort(waiting, (later, number, pages), key=lambda each: each[:2])


def agents(rng: random.Random, num_requests: int) -> Iterator[Prompt]:
    """Prefixes of 150 to 400 pages, 30 of them; 12 runs at a time, with 20 steps of 1 to 6 pages each."""
    draw = zipf(rng, 30, 0.8)
    prefixes = [[("tools", number, page) for page in range(rng.randint(150, 400))] for number in range(30)]
    fresh = itertools.count()
    running: list[tuple[int, list[Hashable]]] = []
    for _ in range(num_requests):
        while len(running) < 12:
            running.append((next(fresh), list(prefixes[draw()])))
        at = rng.randrange(len(running))
        number, pages = running[at]
        pages = [*pages, *(("step", number, len(pages) + page) for page in range(rng.randint(1, 6)))]
        yield pages
        if rng.random() < 1 / 20:
            del running[at]
        else:
            running[at] = (number, pages)


def documents(rng: random.Random, num_requests: int) -> Iterator[Prompt]:
    """Prompts of 60 to 240 pages that are seen once."""
    for number in range(num_requests):
        yield [("document", number, page) for page in range(rng.randint(60, 240))]


def in_flight(rng: random.Random, prompts: Iterable[Prompt], most: int) -> Iterator[tuple[str, Prompt]]:
    """ "save" and "load" of each prompt; at most so many are saved and not loaded."""
    waiting: list[Prompt] = []
    for prompt in prompts:
        yield "save", prompt
        waiting.append(prompt)
        if len(waiting) == most:
            chosen = waiting.pop(rng.randrange(len(waiting)))
            yield "load", chosen


def most_waiting(calls: Iterable[tuple[str, Prompt]]) -> int:
    """The most pages that are saved and not loaded by all for whom they were saved, at any time."""
    waiting: Counter[Hashable] = Counter()
    most = 0
    for call, prompt in calls:
        if call == "save":
            waiting.update(prompt)
            most = max(most, len(waiting))
        else:
            waiting.subtract(prompt)
            for key in prompt:
                if not waiting[key]:
                    del waiting[key]
    return most


def traces(seed: int, num_requests: int) -> dict[str, list[Prompt]]:
    return {
        "chats": list(chats(random.Random(seed), num_requests)),
        "chats and scans": list(chats(random.Random(seed), num_requests, scans=1 / 3)),
        "agents": list(agents(random.Random(seed), num_requests)),
    }


# -- the measurement ---------------------------------------------------------------------------


def hit_rate(
    policy: Policy, trace: Sequence[Prompt], uses_backward: bool = False, adds_backward: bool = False
) -> float:
    found = total = 0
    for prompt in trace:
        hits = next((at for at, key in enumerate(prompt) if key not in policy), len(prompt))
        found += hits
        total += len(prompt)
        used, new = prompt[:hits], prompt[hits:]
        for key in reversed(used) if uses_backward else used:
            if key in policy:
                policy.use(key)
        for key in reversed(new) if adds_backward else new:
            if key not in policy:
                policy.add(key)
    return found / total


def lost_rate(policy: Policy, calls: Iterable[tuple[str, Prompt]]) -> float:
    """The share of prompts that lacked a page when they were loaded."""
    lost = loaded = 0
    for call, prompt in calls:
        if call == "save":
            for key in reversed(prompt):
                if isinstance(policy, Host):
                    policy.expect(key)
                elif key in policy:
                    policy.use(key)
            for key in reversed(prompt):
                if key not in policy:
                    policy.add(key)
        else:
            held = [key for key in prompt if key in policy]
            for key in reversed(held):
                policy.read(key) if isinstance(policy, Host) else policy.use(key)
            loaded += 1
            lost += len(held) < len(prompt)
    return lost / loaded


def measure_handed_over(seed: int, num_requests: int) -> list[list[str]]:
    """A row for each trace, number of prompts in flight and policy: lost prompts for each size in percent."""
    rows = []
    makers: dict[str, Callable[[int], Policy]] = {"LRU": Lru, "ARC": Arc, "host": Host}
    for name, make_prompts in {"documents": documents, "chats": chats}.items():
        for most in IN_FLIGHT:
            prompts = make_prompts(random.Random(seed), num_requests)
            calls = list(in_flight(random.Random(seed), prompts, most))
            pages = most_waiting(calls)
            for called, make in makers.items():
                lost = [lost_rate(make(int(pages * times)), calls) for times in TIMES]
                rows.append([name, most, called, *(f"{100 * rate:.1f}" for rate in lost)])
    return rows


def measure(seed: int, num_requests: int) -> list[list[str]]:
    """A row for each trace and policy, with the hit rate for each budget in percent."""
    rows = []
    for name, trace in traces(seed, num_requests).items():
        distinct = len({key for prompt in trace for key in prompt})
        most = hit_rate(Lru(distinct + 1), trace)
        for called, (make, *backward) in POLICIES.items():
            rates = [hit_rate(make(max(1, int(distinct * part))), trace, *backward) for part in BUDGETS]
            rows.append([name, called, *(f"{100 * rate:.1f}" for rate in rates), f"{100 * most:.1f}"])
    return rows


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--handed-over", action="store_true")
    given = parser.parse_args()
    if given.handed_over:
        head = ["trace", "in flight", "policy", *(f"{times:g}x" for times in TIMES)]
        rows = measure_handed_over(given.seed, given.requests)
    else:
        head = ["trace", "policy", *(f"{100 * part:g} %" for part in BUDGETS), "all"]
        rows = measure(given.seed, given.requests)
    harness.write(given, harness.table(head, rows))


if __name__ == "__main__":
    main()
