"""The memory that a config lets a process take, compared with what is available: at start, and in explain."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import pytest

from kvplug import Config, ConfigError, Registry, check_config
from kvplug.assembly import budgets, resolve
from kvplug.assembly.doctor.explanation import explain
from kvplug.engine import ConnectorSpec
from kvplug.transport import StoreSpec, TransportSpec, hookimpl, option

GIB = 1 << 30


@attrs.frozen(kw_only=True)
class Options:
    size: int | None = option(None, unit="bytes", takes_memory=True, help="Of pages.")
    chunk: int = option(4 * GIB, unit="bytes", help="On a disk.")


@attrs.frozen(kw_only=True)
class QueueOptions:
    keep: int = option(1, unit="bytes", takes_memory=True, help="Of messages.")


class Plugin:
    @hookimpl
    def kvplug_stores(self) -> list[StoreSpec]:
        return [StoreSpec(name="heap", factory="a:b", client="a:b", options=f"{__name__}:Options")]

    @hookimpl
    def kvplug_transports(self) -> list[TransportSpec]:
        return [TransportSpec(kind="queue", name="ring", factory="a:b", options=f"{__name__}:QueueOptions")]

    @hookimpl
    def kvplug_connectors(self) -> list[ConnectorSpec]:
        return [
            ConnectorSpec(name="pages", factory="a:b", worker_factory="a:b", moves_pages=True),
            ConnectorSpec(name="entries", factory="a:b", worker_factory="a:b", uses_lookup_buffer=True),
        ]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setattr(budgets, "machine_memory", lambda: 8 * GIB)
    monkeypatch.setattr(budgets, "free_memory", lambda: 2 * GIB)
    monkeypatch.setattr(resolve, "_short", set())
    made = Registry()
    made.register(Plugin(), name="heap", distribution="kvplug-heap", version="1.0")
    return made


def config(**more: Any) -> Config:
    return Config.from_dict({"role": "both", "connector": "pages", "stores": ["heap"], **more})


FINAL: list[tuple[dict[str, Any], str, str]] = [
    ({"options": {"heap": {"size": "10 TiB"}}}, "options.heap.size", "10 TiB is more than the 8 GiB"),
    ({"connector": "entries", "stores": [], "buffer_size": "9 GiB"}, "buffer_size", "9 GiB is more than"),
    ({"device": "cuda", "staging_size": "9 GiB"}, "staging_size", "with 1 GiB for buffer_size, is"),
    ({"options": {"ring": {"keep": "9 GiB"}}}, "options.ring.keep", "set it to at most 7168 MiB"),
    (
        {"options": {"heap": {"size": "5 GiB"}, "ring": {"keep": "4 GiB"}}},
        "options.heap.size",
        "5 GiB, with 4 GiB for options.ring.keep, is more than the 8 GiB of memory that this process can",
    ),
]


@pytest.mark.parametrize(("given", "key", "message"), FINAL)
def test_what_can_never_fit_is_refused_at_start(
    registry: Registry, given: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(config(**given), registry)
    (fault,) = caught.value.faults
    assert fault.startswith(f"{key}: ") and message in fault
    problems = [each for each in explain(config(**given), registry) if each.topic == key]
    assert [(each.verdict, message in each.what) for each in problems] == [("problem", True)]


def test_what_does_not_fit_now_is_warned_of_once_and_a_problem(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    large = config(options={"heap": {"size": "3 GiB"}})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            check_config(large, registry)
    (record,) = caplog.records
    assert "3 GiB is more than the 2 GiB of memory that are free now" in record.getMessage()
    problems = [each for each in explain(large, registry) if each.topic == "options.heap.size"]
    assert [each.verdict for each in problems] == ["problem"]


@pytest.mark.parametrize(
    "given",
    [
        {"options": {"heap": {"size": "2 GiB", "chunk": "10 TiB"}}},
        {"role": "consumer", "options": {"heap": {"size": "10 TiB"}}},
        {"staging_size": "10 TiB"},
        {"connector": "entries", "options": {"heap": {"size": "10 TiB"}}},
        {"connector": "entries", "role": "consumer", "buffer_size": "9 GiB"},
    ],
)
def test_what_is_not_taken_from_this_memory_is_not_counted(
    registry: Registry, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    check_config(config(**given), registry)
    assert not caplog.records
