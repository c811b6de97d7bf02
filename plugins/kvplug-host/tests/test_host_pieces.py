"""A piece of pages that a pipe writes straight into the caller's memory: what is there when it does not come
whole, or is wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplug import PeerGoneError, TimeoutError
from kvplug.transport import (
    Deadline,
    GetJob,
    JobEngine,
    MissReason,
    PageBuffers,
    PageFormat,
    PageRequest,
    PageSeal,
    Series,
    Transfer,
    WireError,
)
from kvplug.transport.store.format import Part
from kvplug_host.client.piped_get import PipedGet
from kvplug_host.client.requests import Requests
from kvplug_host.protocol import SENT, Fetch, Fetched
from kvplug_host.serving.fetch import Fetch as SendPages
from kvplug_testing import waits
from kvplug_testing.waits import Call, until

pytestmark = pytest.mark.timeout(120)

SEAL = PageSeal()
LARGE = Part(name="a", dtype="uint8", shape=(1 << 20,))
FORM = PageFormat(page_tokens=0, num_layers=2, parts=(Part(name="a", dtype="uint8", shape=(4096,)),))
COUNT = 3


class Pipe:
    """The end of a pipe that receives one message of blocks, as far as ``comes`` says."""

    def __init__(self, pages: Sequence[bytes], comes: Callable[[], bool]) -> None:
        self._pages = pages
        self._comes = comes
        self.is_begun = threading.Event()
        self.num_dropped = 0

    def recv_blocks(self, views: Any, block_ids: Sequence[int], *, timeout: float) -> None:
        ((first,), (second,)) = views
        for page, block in enumerate(block_ids):
            first[block] = torch.frombuffer(bytearray(self._pages[page][:4096]), dtype=torch.uint8)
        self.is_begun.set()
        time.sleep(timeout / 10)
        if not self._comes():
            raise TimeoutError("a half has arrived")
        for page, block in enumerate(block_ids):
            second[block] = torch.frombuffer(bytearray(self._pages[page][4096:]), dtype=torch.uint8)

    def recv_tensor(self, out: Any, *, timeout: float | None) -> Any:
        assert tuple(out.shape) == (2, COUNT, 4096), "another message than the blocks"
        self.num_dropped += 1
        return out.zero_()


class Got:
    """A get of three pages, of which the store has said that it sends them."""

    def __init__(self, jobs: JobEngine, timeout: float, form: PageFormat = FORM) -> None:
        series = Series(form, b"", SEAL.id)
        self.pages = [bytes([number + 1]) * form.nbytes for number in range(COUNT)]
        self.memory = PageBuffers.empty(form, COUNT)
        self.memory.rows().buffer[:] = b"?" * (COUNT * form.nbytes)
        names = [b"%d" % number for number in range(COUNT)]
        request = PageRequest(
            series=series, keys=[name.ljust(32) for name in names], identities=names, memory=self.memory
        )
        self.job = GetJob(COUNT, form.num_layers, Deadline.after(timeout))
        self.wrong: list[bytes] = []
        self.task = PipedGet(
            self.job, request, SEAL, lambda key, reason: self.wrong.append(key.strip()), Requests()
        )
        jobs.begin(self.task)
        views = map(memoryview, self.pages)
        headers = [SEAL.header(series, name, view) for name, view in zip(names, views, strict=True)]
        self.task.found(Fetched(codes=bytes([SENT] * COUNT), headers=headers))

    @property
    def rows(self) -> list[bytes]:
        return [bytes(self.memory.rows().row(number)) for number in range(COUNT)]


@pytest.fixture
def jobs() -> Iterator[JobEngine]:
    engine = JobEngine("host", 1)
    yield engine
    engine.give_up()
    engine.join(Deadline.after(waits.patience_s))


@pytest.mark.parametrize("way", ["time", "cancelled"])
def test_memory_of_a_piece_that_stops_half_way_is_given_back_with_zeros(jobs: JobEngine, way: str) -> None:
    got = Got(jobs, 0.5 if way == "time" else 600)
    pipe = Pipe(got.pages, lambda: False)
    arriving = Call(lambda: got.task.arrived(pipe, 0, COUNT))
    assert pipe.is_begun.wait(waits.patience_s)
    assert not got.job.settled
    if way == "cancelled":
        got.job.cancel()
    reason = MissReason.TIMEOUT if way == "time" else MissReason.CANCELLED
    assert got.job.wait(waits.patience_s) == [reason] * COUNT
    assert got.job.wait_settled(waits.patience_s)
    assert got.rows == [bytes(FORM.nbytes)] * COUNT
    got.memory.rows().buffer[:] = b"!" * (COUNT * FORM.nbytes)
    arriving.result(waits.patience_s)
    assert pipe.num_dropped == 1, "the rest of the message is not received"
    assert got.rows == [b"!" * FORM.nbytes] * COUNT, "memory of a settled job was touched"


def test_when_the_store_ends_half_way_there_are_zeros(jobs: JobEngine) -> None:
    def gone() -> bool:
        raise PeerGoneError("it was killed")

    got = Got(jobs, 600)
    with pytest.raises(PeerGoneError):
        got.task.arrived(Pipe(got.pages, gone), 0, COUNT)
    assert got.rows == [bytes(FORM.nbytes)] * COUNT
    got.task.end(MissReason.STORE_GONE)
    assert got.job.results() == [MissReason.STORE_GONE] * COUNT and got.job.settled


def test_a_piece_that_comes_slowly_is_received_and_a_wrong_page_of_it_is_zeros(jobs: JobEngine) -> None:
    got = Got(jobs, 600)
    right = list(got.pages)
    got.pages[1] = got.pages[1][:-1] + b"?"
    looks = iter([False, False, True])
    got.task.arrived(Pipe(got.pages, lambda: next(looks)), 0, COUNT)
    assert got.job.wait(waits.patience_s) == [None, MissReason.CORRUPT, None]
    assert got.rows == [right[0], bytes(FORM.nbytes), right[2]] and got.wrong == [b"1"]
    until(lambda: got.job.settled, what="that the job settles")


def test_pages_beside_one_that_is_known_to_be_missed_are_copied_when_they_are_right(jobs: JobEngine) -> None:
    """The memory of the missed page is left as it is."""
    got = Got(jobs, 600)
    got.task.miss(0, MissReason.CANCELLED)
    pages = torch.frombuffer(bytearray(b"".join(got.pages)), dtype=torch.uint8)

    class Rows(Pipe):
        def recv_tensor(self, out: Any, *, timeout: float | None) -> Any:
            return out.copy_(pages.view(COUNT, 2, 4096).transpose(0, 1))

    got.task.arrived(Rows(got.pages, lambda: True), 0, COUNT)
    assert got.job.wait(waits.patience_s) == [MissReason.CANCELLED, None, None]
    assert got.rows == [b"?" * FORM.nbytes, *got.pages[1:]]


def test_a_piece_that_comes_again_does_not_stand_for_one_that_does_not_come(jobs: JobEngine) -> None:
    """Each of the two layers comes in two pieces."""

    class Whole(Pipe):
        def recv_blocks(self, views: Any, block_ids: Sequence[int], *, timeout: float) -> None:
            for (view,) in views:
                for page, block in enumerate(block_ids):
                    view[block] = page + 1

    got = Got(jobs, 600, PageFormat(page_tokens=0, num_layers=2, parts=(LARGE,)))
    with pytest.raises(WireError):
        for _ in range(4):
            got.task.arrived(Whole(got.pages, lambda: True), 0, 2)
    assert not got.job.done


def test_slots_are_given_back_once_a_pipe_that_does_not_take_them_was_aborted() -> None:
    class Stuck:
        is_aborted = False

        def send_tensor(self, tensor: Any, *, timeout: float) -> Transfer:
            return Transfer(0)

        def send_blocks(self, views: Any, block_ids: Any, *, timeout: float) -> Transfer:
            return Transfer(0)

        def abort(self) -> None:
            self.is_aborted = True

    pipe: Any = Stuck()
    settled: list[bool] = []
    keys = [bytes([number]) * 32 for number in range(COUNT)]
    request = Fetch(
        keys=b"".join(keys), payload_bytes=8, row_bytes=8, rows=1, as_blocks=True, pages=1, timeout_s=1.0
    )
    fetch = SendPages(
        request,
        [SimpleNamespace(offset=8 * number) for number in range(COUNT)],  # type: ignore[misc]
        pipe=pipe,
        views=lambda *args: None,  # type: ignore[arg-type,return-value]
        deadline=Deadline.after(0.01),
        settled=lambda fetch: settled.append(pipe.is_aborted),
        failed=lambda reason: None,
    )
    while (step := fetch.next_step()) is not None:
        fetch.run(step)
    assert settled == [True]


def test_no_layer_is_released_when_the_memory_does_not_take_a_piece(
    jobs: JobEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise ValueError("it is gone")

    got = Got(jobs, 600)
    monkeypatch.setattr(got.memory, "blocks", fails)
    got.task.arrived(Pipe(got.pages, lambda: True), 0, COUNT)
    assert got.job.wait(waits.patience_s) == [MissReason.OTHER] * COUNT
    assert not got.job.progressed_at
