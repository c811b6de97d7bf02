"""The example proxy: prefill first, then decode."""

from __future__ import annotations

import pytest

from kvplug_testing.waits import until
from proxied import REMOTE_DECODE, WAIT_S, setup

pytestmark = [pytest.mark.timeout(300), pytest.mark.smoke]

ASKED = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 16, "temperature": 0}
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "prefill-0", "remote_block_ids": [[3, 4]]}


def test_a_request_goes_to_prefill_for_one_token_and_to_decode_with_what_that_answers():
    headers = {"Authorization": "Bearer key", "X-data-parallel-rank": "1"}
    with setup(1, 1) as (proxy, (prefill,), (decode,)):
        prefill.params = PARAMS
        for path, more, length in (
            ("/v1/completions", {"min_tokens": 4, "n": 2}, {"n": 1}),
            ("/v1/chat/completions", {"max_completion_tokens": 9}, {"max_completion_tokens": 1}),
        ):
            body = {**ASKED, **more, "kv_transfer_params": {"of the client's": 1}}
            with proxy.open(path, body, **headers) as answer:
                assert answer.status == 200 and answer.read()
            first, second = prefill.seen.pop(), decode.seen.pop()
            assert (first["path"], second["path"]) == (path, path)
            kept = {name: value for name, value in body.items() if name != "min_tokens"}
            params = {"of the client's": 1, **REMOTE_DECODE}
            asked = {**kept, **length, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
            assert first["body"] == asked
            assert second["body"] == {**body, "kv_transfer_params": PARAMS}
            assert first["headers"]["X-Request-Id"] == second["headers"]["X-Request-Id"]
            assert headers.items() <= first["headers"].items() & second["headers"].items()


def test_a_stream_arrives_piece_by_piece_from_each_server_in_turn():
    with setup(2, 2) as (proxy, prefill, decode):
        for standin in decode:
            for _ in range(2):  # the next piece is not sent before this one has come
                assert standin.may_send.acquire(timeout=WAIT_S)
        for _ in range(4):
            with proxy.open("/v1/completions", ASKED | {"stream": True}) as answer:
                assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
                for number in range(3):
                    if number:
                        for standin in decode:
                            standin.may_send.release()
                    assert answer.readline() + answer.readline() == f"data: {number}\n\n".encode()
                assert answer.read() == b""
            for standin in decode:
                standin.may_send.release()
        assert [len(standin.seen) for standin in prefill + decode] == [2, 2, 2, 2]


def test_a_client_that_hangs_up_ends_the_request_at_decode():
    with setup(1, 1) as (proxy, _, (decode,)):
        decode.num_pieces = 1000
        with proxy.open("/v1/completions", ASKED | {"stream": True}) as answer:
            answer.readline()

        def is_aborted() -> bool:
            decode.may_send.release()
            return bool(decode.seen[0]["is_aborted"])

        until(is_aborted, WAIT_S, "decode's connection is closed")


@pytest.mark.parametrize("fault", ["down", "error", "slow"])
def test_a_prefill_that_fails_is_skipped(fault):
    with setup(1, 1, **{"prefill-timeout-s": "0.5"}) as (proxy, (prefill,), (decode,)):
        if fault == "down":
            prefill.kill()
        prefill.status, prefill.delay_s = (500, 0.0) if fault == "error" else (200, 3.0)
        assert proxy.ask(ASKED)[0] == 200
        assert decode.seen[0]["body"] == ASKED
        assert "no prefill at" in proxy.log


def test_what_cannot_be_answered_has_an_error():
    with setup(1, 1) as (proxy, _, (decode,)):
        assert proxy.ask(b"{") == (400, proxy.ask(b"{")[1])
        assert b"not a JSON object" in proxy.ask(b"[1]")[1]
        decode.status = 429
        assert proxy.ask(ASKED)[0] == 429
        decode.kill()
        status, said = proxy.ask(ASKED)
        assert status == 502 and decode.url.encode() in said
