"""What passes through a pipe is counted. The pipe is a stand-in."""

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
from kvplug.metrics.record import PipeRecorder
from kvplug.metrics.stats import TransferStats
from kvplug.net.deadline import Timeout
from kvplug.transport.block_views import BlockViews
from kvplug.transport.pipe import Blocks, Pipe, Transfer


class Sized:
    """As much of a tensor as is counted."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Rows:
    """As much of a cache of rows [8, 5] in float16 as is checked and counted."""

    shape = (100, 8, 5)
    device = None

    class dtype:  # noqa: N801 - as tensors have it
        itemsize = 2

    def dim(self) -> int:
        return len(self.shape)

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj


class Inside(Pipe):
    peer = "pid 7"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.transfer = Transfer(0)
        self.received: Any = None
        self.error: Exception | None = None

    @property
    def closed(self) -> bool:
        return ("abort",) in self.calls

    def _call(self, *call: Any) -> Any:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        return self.transfer if call[0] == "send" else self.received

    def _send_tensor(self, tensor: Any, timeout: Timeout) -> Transfer:
        return self._call("send", tensor, timeout)

    def _receive_tensor(self, out: Any, timeout: Timeout) -> Any:
        return self._call("recv", out, timeout)

    def _send_blocks(self, blocks: Blocks, timeout: Timeout) -> Transfer:
        return self._call("send", list(blocks.block_ids), timeout)

    def _receive_blocks(self, blocks: Blocks, timeout: Timeout) -> None:
        self._call("recv", list(blocks.block_ids), timeout)

    def _close(self, timeout: Timeout) -> None:
        self.calls.append(("close", timeout))

    def _abort(self) -> None:
        self.calls.append(("abort",))


@pytest.fixture
def inside() -> Inside:
    return Inside()


@pytest.fixture
def stats() -> TransferStats:
    return TransferStats()


@pytest.fixture
def pipe(inside: Inside, stats: TransferStats) -> Any:
    inside.recorder = PipeRecorder(stats)
    return inside


def test_a_send_is_counted_when_its_transfer_ends_and_not_before(
    pipe: Any, inside: Inside, stats: TransferStats
) -> None:
    pipe.send_tensor(Sized(4096))
    assert stats.snapshot()["ops"] == {}
    inside.transfer.finish()
    found = stats.snapshot()["ops"]["send"]
    assert (found["count"], found["bytes"]) == (1, 4096) and found["seconds"] > 0
    pipe.send_tensor(None)  # its transfer has ended already
    found = stats.snapshot()["ops"]["send"]
    assert (found["count"], found["bytes"]) == (2, 4096)


def test_a_transfer_that_fails_is_counted_once_with_its_reason(
    pipe: Any, inside: Inside, stats: TransferStats
) -> None:
    transfer = pipe.send_tensor(Sized(1))
    inside.transfer.fail(PeerGoneError("killed"))
    for _ in range(2):
        with pytest.raises(PeerGoneError):
            transfer.wait(0)
    assert stats.snapshot() == {"ops": {}, "failures": {"send": {"peer_gone": 1}}}


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
    pipe: Any, inside: Inside, stats: TransferStats, call: str, error: Exception, reason: str
) -> None:
    inside.error = error
    with pytest.raises(type(error)):
        CALLS[call](pipe)
    verb = call[:4]
    is_counted = verb == "send" or not isinstance(error, LOSES_NOTHING)
    assert stats.snapshot() == {"ops": {}, "failures": {verb: {reason: 1}} if is_counted else {}}


def test_tensors_and_blocks_are_counted_with_the_bytes_that_came_or_went(
    pipe: Any, inside: Inside, stats: TransferStats
) -> None:
    inside.received = Sized(100)
    pipe.recv_tensor()
    inside.received = None
    pipe.recv_tensor()
    found = stats.snapshot()["ops"]["recv"]
    assert (found["count"], found["bytes"]) == (2, 100)
    inside.calls.clear()
    inside.transfer.finish()
    assert pipe.send_blocks(BlockViews([[Rows()], [Rows()]]), [4, 1, 2], timeout=2.0) is inside.transfer
    layers: list[int] = []
    pipe.recv_blocks([Rows(), Rows()], [3], on_layer=layers.append, timeout=1.0)
    assert layers == [0, 1]
    assert inside.calls == [("send", [4, 1, 2], 2.0), ("recv", [3], 1.0)]
    counted = stats.snapshot()["ops"]
    assert (counted["send"]["bytes"], counted["recv"]["bytes"]) == (2 * 3 * 8 * 5 * 2, 100 + 2 * 8 * 5 * 2)
