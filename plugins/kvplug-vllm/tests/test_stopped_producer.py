"""A producer that is stopped with SIGSTOP: its consumer goes on, and computes what does not come."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).parent
FAULTS, INSIDE = f"{HERE}/faults.py", f"{HERE}/inside.py"
STALL_S = 2.0
SLACK_S = 1.5
"""For a busy machine."""
KINDS: dict[str, dict[str, Any]] = {
    "layer by layer": {},
    "in the background": {"async_load": True},
    "steps in flight": {"async_scheduling": True, "setup": [f"{FAULTS}:schedule_ahead"]},
}
WAIT_S = 60.0


@attrs.frozen
class Consumer:
    """An engine, and whether its loads are in the background."""

    engine: Any
    is_in_background: bool

    def count(self, what: str, *labels: str) -> float:
        return sum(
            value
            for name, value in self.engine.metrics().items()
            if name.startswith(f"kvplug_{what}_total{{") and all(label in name for label in labels)
        )

    def num_given_up(self) -> float:
        """Requests that waited in vain for a store's answer, and loads that stalled."""
        return self.count("transfer_failures", "op=match", "reason=expired") + self.count(
            "transfer_failures", "op=load", "reason=stalled"
        )


@pytest.fixture(scope="module")
def port(free_port: Any) -> int:
    return int(free_port())


@pytest.fixture(scope="module")
def prefill(start: Any, config_for: Any, port: int) -> Iterator[Any]:
    # Pages cross a pipe: memory that the consumer has mapped needs no producer that answers.
    config = config_for("kv_producer", port, options={"host": {"map": False}})
    with start(config, block_size=32, life_s=1800.0) as engine:
        yield engine


@pytest.fixture(scope="module", params=list(KINDS))
def decode(request: Any, start: Any, config_for: Any, prefill: Any, port: int) -> Iterator[Consumer]:
    settings = dict(KINDS[request.param])
    lookup = {
        "async_load": settings.pop("async_load", False),
        "stall_timeout_s": STALL_S,
        "wait_timeout_s": 0.5,  # a producer that is stopped does not say what it has
    }
    setups = [*settings.pop("setup", []), f"{INSIDE}:time_calls"]
    config = config_for("kv_consumer", port, kv_load_failure_policy="recompute", options={"lookup": lookup})
    with start(config, block_size=32, setup=setups, **settings) as engine:
        yield Consumer(engine, request.param != "layer by layer")


def loads(prefill: Any, decode: Consumer, prompt: list[int], tokens: tuple[int, ...]) -> None:
    """In a while at least: a producer that was stopped has to answer first."""
    limit = time.monotonic() + WAIT_S
    while True:
        salt = uuid.uuid4().hex
        prefill.one(prompt, max_tokens=1, salt=salt)
        answer = decode.engine.one(prompt, salt=salt)
        assert answer.tokens == tokens
        if answer.num_cached:
            return
        assert time.monotonic() < limit, "it loads nothing any more"


def test_a_stopped_producer_holds_up_a_step_for_the_stall_timeout_and_a_background_load_none(
    prefill: Any, decode: Consumer, prompts: Any, alone: Any
) -> None:
    loads(prefill, decode, prompts[300], alone[300])
    given_up = decode.num_given_up()  # the first request may have come before the producer was connected
    salt = uuid.uuid4().hex
    prefill.one(prompts[700], max_tokens=1, salt=salt)
    time.sleep(1)  # its event comes in much less; if it does not, nothing is promised, and the test says so
    stream = decode.engine.ask("begin", prompt=prompts[100], max_tokens=100)
    decode.engine.ask("step", times=3)
    decode.engine.ask("call", where=f"{INSIDE}:longest_calls")
    prefill.peer.stop()
    try:
        loading = decode.engine.ask("begin", prompt=prompts[700], max_tokens=16, salt=salt)
        answers = decode.engine.ask("run", timeout=240)
    finally:
        prefill.peer.cont()
    assert tuple(answers[stream][:16]) == alone[100]
    assert len(answers[stream]) == 100
    assert tuple(answers[loading]) == alone[700], "it is computed"
    # It stops before the request comes, so its store is asked in vain; a load that had begun would stall.
    assert decode.num_given_up() == given_up + 1
    assert decode.count("transfer_failures", "op=load", "reason=stalled") == decode.count(
        "transfer_failures", "op=load"
    )
    longest = decode.engine.ask("call", where=f"{INSIDE}:longest_calls")
    name = max(longest, key=longest.get)
    print(f"longest of kvplug's calls: {name}, {longest[name] * 1000:.0f} ms")
    if decode.is_in_background:
        assert longest[name] < STALL_S / 4, f"{name} took {longest[name]} s of the engine's time"
    else:
        assert longest[name] < STALL_S + SLACK_S, f"{name} took {longest[name]} s of the engine's time"
    loads(prefill, decode, prompts[300], alone[300])
