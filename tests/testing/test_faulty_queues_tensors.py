"""What a plan of faults does to message queues, and that one that hits nothing does nothing."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvplug import ClosedError, Credentials, PeerGoneError, QueueContext, QueueEndpoint, TimeoutError  # noqa: E402
from kvplug.testing import MessageQueueContract  # noqa: E402
from kvplug.testing.contract.base import Call, raises  # noqa: E402
from kvplug.testing.faults import FaultyQueueEndpoint, Plan, Rule  # noqa: E402
from kvplug.testing.memory.queue import MemoryQueueEndpoint  # noqa: E402

pytestmark = pytest.mark.timeout(60)

PATIENCE_S = 20.0
NEVER = Plan(rules=[Rule(do="drop", direction=way, message=1 << 40) for way in ("send", "recv")])


class TestTransparent(MessageQueueContract):
    """With rules that hit nothing a faulty queue is the queue beneath."""

    transport = "memory"
    across_processes = False

    def make_endpoint(self, context: QueueContext) -> QueueEndpoint:
        return FaultyQueueEndpoint(super().make_endpoint(context), NEVER)


@pytest.fixture(params=["send", "recv"])
def ends(request: pytest.FixtureRequest) -> Any:
    """Makes a writer and a reader; the rules are of either."""
    made = []

    def make(*rules: dict[str, Any]) -> Any:
        context = QueueContext(options=None, credentials=Credentials(), timeout_s=PATIENCE_S)
        plan = Plan(seed=3, rules=[Rule(direction=request.param, **rule) for rule in rules])
        end = FaultyQueueEndpoint(MemoryQueueEndpoint(context), plan)
        writer = end.create()
        reader = end.create_from_handle(writer.export_handle(), 0)
        made.extend([writer, reader])
        return writer, reader

    yield make
    for end in made:
        end.abort()


def read(reader: Any, count: int) -> list[Any]:
    return [reader.dequeue(timeout=PATIENCE_S) for _ in range(count)]


@pytest.mark.parametrize(
    ("do", "comes"),
    [("drop", [[1], [3], [4]]), ("duplicate", [[1], [2], [2], [3], [4]]), ("swap", [[1], [3], [2], [4]])],
)
def test_values_are_lost_doubled_and_swapped(ends: Any, do: str, comes: list[Any]) -> None:
    writer, reader = ends({"do": do, "message": 2})
    value = [0]
    for value[0] in (1, 2, 3, 4):
        writer.enqueue(value)
    assert read(reader, len(comes)) == comes
    raises(TimeoutError, lambda: reader.dequeue(timeout=0.05))


def test_a_tensor_has_a_bit_turned_over_and_another_value_passes(ends: Any) -> None:
    writer, reader = ends({"do": "flip"})
    for value in (torch.zeros(8), "text"):
        writer.enqueue(value)
    tensor, text = read(reader, 2)
    assert int(tensor.view(torch.int32).count_nonzero()) == 1
    assert text == "text"


def test_a_stop_holds_up_and_closing_ends_it(ends: Any) -> None:
    writer, reader = ends({"do": "stop", "message": 2})
    writer.enqueue(1)
    assert reader.dequeue() == 1
    stopped = Call(lambda: (writer.enqueue(2), reader.dequeue()))
    assert stopped.is_blocked()
    writer.abort()
    reader.abort()
    stopped.raised(ClosedError)


def test_after_so_many_bytes_an_end_is_gone(ends: Any) -> None:
    writer, reader = ends({"do": "disconnect", "after": 1000})

    def go_on() -> None:
        for _ in range(10):
            writer.enqueue(bytes(600))
            reader.dequeue()

    raises(PeerGoneError, go_on)
