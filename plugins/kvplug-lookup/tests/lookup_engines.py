"""Engines of the connector "lookup" for its tests: alone, in pairs, and what they hold and count."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvplug import Config
from kvplug.engine import ChainMemo, Parallelism, Request, RequestEnd, WorkerOutput
from kvplug.transport import Deadline, GetJob, MissReason
from kvplug_lookup.connector.keys import PromptChains, namespace_of
from kvplug_lookup.connector.plan import StepReport
from kvplug_testing import waits
from kvplug_testing.engine import MODEL, FakeEngine, request_of

PAGE = 16
"""Tokens of a page, which are those of a block, too."""
PAGE_BYTES = 2 * 3 * PAGE * 2 * 8 * 4
"""Keys and values, layers, tokens, heads, elements, float32."""
PROMPT = range(100)
BASE: dict[str, Any] = {
    "connector": "lookup",
    "connect_timeout_s": 20,
    "timeout_s": 10,
    "buffer_size": 32 << 20,
}
LOOKUP = {"load_policy": "always"}
"""What these engines compute takes no time, so that nothing would be worth loading."""

_numbers = itertools.count()


def config(role: str, lookup: Mapping[str, Any] | None = None, **more: Any) -> Config:
    """``lookup``: options of the connector; ``more``: other keys."""
    options = {"host": {"segment_bytes": 1 << 20}, **more.pop("options", {})}
    options["lookup"] = {**LOOKUP, **(lookup or {})}
    return Config.from_dict({**BASE, "role": role, "options": options, **more})


def an_address(name: str) -> str:
    """Of an engine of this test, in this process and its children."""
    return f"unix:@kvplug-test-{os.getpid()}-{next(_numbers)}-{name}"


@contextlib.contextmanager
def pair(
    *,
    producer: Mapping[str, Any] | None = None,
    consumer: Mapping[str, Any] | None = None,
    ours: Mapping[str, Any] | None = None,
    theirs: Mapping[str, Any] | None = None,
    **build: Any,
) -> Iterator[tuple[FakeEngine, FakeEngine]]:
    """Engines that know each other. ``producer`` and ``consumer``: more for :func:`config`; ``ours`` and
    ``theirs``: more arguments of the engines.
    """
    with (
        FakeEngine(
            config("producer", **(producer or {})), listen="unix:", seed=1, **{**build, **(ours or {})}
        ) as prefill,
        FakeEngine(
            config("consumer", **(consumer or {})),
            connect=prefill.worker.contact,
            seed=2,
            **{**build, **(theirs or {})},
        ) as decode,
    ):
        yield prefill, decode


@contextlib.contextmanager
def both(lookup: Mapping[str, Any] | None = None, *, host: str = "", **more: Any) -> Iterator[FakeEngine]:
    """An engine that saves, and loads what it has saved."""
    given = config("both", lookup, host=host or an_address("both"), **more)
    with FakeEngine(given, num_blocks=512) as engine:
        yield engine


def tokens(count: int, first: int = 0) -> range:
    return range(first, first + count)


def promised(engine: FakeEngine, prompt: Request, expected: int) -> tuple[Any, Any, int, int]:
    """A request to schedule, with the load that was promised."""
    found, _ = engine.matched(prompt)
    assert found == expected
    blocks = engine.allocate(len(prompt.token_ids))
    engine.scheduler.update_state_after_alloc(prompt, (blocks,), found)
    return prompt, blocks, found, len(prompt.token_ids) - found


def assert_loads(engine: FakeEngine, prompt: Request, expected: int) -> None:
    """So many tokens are promised, and loaded as this engine would compute them."""
    blocks, loaded, report = engine.load(prompt)
    assert (loaded, report.invalid_block_ids) == (expected, frozenset())
    assert engine.is_right(prompt.token_ids, blocks, len(prompt.token_ids))
    engine.finish(prompt, blocks)
    engine.free_blocks.extend(blocks)


def until_promised(engine: FakeEngine, token_ids: Any, expected: int, within: float | None = None) -> None:
    """Ask for these tokens, by ever new requests, until so many are promised."""

    def is_promised() -> bool:
        asking = request_of(f"asking {next(_numbers)}", token_ids)
        found, _ = engine.matched(asking)
        engine.finish(asking, (), RequestEnd.ABORTED)
        return found == expected

    waits.until(is_promised, within, what=f"a promise of {expected} tokens")


def num_held(engine: FakeEngine) -> int:
    """Pages in the first store once all that was saved is settled."""
    waits.until(lambda: not engine.worker.saver.bytes_unsaved, what="the end of all saves")
    held: int = engine.worker.first_tier.store.usage().num_pages
    return held


def failures(engine: FakeEngine, op: str) -> dict[str, int]:
    """What of the operation failed at the worker since the last call, by reason."""
    found: dict[str, int] = (engine.figures() or {"failures": {}})["failures"].get(op, {})
    return found


def missed(pages: Any, reason: MissReason = MissReason.ABSENT) -> GetJob:
    """A get that has ended with nothing."""
    job = GetJob(len(pages.keys), pages.series.format.num_layers, Deadline.after(None))
    job.set([reason] * job.count)
    return job


def worker_report(rank: int, step: int, *, read_until: int = 0, **given: Any) -> WorkerOutput:
    """The report of worker ``rank`` after a step."""
    report = StepReport(rank=rank, step=step, read_until=read_until, **given)
    return WorkerOutput(worker_metadata=(report.to_plain(),))


def chains_of(token_ids: Sequence[int]) -> list[bytes]:
    """The chains of a prompt's whole pages."""
    chains = PromptChains(namespace_of(MODEL), b"", PAGE, memo=ChainMemo())
    return chains.upto(token_ids, len(token_ids))


def two_workers() -> FakeEngine:
    given = config("both", host=an_address("workers"))
    return FakeEngine(given, parallelism=Parallelism(num_workers=2, tensor_size=2))
