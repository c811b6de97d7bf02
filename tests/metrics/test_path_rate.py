"""When a path counts as slow: from figures alone, with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from kvplug.metrics.path_rate import Finding, PathRate, PathWatch
from kvplug.transport import Cost

MIB = 1 << 20
CLAIM = Cost(latency_us=50.0, gb_per_s=10.0)


class Path:
    """Sends messages one after the other, each at a rate."""

    def __init__(self, claim: Cost | None = CLAIM, busy: float = 1.0) -> None:
        self.rate = PathRate(claim, busy=lambda: busy)
        self.now = 100.0

    def send(self, gb_per_s: Iterable[float], mib: int = 8, shares: int = 1) -> list[Finding]:
        found = []
        for rate in gb_per_s:
            seconds = mib * MIB / 1e9 / rate
            self.now += seconds
            found.append(self.rate.sent(mib * MIB, seconds, self.now, shares=shares))
        return [each for each in found if each is not None]


def test_a_path_at_less_than_a_tenth_of_its_claim_is_found_after_some_seconds() -> None:
    path = Path()
    assert not path.send([0.02] * 7)
    (found,) = path.send([0.02])
    assert found.against == "claim" and found.expected_gb_per_s == 10.0
    assert found.gb_per_s == pytest.approx(0.02)
    assert "0.02 GB/s (64 MiB in 3.36 s), less than a tenth of the 10 GB/s that its transport claims" in str(
        found
    )


def test_a_slow_path_that_only_takes_a_moment_is_not_found() -> None:
    assert not Path().send([0.5] * 100)  # 1.7 s
    assert len(Path().send([0.5] * 200)) == 1


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
    assert found.against == "history"
    assert "less than a fifth of the 1.3 GB/s that it carried before" in str(found)
    assert not Path(claim=None).send([*[0.5] * 4, *[0.01] * 50]), "there is too little to compare with"


def test_one_large_message_at_a_time_is_enough() -> None:
    assert len(Path().send([0.05] * 8, mib=256)) == 1


def test_pipes_that_send_at_the_same_time_share_the_path() -> None:
    assert not Path().send([0.3] * 400, shares=4)
    assert Path().send([0.3] * 400)


def test_a_busy_host_is_an_excuse_for_as_much_as_it_is_busy() -> None:
    assert not Path(busy=8).send([0.02] * 50)
    assert Path(busy=8).send([0.01] * 50)
    assert Path(busy=1000).send([0.002] * 50)


def test_waiting_behind_earlier_messages_of_a_pipe_is_not_slow() -> None:
    sent: list[float] = []

    class Rate:
        def sent(self, nbytes: int, seconds: float, now: float, *, shares: int) -> None:
            sent.append(round(seconds, 3))
            assert shares == 1

    rate: Any = Rate()
    watch = PathWatch(rate, lambda finding: None)
    for _ in range(3):
        watch.begins()
    for number in range(3):
        watch.ends(MIB, 10.0, 11.0 + number)
    assert sent == [1.0, 1.0, 1.0]
    watch.close(tell=False)


def test_pipes_of_one_process_know_of_each_other() -> None:
    shares: list[int] = []

    class Rate:
        def sent(self, nbytes: int, seconds: float, now: float, **told: int) -> None:
            shares.append(told["shares"])

    rate: Any = Rate()
    one, other, third = (PathWatch(rate, lambda finding: None) for _ in range(3))
    for watch in (one, other, third):
        watch.begins()
    third.ends(0, 10.0, 10.1)  # it fails
    one.ends(MIB, 10.0, 11.0)
    other.ends(MIB, 10.5, 12.0)
    one.begins()
    one.ends(MIB, 12.5, 13.0)
    assert shares == [3, 2, 1]
    for watch in (one, other, third):
        watch.close(tell=False)
