"""Real servers over a store: what one has computed, another finds, and what is wrong is computed again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplug_testing.waits import until
from redis_server import RedisServer, free_port
from sglang_servers import PAGE, Answer, Server, with_threshold

pytestmark = pytest.mark.timeout(900)

PROMPTS = [[1000 * number + at for at in range(1, 101)] for number in range(1, 12)]
"""Of 100 tokens each, and different from the first one on."""
WHOLE = 96
"""Tokens of the whole pages of one."""
NUM_PAGES = WHOLE // PAGE
WAIT_S = 60.0
CLASS = {
    "backend_name": "kvplug",
    "module_path": "kvplug_sglang.storage",
    "class_name": "KvplugStorage",
}


class Pages:
    """The files of the store "fs"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = {"stores": ["fs"], "options": {"fs": {"path": str(folder)}}}

    def files(self) -> set[Path]:
        return {file for file in self.folder.glob("v1/pages/*/*") if file.is_file()}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    return Pages(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def first(models: tuple[str, str], pages: Pages) -> list[Answer]:
    """The answers of a server that computed the first prompts, filled the store, and was killed."""
    extra = {**CLASS, **pages.config, "allocator": "shm"}
    with Server(models[0], free_port(), extra, backend="dynamic") as server:
        server.wait_until_ready()
        answers = [server.ask(prompt) for prompt in PROMPTS[:2]]
        until(lambda: len(pages.files()) >= 2 * NUM_PAGES, WAIT_S, "the pages of two prompts")
        server.kill()
    return answers


@pytest.fixture(scope="module")
def server(models: tuple[str, str], pages: Pages, first: list[Answer]) -> Iterator[Server]:
    """A fresh server over the same store, which is named on the command line."""
    with Server(models[0], free_port(), pages.config) as server:
        yield server.wait_until_ready()


def test_a_fresh_process_finds_the_pages_of_one_that_was_killed(server, first):
    assert [answer.cached for answer in first] == [0, 0]
    again = [server.ask(prompt) for prompt in PROMPTS[:2]]
    assert [answer.tokens for answer in again] == [answer.tokens for answer in first]
    assert [answer.cached for answer in again] == [WHOLE, WHOLE]
    assert len({answer.tokens for answer in again}) == 2


def test_requests_with_another_salt_find_nothing(server, first):
    other = server.ask(PROMPTS[0], salt="of another tenant")
    assert (other.tokens, other.cached) == (first[0].tokens, 0)


def test_corrupted_pages_are_computed_again_and_counted(server, pages):
    before = pages.files()
    answer = server.ask(PROMPTS[2])
    until(lambda: len(pages.files() - before) >= NUM_PAGES, WAIT_S, "its pages are in the store")
    for file in list(pages.files() - before)[: NUM_PAGES // 2]:
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(content)
    server.forget()
    again = server.ask(PROMPTS[2])
    assert again.tokens == answer.tokens
    assert again.cached < WHOLE
    corrupt = {"op": "get", "reason": "corrupt"}
    until(lambda: server.metric("kvplug_failures_total", **corrupt) >= 1, WAIT_S, "it is counted")


def test_what_moved_is_among_the_servers_metrics(server):
    for op, least in (("put", NUM_PAGES), ("get", 2 * NUM_PAGES), ("lookup", 2 * NUM_PAGES)):
        until(lambda op=op, least=least: server.metric("kvplug_operations_total", op=op) >= least, WAIT_S, op)
    assert server.metric("sglang:prefetched_tokens_total") >= 2 * WHOLE


def test_other_weights_find_no_page_of_the_first_ones_and_those_are_found_again_later(server, models, first):
    server.load(models[1])
    other = server.ask(PROMPTS[0])
    assert other.cached == 0
    assert other.tokens != first[0].tokens
    server.load(models[0])
    again = server.ask(PROMPTS[0])
    assert (again.tokens, again.cached) == (first[0].tokens, WHOLE)


def test_a_cleared_storage_finds_nothing(server, first):
    server.call("POST", "/hicache/storage-backend/clear")
    server.forget()
    answer = server.ask(PROMPTS[1])
    assert (answer.tokens, answer.cached) == (first[1].tokens, 0)


@pytest.fixture(scope="module")
def redis(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server, to which the running SGLang server has changed."""
    redis = RedisServer(tmp_path_factory.mktemp("redis"))
    try:
        server.call("DELETE", "/hicache/storage-backend")
        options = {"address": [redis.address], "size": "1 GiB", "timeout_s": 1}
        config = {"stores": ["redis"], "timeout_s": 2, "options": {"redis": options}}
        attached = {
            "hicache_storage_backend": "kvplug",
            "hicache_storage_backend_extra_config_json": json.dumps(with_threshold(config)),
        }
        server.call("PUT", "/hicache/storage-backend", attached)
        yield redis
    finally:
        redis.kill()


def finds(server: Server, prompt: list[int]) -> bool:
    server.forget()
    return server.ask(prompt).cached == WHOLE


def test_pages_are_kept_in_redis(server, redis):
    server.forget()
    answer = server.ask(PROMPTS[3])
    assert answer.cached == 0
    until(lambda: finds(server, PROMPTS[3]), WAIT_S, "its pages are in Redis")
    assert server.ask(PROMPTS[3]).tokens == answer.tokens
