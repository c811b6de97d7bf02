"""Blocks that vLLM keeps until a connector names their request: named late, early, twice, or never kept.

What a connector says wrongly must not end an engine: vLLM asserts that it waits for every name.
"""

from __future__ import annotations

import uuid
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)


class Probed:
    """An engine with the connector "probe": orders and facts in its folder, and how it is stepped."""

    def __init__(self, engine: Any, folder: Any) -> None:
        self.engine = engine
        self.folder = folder
        self.read = 0
        """Characters of its log that errors() has read."""

    def says(self, how: str, *request_ids: str, rank: int = 0) -> None:
        """Told to name these in the next step that is made."""
        self.folder.put(f"say {how} {rank}", list(request_ids))

    def begins(self, prompt: list[int], max_tokens: int = 4) -> str:
        """A request whose blocks no other engine has, begun and stepped once; vLLM's own id of it."""
        before = self.engine.state()["requests"]
        self.engine.ask("begin", prompt=prompt, max_tokens=max_tokens, salt=uuid.uuid4().hex)
        (request_id,) = set(self.engine.state()["requests"]) - set(before)
        self.engine.ask("step")
        return str(request_id)

    def steps_idle(self, times: int = 3) -> None:
        """Steps without a request."""
        with self.folder.told("pending"):
            self.engine.ask("step", times=times)

    def errors(self) -> str:
        """What kvplug logged as errors since the last call."""
        text = self.engine.peer.stderr
        new, self.read = text[self.read :], len(text)
        return "\n".join(line for line in new.splitlines() if "ERROR" in line and "the connector" in line)

    def is_alive(self, prompt: list[int], tokens: tuple[int, ...]) -> None:
        assert self.engine.one(prompt, salt=uuid.uuid4().hex).tokens == tokens
        self.engine.ask("step")  # the workers are told that it has ended
        assert self.engine.state() == {"requests": [], "has_requests": False, "used_blocks": 0}


@pytest.fixture(scope="module")
def stepped(start: Any, probe: Any, exits: Any, tmp_path_factory: Any) -> Probed:
    """An engine that makes a step when it is told to."""
    folder = probe.Folder(tmp_path_factory.mktemp("orders"))
    env = {"PYTHONPATH": probe.PYTHONPATH}
    return Probed(exits.enter_context(start(probe.config(folder), block_size=32, env=env)), folder)


@pytest.mark.parametrize("how", ["sent", "received"])
def test_a_name_that_vllm_does_not_wait_for_is_not_passed_on(
    how: str, stepped: Probed, prompts: Any, alone: Any
) -> None:
    stepped.errors()
    running = stepped.begins(prompts[300])
    stepped.says(how, "nobody", "of this name")
    stepped.engine.ask("step")
    said = stepped.errors()
    assert f"nobody, of this name as {how}" in said
    stepped.engine.ask("run")
    assert stepped.folder.read("finished") == [running, "finished", False]
    stepped.says(how, running)
    stepped.steps_idle()
    assert f"{running} as {how}" in stepped.errors()
    stepped.is_alive(prompts[300], alone[300])


def test_a_running_request_is_not_received(stepped: Probed, prompts: Any, alone: Any) -> None:
    stepped.errors()
    running = stepped.begins(prompts[300], max_tokens=16)
    stepped.says("received", running)
    (tokens,) = stepped.engine.ask("run").values()
    assert tuple(tokens) == alone[300]
    assert f"{running} as received" in stepped.errors()
    stepped.is_alive(prompts[100], alone[100])


