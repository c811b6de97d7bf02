"""When a path counts as slow: from figures alone, with a clock of the test's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kvplug.metrics import rate as rates
from kvplug.metrics.rate import PathWatch, Rate, SlowRate, host_load
from kvplug.transport import Capabilities

MIB = 1 << 20
CLAIM = Capabilities.Cost(latency_us=50.0, gb_per_s=10.0)


class Path:
    """Sends messages one after the other, each at a rate."""

    def __init__(self, claim: Capabilities.Cost | None = CLAIM, busy: float = 1.0) -> None:
        self.rate, self.busy = Rate(claim), busy

    def send(self, gb_per_s: Iterable[float], mib: int = 8) -> list[SlowRate]:
        with mock.patch.object(rates, "host_load", return_value=self.busy):
            found = [self.rate.add(mib * MIB, mib * MIB / 1e9 / rate) for rate in gb_per_s]
        return [each for each in found if each is not None]


def test_a_path_at_less_than_a_tenth_of_its_claim_is_found_after_some_seconds() -> None:
    path = Path()
    assert not path.send([0.02] * 7)
    (found,) = path.send([0.02])
    assert found.factor == rates.CLAIM_FACTOR and found.expected_gb_per_s == 10.0
    assert found.gb_per_s == pytest.approx(0.02)
    assert "0.02 GB/s (64 MiB in 3.36 s), less than a tenth of the 10 GB/s that its transport claims" in str(
        found
    )


def test_a_slow_path_that_only_takes_a_moment_is_not_found() -> None:
    """However rarely something is sent: 100 messages, each late by 15 ms, may be spread over days."""
    assert not Path().send([0.5] * 100)  # 1.7 s
    assert len(Path().send([0.5] * 200)) == 1
    assert len(Path().send([0.05] * 8, mib=256)) == 1, "one large message at a time is enough"


@pytest.mark.parametrize(
    ("rates", "mib"),
    [
        ([1.5] * 500, 8),
        ([*[0.02] * 7, 5.0] * 20, 8),
        ([0.9] * 500, 1),  # 8 of 1 MiB are a batch, of which a tenth of the claim takes 12 ms
    ],
    ids=["above a tenth", "one of eight is fast", "small ones with their latency"],
)
def test_a_good_path_is_not_found(rates: list[float], mib: int) -> None:
    assert not Path().send(rates, mib)


def test_what_it_carried_before_counts_also_without_a_claim() -> None:
    path = Path(claim=None)
    assert not path.send([2.0, 0.6] * 20)
    (found,) = path.send([0.1] * 40)[:1]
    assert found.factor == rates.HISTORY_FACTOR
    assert "less than a fifth of the 1.3 GB/s that it carried before" in str(found)
    assert not Path(claim=None).send([*[0.5] * 4, *[0.01] * 50]), "there is too little to compare with"


def test_a_busy_host_is_an_excuse_for_as_much_as_it_is_busy() -> None:
    assert not Path(busy=8).send([0.02] * 50)
    assert Path(busy=8).send([0.01] * 50)
    assert Path(busy=1000).send([0.002] * 50)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[PathWatch, list[float]]]:
    """Makes watches, with the seconds that each measures; the pipes of other tests do not count."""
    monkeypatch.setattr(rates, "_sending", rates.SharedTime())

    def make() -> tuple[PathWatch, list[float]]:
        seconds: list[float] = []
        rate: Any = SimpleNamespace(add=lambda nbytes, took: seconds.append(round(took, 3)))
        return PathWatch(rate, lambda finding: None), seconds

    return make


def test_waiting_behind_earlier_messages_of_a_pipe_is_not_slow(measured: Any) -> None:
    watch, seconds = measured()
    sent = [watch.begin(MIB, 10.0) for _ in range(3)]
    for number, each in enumerate(sent):
        watch.end(each, MIB, 11.0 + number)
    assert seconds == [1.0, 1.0, 1.0]


def test_a_slow_path_among_many_that_send_now_and_then_is_measured_as_slow(measured: Any) -> None:
    (slow, of_slow), others = measured(), [measured()[0] for _ in range(50)]
    sending = slow.begin(8 * MIB, 10.0)
    for number, watch in enumerate(others):
        began = 10.0 + number / 50
        watch.end(watch.begin(MIB, began), MIB, began + 0.001)
    slow.end(sending, 8 * MIB, 11.0)
    assert of_slow == [pytest.approx(1.0, abs=0.05)]


def test_a_process_on_a_few_processors_of_a_large_busy_host_is_not_excused_for_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 640)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    (tmp_path / "loadavg").write_text("320.00 0.00 0.00 5/999 4711\n")
    monkeypatch.setattr(rates, "_LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(rates, "_num_running", lambda: 1)
    assert host_load() == 0.5
    monkeypatch.setattr(rates, "_num_running", lambda: 8)
    assert host_load() == 4.0
