"""What a plan of faults does to message queues, and that one that hits nothing does nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from kvplug import (  # noqa: E402
    ClosedError,
    Config,
    ConfigError,
    PeerGoneError,
    PluginError,
    Registry,
    TimeoutError,
    build_queue,
)
from kvplug.transport import (  # noqa: E402
    Capabilities,
    Cost,
    Credentials,
    Kind,
    QueueContext,
    QueueEndpoint,
    TransportSpec,
    hookimpl,
)
from kvplug_testing import MessageQueueContract  # noqa: E402
from kvplug_testing.faults import FaultyQueueEndpoint, Plan, Rule  # noqa: E402
from kvplug_testing.faults.messages import parts, writable  # noqa: E402
from kvplug_testing.faults.queue import faulty  # noqa: E402
from kvplug_testing.memory.queue import MemoryQueueEndpoint  # noqa: E402
from kvplug_testing.waits import Call, raises  # noqa: E402

pytestmark = pytest.mark.timeout(60)

PATIENCE_S = 20.0
NEVER = Plan(rules=[Rule(do="drop", direction=way, message=1 << 40) for way in ("send", "recv")])


@pytest.mark.variant
class TestTransparent(MessageQueueContract):
    """With rules that hit nothing a faulty queue is the inner queue."""

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


def as_bytes(value: Any) -> bytes:
    """Of the tensors and arrays in a value, in order."""
    return b"".join(bytes(writable(part)) for part in parts(value))


@pytest.mark.parametrize("bits", [1, 9])
@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(8),
        numpy.zeros((2, 3)),
        numpy.zeros(()),
        {"kv": torch.zeros(8), "step": 3},
        [torch.zeros(0), (torch.zeros(2, dtype=torch.bfloat16), {1: numpy.zeros(5, "int16")}), "text"],
    ],
    ids=["tensor", "array", "an array without dimensions", "in a dict", "in lists and tuples"],
)
def test_bits_are_turned_over_in_tensors_and_arrays_wherever_they_are(
    ends: Any, value: Any, bits: int
) -> None:
    writer, reader = ends({"do": "flip", "bits": bits})
    writer.enqueue(value)
    (got,) = read(reader, 1)
    assert sum(byte.bit_count() for byte in as_bytes(got)) == bits
    assert not any(as_bytes(value)), "the writer's own was changed"
    assert len(as_bytes(got)) == len(as_bytes(value))
    assert writer.hits + reader.hits == {"flip": 1}


@pytest.mark.parametrize("value", ["text", None, {"step": [1]}, torch.zeros(0), {"kv": torch.zeros(0, 3)}])
def test_a_value_without_a_bit_to_turn_over_passes_and_is_not_counted(
    ends: Any, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    writer, reader = ends({"do": "flip"})
    with caplog.at_level(logging.INFO):
        writer.enqueue(value)
        (got,) = read(reader, 1)
    assert repr(got) == repr(value)
    assert not writer.hits and not reader.hits
    assert "planned fault: rule 1 (flip), message 1 finds nothing to flip" in caplog.text


def test_the_same_seed_turns_over_the_same_bits_of_a_value(ends: Any) -> None:
    found = []
    for _ in range(2):
        writer, reader = ends({"do": "flip", "bits": 20})
        writer.enqueue([torch.zeros(100), {"kv": torch.zeros(100)}])
        found += map(as_bytes, read(reader, 1))
    assert found[0] == found[1]


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


# -- in a config -----------------------------------------------------------------------------------


class Offers:
    """A plugin with two queues: "auto" would take one of them, did it not go around others."""

    @staticmethod
    @hookimpl
    def kvplug_transports() -> list[TransportSpec]:
        able = Capabilities(authenticated=False, cross_host=True, cost=Cost(latency_us=50.0, gb_per_s=1.0))
        memory = "kvplug_testing.memory.queue:MemoryQueueEndpoint"
        faulty = "kvplug_testing.faults.queue:faulty"
        fast = Capabilities(cost=Cost(latency_us=1.0, gb_per_s=1.0))
        return [
            TransportSpec(kind=Kind.QUEUE, name="trusting", factory=memory, capabilities=able),
            TransportSpec(kind=Kind.QUEUE, name="around", factory=faulty, capabilities=fast, wraps=True),
        ]


@pytest.fixture
def registry() -> Registry:
    """Of the core and these alone: what else is installed, "auto" may like better."""
    every = {plugin.name for plugin in Registry.from_env().plugins} - {"core", "testing"}
    registry = Registry.from_env({"KVPLUG_DISABLE_PLUGINS": ",".join(every)})
    registry.register(Offers, name="offers")
    return registry


def config(inner: str, *rules: dict[str, Any], **more: Any) -> Config:
    faulty = {"inner": inner, "plan": {"seed": 3, "rules": list(rules)}}
    return Config(queue="faulty", timeout_s=PATIENCE_S, options={"faulty": faulty}, **more)


def test_a_config_puts_a_plan_around_the_queue_that_it_names(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    rules = [{"do": "drop", "message": 2}, {"do": "swap", "direction": "recv", "message": 1}]
    endpoint = build_queue(config("memory", *rules), n_reader=2, max_chunks=5, registry=registry)
    assert "faults are planned here: rules 2, seed 3" in caplog.text
    assert (endpoint.context.n_reader, endpoint.context.max_chunks) == (2, 5)
    plain = build_queue(Config(queue="memory"), registry=registry)
    with endpoint.create() as writer:
        reader = endpoint.create_from_handle(writer.export_handle(), 0)
        without = plain.create_from_handle(writer.export_handle(), 1)
        with reader, without:
            for value in (1, 2, 3):
                writer.enqueue(value)
            assert read(reader, 2) == [3, 1]
            assert read(without, 2) == [1, 3]
    assert "no planned fault" not in caplog.text


def test_a_plan_that_meets_no_value_warns(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    endpoint = build_queue(config("memory", {"do": "drop", "message": 2}), n_reader=0, registry=registry)
    with endpoint.create():
        pass
    assert "no planned fault has happened in this process: rules 1, messages 0" in caplog.text


def test_a_rule_may_name_one_end(registry: Registry) -> None:
    drop = {"do": "drop", "direction": "recv", "message": 1, "pipe": 3}
    endpoint = build_queue(config("memory", drop), n_reader=2, registry=registry)
    with endpoint.create() as writer:
        first, second = (endpoint.create_from_handle(writer.export_handle(), rank) for rank in range(2))
        with first, second:
            writer.enqueue(1)
            writer.enqueue(2)
            assert (read(first, 2), read(second, 1)) == ([1, 2], [2])


def test_an_inner_queue_auto_is_the_queue_that_auto_would_be(registry: Registry) -> None:
    endpoint = build_queue(config("auto"), registry=registry)
    assert isinstance(endpoint, FaultyQueueEndpoint)
    assert isinstance(endpoint._inner, MemoryQueueEndpoint)
    assert isinstance(build_queue(Config(queue="auto"), registry=registry), MemoryQueueEndpoint)


@pytest.mark.parametrize("inner", ["trusting", "auto"])
def test_where_strangers_reach_it_the_inner_queue_must_authenticate(registry: Registry, inner: str) -> None:
    with pytest.raises(PluginError, match="trusting: its data plane is not authenticated"):
        build_queue(config(inner, host="192.0.2.7"), registry=registry)
    build_queue(config(inner), registry=registry)


def test_without_an_inner_queue_there_is_none() -> None:
    with pytest.raises(ConfigError, match="wraps nothing"):
        faulty(QueueContext(options=None, credentials=Credentials()))
