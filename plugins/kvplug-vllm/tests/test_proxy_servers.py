"""Two prefill and two decode servers of vLLM's behind the proxy: its tokens are those of one engine alone."""

from __future__ import annotations

import http.client
import json
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import attrs
import pytest

pytestmark = pytest.mark.timeout(1500)

START_S = 600.0
"""Four servers start at once."""
WAIT_S = 240.0


@attrs.frozen
class Deployment:
    proxy: Any
    prefill: tuple[Any, ...]
    decode: tuple[Any, ...]


@pytest.fixture(scope="module")
def deployment(
    model: str, alone: Any, servers: Any, proxied: Any, config_for: Any, free_port: Callable[[], int]
) -> Iterator[Deployment]:
    meetings = [free_port() for _ in range(2)]
    peers = [f"127.0.0.1:{meeting}" for meeting in meetings]
    settings = {**servers.SETTINGS, "enable-prompt-tokens-details": True, "num-gpu-blocks-override": 192}
    # The cores are shared by all processes: they must not spin, and a check may take its time.
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    options = {"health-interval-s": "1", "health-timeout-s": "20", "prefill-timeout-s": "120"}
    with ExitStack() as stack:

        def start(config: dict[str, Any]) -> Any:
            return stack.enter_context(servers.Server(model, config, free_port(), START_S, settings, **quiet))

        prefill = tuple(start(config_for("kv_producer", meeting)) for meeting in meetings)
        consumer = config_for("kv_consumer", meetings[0], kv_load_failure_policy="recompute", peers=peers)
        decode = tuple(start(consumer) for _ in range(2))
        for server in prefill + decode:
            server.wait_until_ready()
        urls = [[f"http://127.0.0.1:{server.port}" for server in part] for part in (prefill, decode)]
        proxy = stack.enter_context(proxied.Proxy(*urls, options))
        proxy.wait_until_ready()
        yield Deployment(proxy, prefill, decode)


def post(port: int, path: str, body: Any, **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    assert answer.status == 200, said
    return said


def completion(model: str, prompt: list[int], **more: Any) -> dict[str, Any]:
    asked = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    return {**asked, "return_token_ids": True, "cache_salt": uuid.uuid4().hex, **more}


def tokens_of(answer: Any) -> tuple[int, ...]:
    return tuple(answer["choices"][0]["token_ids"])


def num_cached(answer: Any) -> int:
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))


def until_loaded(ask: Callable[[], Any], tokens: tuple[int, ...]) -> int:
    """The tokens are right, from the first answer on; and made with loaded KV once the servers have met."""
    limit = time.monotonic() + WAIT_S
    while True:
        answer = ask()
        assert tokens_of(answer) == tokens
        if cached := num_cached(answer):
            return cached
        assert time.monotonic() < limit, "nothing is loaded"


def test_tokens_are_those_of_one_engine_whatever_way_a_request_takes(
    deployment: Deployment, model: str, prompts: Any, alone: Any
) -> None:
    proxy = deployment.proxy

    def ask() -> Any:
        return json.loads(post(proxy.port, "/v1/completions", completion(model, prompts[300])))

    for server in deployment.decode:  # each decode server has met each prefill server
        for _ in deployment.prefill:
            before = server.transfers("load")
            while server.transfers("load") == before:
                until_loaded(ask, alone[300])
    before = proxy.status
    for length, prompt in prompts.items():
        for _ in range(2):
            answer = json.loads(post(proxy.port, "/v1/completions", completion(model, prompt)))
            assert tokens_of(answer) == alone[length]
            assert num_cached(answer) == (length - 1) // 32 * 32
    after = proxy.status
    for role in ("prefill", "decode"):
        gained = [b["requests"] - a["requests"] for a, b in zip(before[role], after[role], strict=True)]
        assert gained == [4, 4]
    assert after["prefills_skipped"] == {}


def test_a_stream_and_a_chat_come_through(
    deployment: Deployment, model: str, prompts: Any, alone: Any
) -> None:
    port, direct = deployment.proxy.port, deployment.prefill[0].port
    raw = post(port, "/v1/completions", completion(model, prompts[700], stream=True))
    events = [line.removeprefix(b"data: ") for line in raw.splitlines() if line]
    assert events.pop() == b"[DONE]"
    assert sum((tokens_of(json.loads(event)) for event in events), ()) == alone[700]
    assert len(events) >= 16
    words = [{"role": "user", "content": "Explain the licence of this software. " * 12}]
    chat = {"model": model, "messages": words, "max_completion_tokens": 8, "temperature": 0}
    answers = [json.loads(post(each, "/v1/chat/completions", chat)) for each in (direct, port)]
    first, second = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert first == second
    assert num_cached(answers[1]) > 0


def test_what_the_proxy_of_vllms_tests_sends_works(
    deployment: Deployment, model: str, prompts: Any, alone: Any
) -> None:
    """Field by field as its toy_proxy_server.py: parameters of NIXL's for prefill, and for decode those that
    prefill has answered.
    """

    def ask() -> Any:
        asked = completion(model, prompts[300])
        headers = {"Authorization": "Bearer None", "X-Request-Id": str(uuid.uuid4())}
        remote = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
        remote |= {"remote_block_ids": None, "remote_host": None, "remote_port": None}
        first = {**asked, "kv_transfer_params": remote, "stream": False, "max_tokens": 1}
        answer = json.loads(post(deployment.prefill[1].port, "/v1/completions", first, **headers))
        assert tokens_of(answer) == alone[300][:1]
        if answer.get("kv_transfer_params"):
            asked["kv_transfer_params"] = answer["kv_transfer_params"]
        return json.loads(post(deployment.decode[0].port, "/v1/completions", asked, **headers))

    assert until_loaded(ask, alone[300]) == 288


def test_requests_go_on_when_a_server_of_each_kind_is_lost(
    deployment: Deployment, model: str, prompts: Any, alone: Any
) -> None:
    """The last test here: it stops one decode server, and kills the prefill servers one after the other."""
    proxy = deployment.proxy

    def ask() -> Any:
        return json.loads(post(proxy.port, "/v1/completions", completion(model, prompts[300])))

    deployment.decode[0].send_signal(signal.SIGSTOP)
    for _ in range(3):
        assert tokens_of(ask()) == alone[300]
    assert [each["is_up"] for each in proxy.status["decode"]] == [False, True]
    deployment.prefill[0].reap()
    for _ in range(3):
        assert tokens_of(ask()) == alone[300]
    assert num_cached(ask()) > 0
    assert proxy.status["prefills_skipped"] == {}
    deployment.prefill[1].reap()
    assert tokens_of(ask()) == alone[300]
    assert sum(proxy.status["prefills_skipped"].values()) == 1
    assert proxy.status["requests"]["failed"] == 0
