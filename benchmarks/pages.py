"""What pages cost besides their bytes: the memory of a store beyond its distinct pages, and finding a prompt.

    python benchmarks/pages.py [--prompts N] [--tokens N] [--rounds N] [--markdown FILE]

Prompts share prefixes: each is one of 16 system prompts, then one of 2,000 documents, then a question of its
own. They are cut into pages of 16 tokens and put into the store "host", prompt after prompt. "kept" is what
the store has of the budget in use at the end, with headers and with what its slots waste; "distinct" is the
number of different pages times their size; "as entries" is what the same prompts take if each is kept whole.
A header holds the token ids of its page, so its share depends on the size of a page: 1 KiB is a tiny model's.

A match is the connector's first answer about a new request, all of whose pages are there: it packs the token
ids, finds the chain of each page, and looks for it in its index of the store. The connector remembers the
chains of pages that it has saved or found lately; those of others are hashed. Beside it, in turns, its parts,
and two measures of the machine: one hash (SHA-256) over all the token ids at once, which prompts could not
share, and a bare loop that hashes each page of 16 ids of 8 bytes after the hash of the page before it.
"""

from __future__ import annotations

import hashlib
import os
import random
import statistics
import sys
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import harness

import kvplug
from kvplug.engine import ChainMemo, Request, RequestEnd
from kvplug.net.wire.token_ids import pack_tokens
from kvplug.transport import PageBuffers, PageRequest, Series
from kvplug.transport.store.format import opaque_format
from kvplug.transport.store.keys import token_identities
from kvplug_testing.engine import FakeEngine, request_of

PAGE_TOKENS = 16
SIZES = (1 << 10, 16 << 10)
SYSTEMS, DOCUMENTS = 16, 2_000
SYSTEM_TOKENS, DOCUMENT_TOKENS = 512, 1_200
NAMESPACE = b"a model"


def prompts(count: int, num_tokens: int, seed: int = 1) -> Iterator[list[int]]:
    rng = random.Random(seed)

    def text(of: object, length: int) -> list[int]:
        return random.Random(repr(of)).choices(range(128_000), k=length)

    systems = [text(("system", number), SYSTEM_TOKENS) for number in range(SYSTEMS)]
    documents = [text(("document", number), DOCUMENT_TOKENS) for number in range(DOCUMENTS)]
    for number in range(count):
        question = text(("question", number), num_tokens - SYSTEM_TOKENS - DOCUMENT_TOKENS)
        yield [*rng.choice(systems), *rng.choice(documents), *question]


# -- bytes -----------------------------------------------------------------------------------------------


def kept(count: int, num_tokens: int, page_bytes: int) -> dict[str, int]:
    """Bytes."""
    config = {"stores": ["host"], "options": {"host": {"size": "16 GiB"}}}
    store = kvplug.build_store(kvplug.Config.from_dict(config))
    try:
        series = Series(opaque_format(page_bytes), b"", store.seal.id)
        root, distinct, whole, headers = ChainMemo.root(NAMESPACE), set[bytes](), 0, 0
        for number, tokens in enumerate(prompts(count, num_tokens)):
            chains = ChainMemo().chains_of(root, tokens, PAGE_TOKENS)
            whole += len(chains) * page_bytes
            first = next((at for at, chain in enumerate(chains) if chain not in distinct), len(chains))
            new = chains[first:]
            if new:
                distinct.update(new)
                identities = token_identities(root, chains, tokens, PAGE_TOKENS, first)
                headers += sum(store.seal.header_length(series.format, each) for each in identities)
                request = PageRequest(
                    series=series,
                    keys=series.keys_of(new),
                    identities=identities,
                    memory=PageBuffers.empty(series.format, len(new)),
                )
                harness.put(store, request)
            if sys.stderr.isatty() and number % 200 == 0:
                print(f"\r{number} of {count} prompts", end="", file=sys.stderr)
        usage = store.usage()
        assert usage.num_pages == len(distinct), usage
        return {
            "distinct": len(distinct) * page_bytes,
            "distinct, with headers": len(distinct) * page_bytes + headers,
            "kept": usage.used_bytes,
            "as entries": whole,
        }
    finally:
        store.abort()


# -- time ------------------------------------------------------------------------------------------------


