"""The ranks of a group use the same communicator, and "auto" depends on where they are."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplug import Config, ConfigError, Registry, StatelessGroup, build_communicator
from kvplug_testing.waits import Call

pytestmark = pytest.mark.timeout(60)


def chosen(names: Sequence[str] = ("auto", "auto"), *, blocks: str = "", where: Any = None) -> list[Call]:
    """The names of the classes of two ranks' communicators, or the errors of building them.

    Args:
        blocks: a plugin that rank 1 cannot use.
        where: receives the host of each rank, in the rank's thread.
    """
    listener = StatelessGroup.listen("unix:")
    registries = Registry.from_env(), Registry.from_env({"KVPLUG_DISABLE_PLUGINS": blocks})

    def rank(number: int) -> str:
        if where is not None:
            where.domain = f"host {number}"
        address = listener if number == 0 else listener.contact
        config = Config(communicator=names[number], timeout_s=20)
        with (
            StatelessGroup.create(address, rank=number, world_size=2, timeout=20) as group,
            build_communicator(config, group, registry=registries[number]) as made,
        ):
            assert made.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
            group.barrier()
            return type(made).__name__

    return [Call(lambda number=number: rank(number)) for number in range(2)]  # type: ignore[misc]


def test_shared_memory_is_taken_on_one_host() -> None:
    assert [call.result(30) for call in chosen()] == ["ShmCommunicator"] * 2


def test_sockets_are_taken_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    where = threading.local()  # stands for the identity of a rank's process
    monkeypatch.setattr(
        "kvplug.assembly.builders.PeerIdentity", SimpleNamespace(of_this_process=lambda: where)
    )
    assert [call.result(30) for call in chosen(where=where)] == ["CpuCommunicator"] * 2


def test_what_one_rank_cannot_use_is_not_taken() -> None:
    assert [call.result(30) for call in chosen(blocks="shm")] == ["CpuCommunicator"] * 2


def test_different_names_are_refused_at_every_rank() -> None:
    for call, rank, theirs in zip(chosen(("auto", "cpu")), (1, 0), ("cpu", "auto"), strict=True):
        with pytest.raises(ConfigError, match=f"and that of rank {rank} '{theirs}'"):
            call.result(30)
