"""Two prefill and two decode servers of vLLM's behind the proxy: its tokens are those of one engine alone."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

import proxied
from vllm_engines import transfer_config
from vllm_servers import (
    CACHED,
    QUIET_CORES,
    Answer,
    answer_of,
    completion,
    new_salt,
    request,
    started,
    until_loaded,
)

pytestmark = pytest.mark.timeout(1500)


@attrs.frozen
class Deployment:
    proxy: Any
    prefill: tuple[Any, ...]
    decode: tuple[Any, ...]
    model: str

    def post(self, path: str, body: Any, port: int = 0, **headers: str) -> bytes:
        """What the proxy, or the server at that port, answers."""
        with request(port or self.proxy.port, "POST", path, body, **headers) as answer:
            said = answer.read()
            assert answer.status == 200, said
            return said

    def ask(self, prompt: list[int]) -> Answer:
        asked = completion(self.model, prompt, salt=new_salt())
        return answer_of(json.loads(self.post("/v1/completions", asked)))


@pytest.fixture(scope="module")
def deployment(model: str, alone, free_port: Callable[[], int]) -> Iterator[Deployment]:
    meetings = [free_port() for _ in range(2)]
    peers = [f"127.0.0.1:{meeting}" for meeting in meetings]
    consumer = transfer_config("kv_consumer", meetings[0], kv_load_failure_policy="recompute", peers=peers)
    configs = [*(transfer_config("kv_producer", meeting) for meeting in meetings), consumer, consumer]
    # The cores are shared by all processes: a check may take its time.
    options = {"health-interval-s": "1", "health-timeout-s": "20", "prefill-timeout-s": "120"}
    with started(model, [(each, CACHED) for each in configs], free_port, **QUIET_CORES) as servers:
        prefill, decode = servers[:2], servers[2:]
        with proxied.Proxy([one.url for one in prefill], [one.url for one in decode], options) as proxy:
            proxy.wait_until_ready()
            yield Deployment(proxy, prefill, decode, model)


def test_tokens_are_those_of_one_engine_whatever_way_a_request_takes(deployment, prompts, alone):
    proxy = deployment.proxy
    for server in deployment.decode:  # each decode server has met each prefill server
        for _ in deployment.prefill:
            before = server.transfers("load")
            while server.transfers("load") == before:
                until_loaded(lambda: deployment.ask(prompts[300]), alone[300])
    before = proxy.status
    for length, prompt in prompts.items():
        for _ in range(2):
            answer = deployment.ask(prompt)
            assert (answer.tokens, answer.num_cached) == (alone[length], (length - 1) // 32 * 32)
    after = proxy.status
    for role in ("prefill", "decode"):
        gained = [b["requests"] - a["requests"] for a, b in zip(before[role], after[role], strict=True)]
        assert gained == [4, 4]
    assert after["prefills_skipped"] == {}


def test_a_stream_and_a_chat_come_through(deployment, prompts, alone):
    asked = completion(deployment.model, prompts[700], salt=new_salt(), stream=True)
    raw = deployment.post("/v1/completions", asked)
    events = [line.removeprefix(b"data: ") for line in raw.splitlines() if line]
    assert events.pop() == b"[DONE]"
    assert sum((answer_of(json.loads(event)).tokens for event in events), ()) == alone[700]
    words = [{"role": "user", "content": "Explain the licence of this software. " * 12}]
    chat = {"model": deployment.model, "messages": words, "max_completion_tokens": 8, "temperature": 0}
    first, second = [
        json.loads(deployment.post("/v1/chat/completions", chat, port))
        for port in (deployment.prefill[0].port, deployment.proxy.port)
    ]
    assert first["choices"][0]["message"]["content"] == second["choices"][0]["message"]["content"]
    assert answer_of(second).num_cached > 0


def test_requests_are_served_when_a_server_of_each_kind_is_lost(deployment, prompts, alone):
    """The last test here: it stops one decode server, and kills the prefill servers one after the other."""
    proxy = deployment.proxy
    deployment.decode[0].send_signal(signal.SIGSTOP)
    for _ in range(3):
        assert deployment.ask(prompts[300]).tokens == alone[300]
    assert [each["is_up"] for each in proxy.status["decode"]] == [False, True]
    deployment.prefill[0].kill()
    for _ in range(3):
        assert deployment.ask(prompts[300]).tokens == alone[300]
    assert deployment.ask(prompts[300]).num_cached > 0
    assert proxy.status["prefills_skipped"] == {}
    deployment.prefill[1].kill()
    assert deployment.ask(prompts[300]).tokens == alone[300]
    assert sum(proxy.status["prefills_skipped"].values()) == 1
    assert proxy.status["requests"]["failed"] == 0
