"""The proxy: prefill first, then decode, whatever happens to the servers behind it."""

from __future__ import annotations

import gzip
import http.client
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvplug_testing.waits import until
from proxied import REMOTE_DECODE, WAIT_S, Standin, setup

pytestmark = [pytest.mark.timeout(300), pytest.mark.smoke]

QUICK = {"health-interval-s": "0.2", "health-timeout-s": "1"}
LATE = {"health-interval-s": "1000", "health-timeout-s": "20"}
"""Only the check at the start: the rest is found out by requests."""
ASKED = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 16, "temperature": 0}
STREAM = ("POST", "/v1/completions", ASKED | {"stream": True})
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "prefill-0", "remote_block_ids": [[3, 4]]}


# -- prefill, then decode --------------------------------------------------------------------------


def test_a_request_goes_to_prefill_for_one_token_and_to_decode_with_what_that_answers():
    chat = {"max_completion_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Authorization": "Bearer key", "X-data-parallel-rank": "1"}
    with setup(1, 1, LATE) as (proxy, (prefill,), (decode,)):
        prefill.params = PARAMS
        for path, more, length in (
            ("/v1/completions", {"min_tokens": 4, "n": 2}, {"max_tokens": 1, "n": 1}),
            ("/v1/chat/completions", chat, {"max_tokens": 1, "max_completion_tokens": 1}),
        ):
            body = {**ASKED, **more, "kv_transfer_params": {"of the client's": 1}}
            hop = {"Connection": "close, X-Hop", "X-Hop": "1"}
            with proxy.open("POST", path, body, **headers, **hop) as asked:
                assert asked.getresponse().read()
            first, second = prefill.seen.pop(), decode.seen.pop()
            assert (first["path"], second["path"]) == (path, path)
            left = {
                name: value for name, value in body.items() if name not in ("min_tokens", "stream_options")
            }
            params = {"of the client's": 1, **REMOTE_DECODE}
            assert json.loads(first["raw"]) == {
                **left,
                **length,
                "stream": False,
                "kv_transfer_params": params,
            }
            assert json.loads(second["raw"]) == {**body, "kv_transfer_params": PARAMS}
            assert first["headers"]["X-Request-Id"] == second["headers"]["X-Request-Id"]
            for seen in (first, second):
                assert headers.items() <= seen["headers"].items()
                assert "X-Hop" not in seen["headers"]


def test_without_parameters_decode_gets_the_bytes_of_the_client():
    with setup(1, 1, LATE) as (proxy, _, (decode,)):
        raw = b'{ "stream":false, "seed": 12345678901234567890123, "max_tokens" :2}'
        assert proxy.ask(raw)[0] == 200
        assert decode.seen[0]["raw"] == raw
        assert proxy.ask(gzip.compress(raw), **{"Content-Encoding": "gzip"})[0] == 200
        assert decode.seen[1]["raw"] == raw
        assert "Content-Encoding" not in decode.seen[1]["headers"]
        assert proxy.ask(path="/v1/models") == (200, {"data": [{"id": "demo"}]})


def test_a_stream_arrives_piece_by_piece_and_in_order():
    with setup(1, 1, LATE) as (proxy, _, (decode,)):
        decode.holds, decode.num_pieces = True, 4
        with proxy.open(*STREAM) as asked:
            answer = asked.getresponse()
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            for number in range(4):  # the next one is not sent before this one has come
                assert answer.readline() + answer.readline() == f"data: {number}\n\n".encode()
                decode.send_next()
            assert answer.read() == b""


def test_requests_are_spread_over_all_servers():
    with setup(2, 2, LATE) as (proxy, prefill, decode):
        for _ in range(6):
            assert proxy.ask(ASKED)[0] == 200
        assert [len(standin.seen) for standin in prefill + decode] == [3, 3, 3, 3]
        # One that is busy gets less.
        decode[0].holds = True
        with proxy.open(*STREAM) as asked:
            answer = asked.getresponse()
            answer.readline()
            busy = [len(standin.seen) for standin in decode].index(4)
            for _ in range(2):
                assert proxy.ask(ASKED)[0] == 200
            assert [len(decode[busy].seen), len(decode[1 - busy].seen)] == [4, 5]
            for _ in range(2):
                decode[busy].send_next()
            answer.read()
        status = proxy.status
    assert status["requests"] == {"served": 9, "failed": 0, "aborted": 0, "refused": 0}
    assert status["prefills_skipped"] == {}
    assert [each["requests"] for each in status["prefill"]] in ([4, 5], [5, 4])
    assert [each["outstanding"] for each in status["decode"]] == [0, 0]


