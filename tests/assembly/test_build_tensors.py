"""A queue and a communicator by name, from a config."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvplug import (
    Config,
    ConfigError,
    PluginError,
    Registry,
    StatelessGroup,
    build_communicator,
    build_lookup,
    build_queue,
)
from kvplug.errors import UnknownTransportError
from kvplug.transport import Capabilities, TransportSpec, hookimpl
from kvplug_testing.memory.communicator import MemoryCommunicator  # no two threads may parse it
from kvplug_testing.sources import module_at
from kvplug_testing.waits import Call

pytestmark = pytest.mark.timeout(30)

RELAY = Path(__file__).parents[1] / "lab/subjects/relay.py"


def test_a_queue_is_built_by_name() -> None:
    registry = Registry.from_env()
    registry.register(module_at(str(RELAY)).plugin, name="relay")
    with pytest.raises(ConfigError, match="takes no options"):
        build_queue(Config(queue="relay", options={"relay": {"spin": 1}}), registry=registry)
    endpoint = build_queue(Config(queue="relay", timeout_s=0.2), n_reader=2, registry=registry)
    assert endpoint.context.max_chunk_bytes == 24 << 20
    with endpoint.create() as writer:
        readers = [endpoint.create_from_handle(writer.export_handle(), rank) for rank in range(2)]
        writer.enqueue({"step": 1})
        assert [reader.dequeue() for reader in readers] == [{"step": 1}] * 2
        with pytest.raises(TimeoutError):
            readers[0].dequeue()
        for reader in readers:
            reader.close()


@pytest.mark.parametrize("name", ["trusting", "auto"])
def test_a_queue_that_other_hosts_reach_must_authenticate(name: str) -> None:
    module_at(str(RELAY))
    cost = Capabilities.Cost(latency_us=50.0, gb_per_s=1.0)
    able = Capabilities(authenticated=False, cross_host=True, cost=cost)
    factory = "kvplug_relay.queue:RelayEndpoint"
    spec = TransportSpec(kind="queue", name="trusting", factory=factory, capabilities=able)
    registry = Registry()
    registry.register(SimpleNamespace(kvplug_transports=hookimpl(lambda: [spec])), name="trusting")
    with pytest.raises(PluginError, match="its data plane is not authenticated"):
        build_queue(Config(queue=name, host="192.0.2.7"), registry=registry)
    build_queue(Config(queue=name), registry=registry)


def test_what_a_config_names_wrongly_is_refused() -> None:
    group = StatelessGroup.create("unix:", rank=0, world_size=1)
    with group:
        with pytest.raises(UnknownTransportError, match="memroy"):
            build_queue(Config(queue="memroy"))
        with pytest.raises(UnknownTransportError, match="'memory'"):
            build_communicator(Config(communicator="memroy"), group)
        with pytest.raises(UnknownTransportError, match="memory"):
            build_lookup(Config(lookup_buffer="memory"))
        with pytest.raises(PluginError, match="moves cpu tensors, but cuda tensors are needed"):
            build_communicator(Config(communicator="memory"), group, device="cuda:0")


def test_a_communicator_is_built_by_name_at_every_rank() -> None:
    import torch

    listener = StatelessGroup.listen("unix:")
    config = Config(communicator="memory", timeout_s=20)

    def rank(number: int) -> Any:
        address = listener if number == 0 else listener.contact
        with (
            StatelessGroup.create(address, rank=number, world_size=2, timeout=20) as group,
            build_communicator(config, group, unique_name="tp:0", ranks=[4, 6]) as made,
        ):
            assert isinstance(made, MemoryCommunicator)
            assert (made.rank, made.global_rank) == (number, (4, 6)[number])
            found = made.all_reduce(torch.ones(2) * (number + 1)).tolist()
            group.barrier()
            return found

    calls = [Call(lambda number=number: rank(number)) for number in range(2)]  # type: ignore[misc]
    assert [call.result(25) for call in calls] == [[3.0, 3.0]] * 2
