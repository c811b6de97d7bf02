"""Which communicator "auto" is depends on where the ranks are."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from kvplug import Config, StatelessGroup, build_communicator
from kvplug_cpu.communicator import CpuCommunicator
from kvplug_shm.communicator import ShmCommunicator
from kvplug_testing.waits import Call

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("hosts", [1, 2])
def test_shared_memory_is_taken_on_one_host_and_sockets_between_hosts(
    hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = threading.local()  # stands for the identity of a rank's process
    here = SimpleNamespace(of_this_process=lambda: where)
    monkeypatch.setattr("kvplug.assembly.builders.PeerIdentity", here)
    listener = StatelessGroup.listen("unix:")

    def rank(number: int) -> object:
        where.domain = f"host {number % hosts}"
        address = listener if number == 0 else listener.contact
        with (
            StatelessGroup.create(address, rank=number, world_size=2, timeout=20) as group,
            build_communicator(Config(timeout_s=20), group) as made,
        ):
            assert made.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
            group.barrier()
            return type(made)

    calls = [Call(lambda number=number: rank(number)) for number in range(2)]  # type: ignore[misc]
    expected = ShmCommunicator if hosts == 1 else CpuCommunicator
    assert [call.result(30) for call in calls] == [expected] * 2