def matched(rounds: int, num_tokens: int, count: int = 200) -> dict[str, list[float]]:
    """Seconds of calls, per round: the medians over the prompts."""
    blocks = 2 * (num_tokens // PAGE_TOKENS + 2)
    given = {
        "connector": "lookup",
        "role": "both",
        "stores": ["host"],
        "host": f"unix:@kvplug-pages-{os.getpid()}",
        "options": {"host": {"size": "1 GiB"}},
    }
    found: dict[str, list[float]] = {}
    config = kvplug.Config.from_dict(given)
    with FakeEngine(config, block_size=PAGE_TOKENS, num_blocks=blocks, num_layers=1) as engine:
        asked = [tuple(tokens) for tokens in prompts(count, num_tokens)]
        for number, tokens in enumerate(asked):
            blocks = engine.prefill(request_of(f"saved {number}", tokens))
            engine.free_blocks.extend(blocks)
        for number in range(rounds + 1):
            times: dict[str, list[float]] = {}
            for at, tokens in enumerate(asked):
                for is_new in (False, True):
                    request = known(engine, f"{number}.{at}", tokens)
                    chains = engine.scheduler._tracked[request.request_id].chains  # type: ignore[attr-defined]
                    seen = chains._memo
                    if is_new:
                        chains._memo = ChainMemo()
                    for what, call in calls(engine, request, chains.root, seen, is_new):
                        times.setdefault(what, []).append(harness.seconds(call)[0])
                    engine.finish(request, (), RequestEnd.ABORTED)
            if number:  # the first one warms up
                for what, taken in times.items():
                    found.setdefault(what, []).append(statistics.median(taken))
    return found


def known(engine: FakeEngine, name: str, tokens: tuple[int, ...]) -> Request:
    """A new request, about which the connector can answer at once, and has not been asked."""
    probe = request_of(f"{name} probe", tokens)
    request = request_of(name, tokens)
    engine.scheduler.on_new_request(request)
    engine.scheduler.on_new_request(probe)  # later, so that what it waits for, the other one waits for too
    engine.ask(probe)
    engine.finish(probe, (), RequestEnd.ABORTED)
    return request


def calls(
    engine: FakeEngine, request: Request, root: bytes, memo: ChainMemo, is_new: bool
) -> list[tuple[str, Callable[[], Any]]]:
    tokens = request.token_ids
    packed = pack_tokens(tokens)
    wide = [array("q", tokens[at : at + PAGE_TOKENS]).tobytes() for at in range(0, len(tokens), PAGE_TOKENS)]

    def match() -> None:
        new, _ = engine.scheduler.get_num_new_matched_tokens(request, 0)
        assert new == (len(tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS, new

    if is_new:
        return [
            ("match, pages not seen before", match),
            ("of it, the hashes of all pages", lambda: ChainMemo().chains_of(root, tokens, PAGE_TOKENS)),
        ]
    return [
        ("match, pages seen before", match),
        ("of it, the chains of all pages", lambda: memo.chains_of(root, tokens, PAGE_TOKENS)),
        ("of that, packing the token ids", lambda: pack_tokens(tokens)),
        ("one hash (SHA-256) over all token ids", lambda: hashlib.sha256(packed).digest()),
        ("a bare loop of a hash (SHA-256) a page", lambda: bare_loop(wide)),
    ]


def bare_loop(pages: list[bytes]) -> bytes:
    """Hashes of pages, each after the one before it."""
    found, sha256 = bytes(32), hashlib.sha256
    for page in pages:
        found = sha256(found + page).digest()
    return found


# -- the table -------------------------------------------------------------------------------------------


def main() -> None:
    parser = harness.parser(__doc__, 15)
    parser.add_argument("--prompts", type=int, default=10_000, help="number of prompts (default 10,000)")
    parser.add_argument("--tokens", type=int, default=2_000, help="tokens of a prompt (default 2,000)")
    given = parser.parse_args()
    rows = []
    for page_bytes in SIZES:
        sizes = kept(given.prompts, given.tokens, page_bytes)
        for what, nbytes in sizes.items():
            share = nbytes / sizes["distinct"]
            rows.append([f"{page_bytes >> 10} KiB", what, f"{nbytes / 2**20:,.1f}", f"{share:.3f}"])
    found = []
    for what, seconds in matched(given.rounds, given.tokens).items():
        low, median, high = (each * 1e6 for each in harness.quartiles(seconds))
        found.append([what, f"{median:.1f} µs", f"{low:.1f} to {high:.1f} µs"])
    harness.write(
        given,
        f"{given.prompts:,} prompts of {given.tokens:,} tokens, in pages of {PAGE_TOKENS} tokens:",
        harness.table(["page", "what", "MiB", "of the distinct pages"], rows),
        f"Finding a prompt of {given.tokens:,} tokens among those of 200 prompts:",
        harness.table(["what", "median", "quartiles"], found),
        f"{harness.machine()}.",
    )


if __name__ == "__main__":
    main()
