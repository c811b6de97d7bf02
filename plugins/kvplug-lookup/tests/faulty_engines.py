"""Engines of the connector "lookup" for tests of what goes wrong: a pair of them, a load by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvplug_lookup.connector.stall import StallClock

from kvplug import Config
from kvplug.engine import KVLayout, TransferStats
from kvplug_lookup.connector.device import Mark
from kvplug_lookup.connector.load import Load
from kvplug_lookup.connector.plan import LoadPlan
from kvplug_testing.engine import FakeEngine

BASE: dict[str, Any] = {"connector": "lookup", "connect_timeout_s": 20, "timeout_s": 10}
KV_OF_100_TOKENS = 2 * 3 * 100 * 2 * 8 * 4


def config(role: str, **more: Any) -> Config:
    return Config.from_dict({**BASE, "role": role, **more})


@contextlib.contextmanager
def pair(
    *, producer: dict[str, Any] | None = None, consumer: dict[str, Any] | None = None, **build: Any
) -> Iterator[tuple[FakeEngine, FakeEngine]]:
    """Engines that know each other; ``producer`` and ``consumer`` are more of their configs."""
    with (
        FakeEngine(config("producer", **producer or {}), listen="unix:", seed=1, **build) as prefill,
        FakeEngine(
            config("consumer", **consumer or {}), connect=prefill.worker.contact, seed=2, **build
        ) as decode,
    ):
        yield prefill, decode


def tokens(count: int, first: int = 0) -> range:
    return range(first, first + count)


def promised(decode: FakeEngine, prompt: Any, expected: int) -> tuple[Any, Any, int, int]:
    """A request to schedule, with the load it was promised."""
    found, _ = decode.matched(prompt)
    assert found == expected
    blocks = decode.allocate(len(prompt.token_ids))
    decode.scheduler.update_state_after_alloc(prompt, (blocks,), found)
    return prompt, blocks, found, len(prompt.token_ids) - found


ASYNC = {"options": {"lookup": {"async_load": True}}}


def made(*arguments: Any, checksum: str | None = None, stall: StallClock | None = None) -> Load:
    return Load(
        *arguments,
        free=Mark(torch.zeros(1)),
        stall=stall or StallClock(20),
        checksum=lambda: checksum,
        stats=TransferStats(),
    )


@pytest.fixture
def load() -> Load:
    layout = KVLayout("KBTHD", {"K": 2, "B": 8, "T": 16, "H": 1, "D": 4})
    plan = LoadPlan(
        request_id="a",
        token_ids=tuple(tokens(32)),
        extra=b"",
        block_ids=(1, 2),
        start=0,
        in_background=False,
    )
    return made(plan, layout, (torch.zeros(layout.shape),))
