"""The program that has the pages is killed, or stopped, at each step of a put and a get by another one."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from host_programs import config
from kvplug import build_store
from kvplug.transport import (
    MissReason,
    PageBuffers,
    PageRequest,
    PutReason,
    Series,
    Store,
    foreign_key,
    opaque_format,
)
from kvplug_host.client.mapping import Mapping
from kvplug_host.client.page_pipe import PagePipe
from kvplug_host.client.piped_get import PipedGet
from kvplug_host.client.requests import Requests
from kvplug_host.outbox import Outbox
from kvplug_testing import peers, waits
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.waits import until

PROGRAMS = Path(__file__).with_name("host_programs.py")
COUNT, NBYTES = 3, 200_000
JOB_S = 1.0
SLACK_S = 5.0
STEPS = (
    (Outbox, "send"),
    (Requests, "answered"),
    (PagePipe, "send_rows"),
    (PipedGet, "arrived"),
    (Mapping, "receive"),
)
"""What the other end does for a request: each call is a step, and so is what follows it."""
MISSES = {MissReason.STORE_GONE, MissReason.TIMEOUT, MissReason.ABSENT}
NOT_KEPT = {PutReason.STORE_GONE, PutReason.TIMEOUT}

_numbers = itertools.count()


class Steps:
    """Counts the steps of this process, and calls ``act`` right before the chosen one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left = -1
        self._act: Callable[[], None] = lambda: None
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def choose(self, number: int, act: Callable[[], None]) -> None:
        self._left, self._act = number, act

    @property
    def was_reached(self) -> bool:
        return self._left < 0

    def _counted(self, call: Any) -> Any:
        def counted(*args: Any, **given: Any) -> Any:
            self._left -= 1
            if self._left == -1:
                self._act()
            return call(*args, **given)

        return counted


def pages_of(store: Store, name: str, *, filled: bool) -> tuple[PageRequest, list[bytes]]:
    """A request for pages of that name, and what is in them."""
    series = Series(opaque_format(NBYTES), b"", store.seal.id)
    identities = [f"{name} {number}".encode() for number in range(COUNT)]
    wanted = [(identity * NBYTES)[:NBYTES] for identity in identities]
    memory = PageBuffers.empty(series.format, COUNT)
    for number, page in enumerate(wanted):
        memory.rows().row(number)[:] = page if filled else bytes(NBYTES)
    keys = [foreign_key(b"broken", identity) for identity in identities]
    return PageRequest(series=series, keys=keys, identities=identities, memory=memory), wanted


def ended(job: Any) -> Any:
    """The results, in time."""
    begun = time.monotonic()
    results = job.wait(waits.patience_s)
    took = time.monotonic() - begun
    assert took < JOB_S + SLACK_S, f"it took {took:.1f} s, and its deadline was at {JOB_S:.1f} s"
    return results


def put(store: Store, name: str) -> list[PutReason | None]:
    request, _ = pages_of(store, name, filled=True)
    return ended(store.submit_put(request, timeout=JOB_S))  # type: ignore[no-any-return]


def get(store: Store, name: str) -> list[MissReason | None]:
    """The results; each page that was got is right."""
    request, wanted = pages_of(store, name, filled=False)
    job = store.submit_get(request, timeout=JOB_S)
    results = ended(job)
    assert job.wait_settled(waits.patience_s)
    rows = request.memory.rows()
    assert rows is not None
    for number, result in enumerate(results):
        assert result is not None or bytes(rows.row(number)) == wanted[number], "wrong bytes were released"
    return results  # type: ignore[no-any-return]


def works(store: Store, name: str) -> bool:
    return put(store, name) == [None] * COUNT and get(store, name) == [None] * COUNT


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["killed", "stopped"])
@pytest.mark.parametrize("transport", ["mapped", "shm", "cpu"])
def test_at_each_step_the_jobs_end_in_time_without_a_wrong_byte(
    monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer, transport: str, way: str
) -> None:
    options: dict[str, Any] = {} if transport == "mapped" else {"map": False, "transport": transport}
    steps = Steps(monkeypatch)
    for number in range(100):
        address = f"unix:@kvplug-broken-{os.getpid()}-{next(_numbers)}"

        def serving(stack: ExitStack, address: str = address) -> peers.Peer:
            program = stack.enter_context(fork_server.start(f"{PROGRAMS}:serve", address, {"size": 16 << 20}))
            assert program.recv(waits.patience_s) == address
            return program

        with ExitStack() as stack:
            program = serving(stack)
            store = build_store(config(contact=address, **options))
            stack.callback(store.abort)
            until(lambda store=store: works(store, "before"), what="that the store is used")
            steps.choose(number, program.kill if way == "killed" else program.stop)
            assert set(put(store, "pages")) <= {None, *NOT_KEPT}
            assert set(get(store, "pages")) <= {None, *MISSES}
            if not steps.was_reached:
                break
            if way == "killed":
                serving(stack)
            else:
                program.cont()
            until(lambda store=store: works(store, "after"), what="that the store is used again")
    assert number > 3, "a put and a get had hardly a step"