# -- clients that go ---------------------------------------------------------------------------------


def test_a_client_that_hangs_up_ends_the_request_at_decode():
    with setup(1, 1, LATE) as (proxy, _, (decode,)):
        decode.holds, decode.num_pieces = True, 1000
        with proxy.open(*STREAM) as asked:
            asked.getresponse().readline()
        until(lambda: proxy.status["decode"][0]["outstanding"] == 0, WAIT_S, "the request has ended")

        def is_aborted() -> bool:
            decode.send_next()
            return bool(decode.seen[0]["is_aborted"])

        until(is_aborted, WAIT_S, "decode's connection is closed")
        assert proxy.status["requests"]["aborted"] == 1
        assert "Traceback" not in proxy.log


def test_a_client_that_hangs_up_during_prefill_is_not_decoded():
    with setup(1, 1, LATE) as (proxy, (prefill,), (decode,)):
        prefill.delay_s = 1.0
        with proxy.open("POST", "/v1/completions", ASKED):
            until(lambda: prefill.seen, WAIT_S, "prefill has the request")
        until(lambda: proxy.status["requests"]["aborted"], WAIT_S, "the proxy has seen it")
        assert proxy.ask(ASKED | {"max_tokens": 7})[0] == 200
        assert [json.loads(seen["raw"])["max_tokens"] for seen in decode.seen] == [7]


# -- prefill servers that fail -----------------------------------------------------------------------


def answer(**how: Any) -> Callable[[Standin], None]:
    return lambda standin: vars(standin).update(how)


