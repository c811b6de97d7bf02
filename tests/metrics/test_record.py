"""The pipe around a pipe. The pipe inside is a stand-in: what is tested is the counting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvplug.errors import (
    BusyError,
    ClosedError,
    LayoutError,
    PeerGoneError,
    TensorMismatchError,
    TimeoutError,
    TransportError,
    WireError,
)
from kvplug.metrics.reasons import reason_of
from kvplug.metrics.record import RecordedPipe
from kvplug.metrics.stats import TransferStats
from kvplug.net.deadline import DEFAULT_TIMEOUT, Timeout
from kvplug.transport.block_views import BlockViews
from kvplug.transport.pipe import Pipe, Transfer


class Sized:
    """As much of a tensor as is counted."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Rows:
    """As much of a cache of rows [8, 5] in float16 as is counted."""

    shape = (100, 8, 5)

    class dtype:  # noqa: N801 - as tensors have it
        itemsize = 2


class Inside(Pipe):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.transfer = Transfer(0)
        self.received: Any = None
        self.error: Exception | None = None

    @property
    def closed(self) -> bool:
        return ("close", 3.0) in self.calls or ("abort",) in self.calls

    @property
    def peer(self) -> str:
        return "pid 7"

    def _call(self, *call: Any) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def send_tensor(self, tensor: Any, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        self._call("send", tensor, timeout)
        return self.transfer

    def recv_tensor(self, out: Any = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        self._call("recv", out, timeout)
        return self.received

    def send_blocks(self, views: Any, block_ids: Any, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        self._call("send", block_ids, timeout)
        return self.transfer

    def recv_blocks(
        self, views: Any, block_ids: Any, *, on_layer: Any = None, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> None:
        self._call("recv", block_ids, on_layer, timeout)

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self.calls.append(("close", timeout))

    def abort(self) -> None:
        self.calls.append(("abort",))


@pytest.fixture
def inside() -> Inside:
    return Inside()


@pytest.fixture
def stats() -> TransferStats:
    return TransferStats()


@pytest.fixture
def pipe(inside: Inside, stats: TransferStats) -> RecordedPipe:
    return RecordedPipe(inside, stats)


def test_everything_reaches_the_pipe_inside(pipe: RecordedPipe, inside: Inside) -> None:
    tensor: Any = Sized(8)
    assert pipe.send_tensor(tensor, timeout=2.0) is inside.transfer
    inside.received = out = Sized(4)
    assert pipe.recv_tensor(out, timeout=None) is out  # type: ignore[arg-type, comparison-overlap]
    assert pipe.peer == "pid 7" and not pipe.closed and pipe.pipe is inside
    pipe.close(3.0)
    pipe.abort()
    assert pipe.closed
    assert inside.calls == [
        ("send", tensor, 2.0), ("recv", out, None), ("close", 3.0), ("abort",)
    ]  # fmt: skip


def test_a_default_timeout_stays_the_default_of_the_pipe_inside(pipe: RecordedPipe, inside: Inside) -> None:
    pipe.send_tensor(None)
    pipe.recv_tensor()
    pipe.close()
    assert [call[-1] for call in inside.calls] == [DEFAULT_TIMEOUT] * 3


def test_a_send_is_counted_when_its_transfer_ends_and_not_before(
    pipe: RecordedPipe, inside: Inside, stats: TransferStats
) -> None:
    pipe.send_tensor(Sized(4096))  # type: ignore[arg-type]
    assert stats.snapshot()["ops"] == {}
    inside.transfer.finish()
    found = stats.snapshot()["ops"]["send"]
    assert (found["count"], found["bytes"]) == (1, 4096) and found["seconds"] > 0
    pipe.send_tensor(None)  # its transfer has ended already
    found = stats.snapshot()["ops"]["send"]
    assert (found["count"], found["bytes"]) == (2, 4096)


def test_a_transfer_that_fails_is_counted_once_with_its_reason(
    pipe: RecordedPipe, inside: Inside, stats: TransferStats
) -> None:
    transfer = pipe.send_tensor(Sized(1))  # type: ignore[arg-type]
    inside.transfer.fail(PeerGoneError("killed"))
    with pytest.raises(PeerGoneError):
        transfer.wait(0)
    with pytest.raises(PeerGoneError):
        transfer.wait(0)
    assert stats.snapshot() == {"ops": {}, "failures": {"send": {"peer_gone": 1}}}


def test_a_receive_is_counted_with_the_bytes_that_came(
    pipe: RecordedPipe, inside: Inside, stats: TransferStats
) -> None:
    inside.received = Sized(100)
    pipe.recv_tensor()
    inside.received = None
    pipe.recv_tensor()
    found = stats.snapshot()["ops"]["recv"]
    assert (found["count"], found["bytes"]) == (2, 100)


LOSES_NOTHING = (TimeoutError, ClosedError, TensorMismatchError, LayoutError, BusyError)
CALLS: dict[str, Callable[[Any], Any]] = {
    "send": lambda pipe: pipe.send_tensor(None),
    "recv": lambda pipe: pipe.recv_tensor(),
    "recv of blocks": lambda pipe: pipe.recv_blocks([Rows()], [3]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        *((kind("later"), reason_of(kind("later"))) for kind in LOSES_NOTHING),
        (PeerGoneError("killed"), "peer_gone"),
        (WireError("garbage"), "corrupt"),
        (TransportError("cable"), "transport"),
        (OSError("cable"), "transport"),
        (RuntimeError("what"), "other"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, Exception) else "",
)
def test_a_call_that_raises_is_counted_with_its_reason_unless_a_receive_has_lost_nothing(
    pipe: RecordedPipe, inside: Inside, stats: TransferStats, call: str, error: Exception, reason: str
) -> None:
    inside.error = error
    with pytest.raises(type(error)):
        CALLS[call](pipe)
    verb = call[:4]
    is_counted = verb == "send" or not isinstance(error, LOSES_NOTHING)
    assert stats.snapshot() == {"ops": {}, "failures": {verb: {reason: 1}} if is_counted else {}}


def test_blocks_go_to_the_pipe_inside_and_are_counted_with_their_bytes(
    pipe: RecordedPipe, inside: Inside, stats: TransferStats
) -> None:
    inside.transfer.finish()
    views: Any = BlockViews([[Rows()], [Rows()]])
    assert pipe.send_blocks(views, [4, 1, 2], timeout=2.0) is inside.transfer
    pipe.recv_blocks([Rows(), Rows()], [3], on_layer=print, timeout=1.0)  # type: ignore[list-item]
    assert inside.calls == [("send", [4, 1, 2], 2.0), ("recv", [3], print, 1.0)]
    counted = stats.snapshot()["ops"]
    assert (counted["send"]["bytes"], counted["recv"]["bytes"]) == (2 * 3 * 8 * 5 * 2, 2 * 8 * 5 * 2)


def test_leaving_the_with_block_closes_or_aborts_the_pipe_inside(
    inside: Inside, stats: TransferStats
) -> None:
    with RecordedPipe(inside, stats):
        pass
    assert inside.calls == [("close", DEFAULT_TIMEOUT)]
    with pytest.raises(KeyError), RecordedPipe(inside, stats):
        raise KeyError
    assert inside.calls[-1] == ("abort",)
