"""A queue and a communicator by name, from a config."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvplug import Config, ConfigError, PluginError, Registry, StatelessGroup, build_communicator, build_queue
from kvplug.transport import Capabilities, Kind, TransportSpec, UnknownTransportError, hookimpl

pytestmark = pytest.mark.timeout(30)


def test_a_queue_is_built_by_name_and_carries_the_contexts_numbers() -> None:
    endpoint = build_queue(Config(queue="memory", timeout_s=0.2), n_reader=2, max_chunks=3)
    assert (endpoint.context.n_reader, endpoint.context.max_chunks) == (2, 3)
    assert endpoint.context.max_chunk_bytes == 24 << 20
    with endpoint.create() as writer:
        readers = [endpoint.create_from_handle(writer.export_handle(), rank) for rank in range(2)]
        writer.enqueue({"step": 1})
        assert [reader.dequeue() for reader in readers] == [{"step": 1}] * 2
        with pytest.raises(TimeoutError):
            readers[0].dequeue()
        for reader in readers:
            reader.close()


def test_the_warning_interval_is_the_configs_unless_the_call_says_another() -> None:
    config = Config.from_dict({"queue": "memory", "queue_warning_interval_s": "5 s"})
    assert build_queue(config).context.warning_interval_s == 5.0
    assert build_queue(config, warning_interval_s=2.0).context.warning_interval_s == 2.0
    assert build_queue(Config(queue="memory")).context.warning_interval_s == 60.0


def test_auto_considers_no_memory_queue_or_communicator() -> None:
    every = {plugin.name for plugin in Registry.from_env().plugins} - {"core", "testing"}
    core = Registry.from_env({"KVPLUG_DISABLE_PLUGINS": ",".join(every)})
    assert {spec.name for spec in core.transports(Kind.QUEUE)} >= {"memory"}
    with pytest.raises(PluginError, match="no message queue can be had"):
        build_queue(Config(queue="auto"), registry=core)


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(UnknownTransportError, match="memory"):
        build_queue(Config(queue="memroy"))
    group = StatelessGroup.create("unix:", rank=0, world_size=1)
    with group, pytest.raises(UnknownTransportError, match="memory"):
        build_communicator(Config(communicator="memroy"), group)


def test_options_of_a_queue_that_takes_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="spin"):
        build_queue(Config(queue="memory", options={"memory": {"spin": 1}}))


def test_a_communicator_is_refused_a_device_that_it_does_not_serve() -> None:
    group = StatelessGroup.create("unix:", rank=0, world_size=1)
    with group, pytest.raises(PluginError, match="moves cpu tensors, and cuda ones are needed"):
        build_communicator(Config(communicator="memory"), group, device="cuda:0")


class Trusting:
    """A plugin of which nothing asks who is at the other end."""

    @staticmethod
    @hookimpl
    def kvplug_transports() -> list[TransportSpec]:
        able = Capabilities(authenticated=False, cross_host=True)
        memory = "kvplug_testing.memory.queue:MemoryQueueEndpoint"
        return [TransportSpec(kind=Kind.QUEUE, name="trusting", factory=memory, capabilities=able)]


@pytest.mark.parametrize("name", ["trusting", "auto"])
def test_where_strangers_reach_it_a_queue_must_authenticate(name: str) -> None:
    registry = Registry()
    registry.register(Trusting, name="trusting")
    exposed = {"queue": name, "host": "192.0.2.7"}
    with pytest.raises(PluginError, match="its data plane is not authenticated"):
        build_queue(Config(**exposed), registry=registry)
    build_queue(Config(queue=name), registry=registry)


def test_a_communicator_is_built_by_name_at_every_rank() -> None:
    import torch

    listener = StatelessGroup.listen("unix:")
    sums: dict[int, Any] = {}

    def rank(number: int) -> None:
        address = listener if number == 0 else listener.contact
        with StatelessGroup.create(address, rank=number, world_size=2, timeout=20) as group:
            config = Config(communicator="memory", timeout_s=20)
            with build_communicator(config, group, unique_name="tp:0", ranks=[4, 6]) as made:
                assert (made.rank, made.global_rank) == (number, (4, 6)[number])
                sums[number] = made.all_reduce(torch.ones(2) * (number + 1)).tolist()
                group.barrier()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {0: [3.0, 3.0], 1: [3.0, 3.0]}


def test_a_queue_comes_from_a_group_and_goes_from_one_rank_to_all_others() -> None:
    listener = StatelessGroup.listen("unix:")
    got: dict[int, Any] = {}

    def rank(number: int) -> None:
        address = listener if number == 0 else listener.contact
        with StatelessGroup.create(address, rank=number, world_size=3, timeout=20) as group:
            endpoint = build_queue(Config(queue="memory", timeout_s=20))
            queue = endpoint.create_from_process_group(group, writer_rank=1)
            with queue:
                assert queue.is_writer is (number == 1)
                got[number] = queue.broadcast_object("hello" if number == 1 else None)
                group.barrier()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {0: "hello", 1: "hello", 2: "hello"}