IMPATIENT = LATE | {"prefill-timeout-s": "0.5"}
FAILURES: dict[str, tuple[Callable[[Standin], None], dict[str, str], str]] = {
    "killed": (Standin.kill, LATE, "failed"),
    "stopped, found by a check": (Standin.stop, QUICK, "failed"),
    "stopped": (Standin.stop, IMPATIENT, "slow"),
    "refuses": (answer(status=400), LATE, "status 400"),
    "answers too much": (answer(params={"much": "x" * 20000}), LATE | {"max-body-mib": "0.01"}, "failed"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_prefill_that_fails_is_left_out_and_counted(kind):
    fail, options, reason = FAILURES[kind]
    with setup(1, 1, options) as (proxy, (prefill,), (decode,)):
        prefill.params = PARAMS
        fail(prefill)
        assert proxy.ask(ASKED)[0] == 200
        assert json.loads(decode.seen[0]["raw"]) == ASKED
        skipped = proxy.status["prefills_skipped"]
        # A check may have found a server out before the request came.
        assert skipped in ({reason: 1}, {"no server is up": 1} if options == QUICK else {})
        assert "no prefill, decode computes the prompt" in proxy.log
        assert prefill.url in proxy.log


# -- decode servers that fail ------------------------------------------------------------------------


@pytest.mark.parametrize("is_stopped", [False, True], ids=["killed", "stopped"])
def test_a_decode_server_that_is_down_is_passed_over(is_stopped):
    with setup(1, 2, QUICK if is_stopped else LATE) as (proxy, _, decode):
        decode[0].delay_s = 3600
        if is_stopped:  # with a request that waits there, and nothing has been answered
            with proxy.open("POST", "/v1/completions", ASKED) as asked:
                until(lambda: decode[0].seen, WAIT_S, "the first server has it")
                decode[0].stop()
                assert json.loads(asked.getresponse().read())["who"] == decode[1].port
        else:
            decode[0].kill()
        for _ in range(3):
            status, said = proxy.ask(ASKED)
            assert (status, said["who"]) == (200, decode[1].port)
        assert not proxy.is_up(decode[0])
        assert proxy.status["requests"]["failed"] == 0


@pytest.mark.parametrize("end", [Standin.kill, Standin.stop], ids=["killed", "stopped"])
def test_a_stream_that_breaks_off_has_an_error_and_no_end(end):
    with setup(1, 2, QUICK) as (proxy, _, decode):
        for standin in decode:
            standin.holds = True
        with proxy.open(*STREAM) as asked:
            answer = asked.getresponse()
            assert answer.readline() + answer.readline() == b"data: 0\n\n"
            (one,) = [standin for standin in decode if standin.seen]
            end(one)
            said = json.loads(answer.readline().removeprefix(b"data: "))["error"]
            assert said["code"] == 502
            assert one.url in said["message"]
            with pytest.raises(http.client.IncompleteRead):
                answer.read()
        assert proxy.ask(ASKED)[0] == 200, "the other server"
        assert "Traceback" not in proxy.log


def test_without_a_decode_server_the_answer_says_so():
    with setup(1, 1, LATE) as (proxy, _, (decode,)):
        assert proxy.ask(path="/health") == (200, {"status": "ok"})
        decode.kill()
        status, said = proxy.ask(ASKED)
        assert status == 502
        assert decode.url in said["error"]["message"]
        for asked in ((ASKED,), (None, "/health"), (None, "/v1/models")):
            status, said = proxy.ask(*asked)
            assert status == 503
            assert said["error"]["message"] == "kvplug proxy: no decode server is up"


OUT: dict[str, tuple[Callable[[Standin], None], Callable[[Standin], None]]] = {
    "killed": (Standin.kill, Standin.start),
    "stopped": (Standin.stop, Standin.cont),
    "unhealthy": (answer(health=500), answer(health=200)),
}


@pytest.mark.parametrize("how", OUT)
def test_checks_take_servers_out_and_in_again(how):
    take_out, take_in = OUT[how]
    with setup(1, 1, QUICK) as (proxy, (prefill,), (decode,)):
        for server in (prefill, decode):
            take_out(server)
            until(lambda server=server: not proxy.is_up(server), WAIT_S, "it is out")
        assert proxy.ask(ASKED)[0] == 503
        assert all(each["problem"] for role in ("prefill", "decode") for each in proxy.status[role])
        for server in (prefill, decode):
            take_in(server)
            until(lambda server=server: proxy.is_up(server), WAIT_S, "it is in again")
        assert proxy.ask(ASKED)[0] == 200
        assert len(prefill.seen) == 1
        assert proxy.status["prefills_skipped"] == {"no server is up": 1}


# -- wrong input -----------------------------------------------------------------------------------------

NO_OBJECT = "the body is JSON, but no object: Expected `object`, got `array`"


def test_a_wrong_body_is_refused():
    with setup(1, 1, LATE | {"max-body-mib": "0.125"}) as (proxy, (prefill,), (decode,)):
        for body, status, words in (
            (b"{", 400, "the body is not JSON: Input data was truncated"),
            (b"\xff\xfe", 400, "the body is not JSON"),
            (b"[" * 100_000, 400, NO_OBJECT),
            (b'{"prompt": ' + b"[" * 100_000, 400, "the body is not JSON: maximum recursion depth"),
            (b"[1]", 400, NO_OBJECT),
            (b'{"prompt": "' + b"x" * 200_000 + b'"}', 413, "the body is larger than 131072 bytes"),
        ):
            code, said = proxy.ask(body)
            assert (code, said["error"]["code"]) == (status, status)
            assert words in said["error"]["message"]
        assert proxy.status["requests"]["refused"] == 6
        assert prefill.seen == decode.seen == []
        assert proxy.ask(ASKED)[0] == 200


def test_a_body_of_ten_million_values_takes_a_few_times_its_bytes():
    """Made by Python, the values took 900 MB, and a minute in which nothing else was answered."""
    body = b'{"prompt": [' + b"[]," * 10_000_000 + b"[]]}"
    with setup(1, 1, LATE) as (proxy, (prefill,), (decode,)):
        prefill.kill()  # both would make the values
        decode.kill()
        before = proxy.most_memory
        assert proxy.ask(body)[0] == 502
        assert proxy.most_memory - before < 8 * len(body)


GOOD = ["--prefill", "http://127.0.0.1:8100", "--decode", "http://[::1]:8200/"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: --prefill, --decode"),
        ([*GOOD, "--decode", "http://a/v1"], "'http://a/v1' was given; expected is http://HOST:PORT"),
        ([*GOOD, "--port", "65536"], "'65536' was given; expected is a port from 1 to 65535"),
        ([*GOOD, "--prefill-timeout-s", "nan"], "'nan' was given; expected is a number above 0"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, words, capsys):
    from kvplug_vllm.proxy.__main__ import main

    with pytest.raises(SystemExit) as e:
        main(arguments)
    assert e.value.code == 2
    assert words in capsys.readouterr().err
