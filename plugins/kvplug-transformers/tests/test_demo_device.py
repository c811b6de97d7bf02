"""The demo on another device than the CPU, as far as that can be told without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvplug import Config
from kvplug.engine import Side
from kvplug_transformers.demo.worker import DemoWorker
from kvplug_transformers.model.facts import describe

SETTINGS = {"config": None, "overrides": {}, "block_size": 16, "layout": None}


class Heard:
    """What a worker told its parent."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def send(self, event: str, **values: Any) -> None:
        self.events.append((event, values))


@pytest.fixture
def worker(llama) -> DemoWorker:
    made = DemoWorker(Heard())
    made._settings = SETTINGS
    made._loaded = SimpleNamespace(model=llama)
    made._facts = describe(llama)
    made._config = Config.load(None, overrides={"role": "producer"})
    return made


class BuildsNowError(Exception):
    """The connector is about to be built: all that comes before has happened."""


@pytest.fixture
def heard_before_the_connector(worker, monkeypatch) -> Any:
    def build(*_: Any, **__: Any) -> None:
        raise BuildsNowError

    def events() -> list[str]:
        with pytest.raises(BuildsNowError):
            worker._do_open(num_tokens=300, listen=None, connect=None, corrupt=False)
        return [event for event, _ in worker._parent.events]

    monkeypatch.setattr("kvplug_transformers.demo.worker.build_connector", build)
    return events


def test_a_gpu_computes_once_before_anything_is_timed(worker, monkeypatch, heard_before_the_connector):
    monkeypatch.setattr(type(worker._loaded.model), "device", SimpleNamespace(type="cuda"))
    assert heard_before_the_connector() == ["warming", "warming"]


def test_a_cpu_computes_nothing_in_advance(heard_before_the_connector):
    assert heard_before_the_connector() == []


def test_between_two_kinds_of_device_what_was_agreed_on_for_cpu_tensors_is_told(worker):
    worker._config = Config(device="cuda")
    agreement = SimpleNamespace(
        transports={"cpu": SimpleNamespace(chosen="shm", candidates=())},
        checksum=None,
        converts=("device: ours cuda, theirs cpu",),
    )
    worker._connectors[Side.WORKER] = SimpleNamespace(link=SimpleNamespace(agreement=agreement))
    assert worker._choice() == {
        "transport": "shm",
        "reasons": ["integrity: off", "device: ours cuda, theirs cpu"],
    }
    worker._connectors.clear()