def test_an_idle_engine_frees_what_it_kept_when_the_connector_says_so(
    stepped: Probed, prompts: Any, alone: Any
) -> None:
    with stepped.folder.told("keep"):
        request_id = stepped.begins(prompts[300])
        stepped.engine.ask("run")
    stepped.engine.ask("step", times=5)
    kept = stepped.engine.state()
    assert (kept["requests"], kept["has_requests"]) == ([request_id], True), "it has reason to step"
    assert kept["used_blocks"] == 10
    stepped.says("sent", request_id)
    stepped.engine.ask("step")
    assert stepped.engine.state() == {"requests": [], "has_requests": False, "used_blocks": 0}
    assert stepped.folder.has(f"sent {request_id}"), "the scheduler side hears of it"
    stepped.errors()
    stepped.says("sent", request_id)
    stepped.steps_idle()
    assert f"{request_id} as sent" in stepped.errors(), "once only"
    stepped.is_alive(prompts[300], alone[300])


def test_a_request_may_be_named_before_the_worker_is_told_that_it_is_kept(
    stepped: Probed, prompts: Any, alone: Any
) -> None:
    """A peer may have read the blocks before the step that tells this worker that they are kept."""
    stepped.errors()
    with stepped.folder.told("keep"):
        request_id = stepped.begins(prompts[300])
        stepped.says("sent", request_id)
        stepped.engine.ask("run")
    stepped.engine.ask("step", times=3)
    assert stepped.engine.state()["requests"] == []
    assert stepped.errors() == ""
    stepped.is_alive(prompts[300], alone[300])


def test_one_that_was_named_early_and_then_not_kept_is_not_passed_on(
    stepped: Probed, prompts: Any, alone: Any
) -> None:
    stepped.errors()
    request_id = stepped.begins(prompts[300])
    stepped.says("sent", request_id)
    stepped.engine.ask("run")
    stepped.steps_idle()
    assert f"{request_id} as sent" in stepped.errors()
    stepped.is_alive(prompts[300], alone[300])


def test_a_load_is_received_once_and_what_failed_is_computed(
    stepped: Probed, prompts: Any, alone: Any
) -> None:
    stepped.errors()
    stepped.folder.put("offer", 64)
    request_id = stepped.begins(prompts[300], max_tokens=16)
    assert stepped.folder.take("loading") == request_id
    stepped.engine.ask("step", times=5)
    assert stepped.engine.state()["requests"] == [request_id], "it waits"
    stepped.says("received", request_id)
    stepped.engine.ask("step", times=2)
    assert stepped.errors() == ""
    stepped.says("received", request_id)
    (tokens,) = stepped.engine.ask("run").values()
    assert f"{request_id} as received" in stepped.errors()
    assert tuple(tokens) == alone[300]
    stepped.is_alive(prompts[100], alone[100])


def test_one_that_ends_while_it_loads_is_freed_when_received_and_not_when_sent(
    stepped: Probed, prompts: Any, alone: Any
) -> None:
    stepped.errors()
    stepped.folder.put("offer", 64)
    request_id = stepped.begins(prompts[300])
    with stepped.folder.told("keep"):
        stepped.engine.ask("abort", request_id=request_id.rpartition("-")[0])
    assert stepped.folder.read("finished") == [request_id, "aborted", True]
    stepped.says("sent", request_id)
    stepped.engine.ask("step", times=3)
    assert f"{request_id} as sent" in stepped.errors()
    assert stepped.engine.state()["requests"] == [request_id], "something may still write to its blocks"
    stepped.says("received", request_id)
    stepped.engine.ask("step")
    assert stepped.errors() == ""
    stepped.is_alive(prompts[300], alone[300])


def test_pending_work_keeps_an_engine_stepping_that_has_no_request(
    stepped: Probed, prompts: Any, alone: Any
) -> None:
    assert not stepped.engine.state()["has_requests"]
    before = stepped.folder.read("step")
    with stepped.folder.told("pending"):
        assert stepped.engine.state()["has_requests"]
        stepped.engine.ask("step", times=7)
        assert stepped.folder.read("step") == before + 7
    stepped.engine.ask("step", times=7)
    assert stepped.folder.read("step") == before + 7
    stepped.is_alive(prompts[300], alone[300])
