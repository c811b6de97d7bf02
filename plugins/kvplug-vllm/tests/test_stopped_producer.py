"""A producer that is stopped with SIGSTOP: its consumer goes on, and computes what does not come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_engines import transfer_config
from vllm_servers import new_salt, until_loaded

pytestmark = pytest.mark.timeout(900)

STALL_S = 2.0
SLACK_S = 1.5
"""For a busy machine."""
KINDS: dict[str, dict[str, Any]] = {
    "layer by layer": {},
    "in the background": {"async_load": True},
    "steps in flight": {"async_scheduling": True, "setup": ["faults:schedule_ahead"]},
}


def num_given_up(decode: Any) -> float:
    """Requests that waited in vain for a store's answer, and loads that stalled."""
    reasons = (("op=match", "reason=expired"), ("op=load", "reason=stalled"))
    return sum(decode.count("transfer_failures", *labels) for labels in reasons)


@pytest.fixture(scope="module")
def prefill(start, shared_port) -> Iterator[Any]:
    # Pages cross a pipe: memory that the consumer has mapped needs no producer that answers.
    config = transfer_config("kv_producer", shared_port, options={"host": {"map": False}})
    with start(config, block_size=32, life_s=1800.0) as engine:
        yield engine


@pytest.fixture(scope="module", params=list(KINDS))
def decode(request, start, prefill, shared_port) -> Iterator[Any]:
    settings = dict(KINDS[request.param])
    lookup = {
        "async_load": settings.pop("async_load", False),
        "stall_timeout_s": STALL_S,
        "wait_timeout_s": 0.5,  # a producer that is stopped does not say what it has
    }
    setups = [*settings.pop("setup", []), "inside:time_calls"]
    config = transfer_config(
        "kv_consumer", shared_port, kv_load_failure_policy="recompute", options={"lookup": lookup}
    )
    with start(config, block_size=32, setup=setups, **settings) as engine:
        yield engine


def loads(prefill: Any, decode: Any, prompt: list[int], tokens: tuple[int, ...]) -> None:
    """In a while at least: a producer that was stopped has to answer first."""

    def ask() -> Any:
        salt = new_salt()
        prefill.one(prompt, max_tokens=1, salt=salt)
        return decode.one(prompt, salt=salt)

    until_loaded(ask, tokens)


def test_a_stopped_producer_holds_up_a_step_for_the_stall_timeout_and_a_background_load_none(
    request, prefill, decode, prompts, alone
):
    loads(prefill, decode, prompts[300], alone[300])
    given_up = num_given_up(decode)  # the first request may have come before the producer was connected
    salt = new_salt()
    prefill.one(prompts[700], max_tokens=1, salt=salt)
    time.sleep(1)  # its event comes in much less; if it does not, nothing is promised, and the test says so
    stream = decode.ask("begin", prompt=prompts[100], max_tokens=100)
    decode.ask("step", times=3)
    decode.call("inside:longest_calls")
    prefill.peer.stop()
    try:
        loading = decode.ask("begin", prompt=prompts[700], max_tokens=16, salt=salt)
        answers = decode.ask("run", timeout=240)
    finally:
        prefill.peer.cont()
    assert tuple(answers[stream][:16]) == alone[100]
    assert len(answers[stream]) == 100
    assert tuple(answers[loading]) == alone[700], "it is computed"
    # It stops before the request comes, so its store is asked in vain; a load that had begun would stall.
    assert num_given_up(decode) == given_up + 1
    assert decode.count("transfer_failures", "op=load", "reason=stalled") == decode.count(
        "transfer_failures", "op=load"
    )
    longest = decode.call("inside:longest_calls")
    name = max(longest, key=longest.get)
    print(f"longest of kvplug's calls: {name}, {longest[name] * 1000:.0f} ms")
    limit = STALL_S + SLACK_S if "layer by layer" in request.node.callspec.id else STALL_S / 4
    assert longest[name] < limit, f"{name} took {longest[name]} s of the engine's time"
    loads(prefill, decode, prompts[300], alone[300])
