"""Connector "p2p" under load, through the proxy, while servers are stopped and killed, and clients hang up.

No answer is wrong, none is lost, and in the end no block is in use at either end.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import proxied
from kvplug_testing.waits import until
from test_p2p_servers import blocks_in_use
from vllm_engines import HOST, group, transfer_config
from vllm_servers import CACHED, QUIET_CORES, REQUEST_S, Server, answer_of, completion, new_salt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

HOW = {
    "connector": "p2p",
    "options": {"p2p": {"lease_s": 4.0, "stall_timeout_s": 3.0}},
    "kv_load_failure_policy": "recompute",
}
ENV = {**QUIET_CORES, "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
FAULTS = ("pause 2", "pause 6", "restart prefill", "pause 4", "restart decode", "pause 8")
"""Seconds for which prefill is stopped, and what is killed and started again."""
BETWEEN_FAULTS = 20
"""Answers."""


class Clients:
    """Two, each of which asks again and again, and counts what it got. Some hang up at any of the servers."""

    def __init__(self, model: str, prompts: dict[int, list[int]], alone: Any, ports: dict[str, int]) -> None:
        self._model, self._prompts, self._alone, self._ports = model, prompts, alone, ports
        self.counted: Counter[str] = Counter()
        self.wrong: list[Any] = []
        self.is_decode_down = False
        self.pause_s = 0.0
        """After each request."""
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(2)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(REQUEST_S)
        assert not any(thread.is_alive() for thread in self._threads), "a client has no answer"

    def wait_for(self, count: int) -> None:
        wanted = self.counted["right"] + count
        until(lambda: self.counted["right"] >= wanted, REQUEST_S, f"{count} answers")

    def _run(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self._ends.is_set():
            length = chance.choice(list(self._prompts))
            asked = completion(self._model, self._prompts[length], salt=new_salt())
            where = chance.choice(["", "", "", "", "proxy", "prefill", "decode"])
            was_down = self.is_decode_down
            try:
                if where:
                    self._leave(where, chance, asked)
                    self.counted["left"] += 1
                elif answer_of(self._answer("proxy", asked)).tokens == self._alone[length]:
                    self.counted["right"] += 1
                else:
                    self.wrong.append(f"other tokens for {length}")
            except (OSError, http.client.HTTPException, AssertionError) as e:
                self.counted["failed"] += 1
                if isinstance(e, TimeoutError) or not (where or was_down or self.is_decode_down):
                    self.wrong.append(repr(e))
            time.sleep(self.pause_s)

    def _leave(self, where: str, chance: random.Random, asked: dict[str, Any]) -> None:
        asked |= {"max_tokens": 200, "stream": True}
        first = {**asked, "stream": False, "max_tokens": 1, "kv_transfer_params": proxied.REMOTE_DECODE}
        if where == "decode":
            asked["kv_transfer_params"] = self._answer("prefill", first)["kv_transfer_params"]
        with self._sent(where, first if where == "prefill" else asked):
            time.sleep(chance.uniform(0.0, 0.5))

    def _answer(self, where: str, asked: Any) -> Any:
        with self._sent(where, asked) as connection:
            answer = connection.getresponse()
            said = answer.read()
        assert answer.status == 200, said
        return json.loads(said)

    @contextlib.contextmanager
    def _sent(self, where: str, asked: Any) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(HOST, self._ports[where], timeout=REQUEST_S)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(asked), headers)
            yield connection


def pause(server: Server, seconds: float) -> None:
    """SIGSTOP to its processes, and SIGCONT."""
    processes = group(server.pid)
    for process in processes:
        process.suspend()
    time.sleep(seconds)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def test_no_answer_is_wrong_and_no_block_is_lost(random_model, prompts, free_port, capsys):
    model, meeting = random_model("llama"), free_port()
    ports = {"prefill": free_port(), "decode": free_port()}
    with contextlib.ExitStack() as stack:

        def start(name: str) -> Server:
            role = {"prefill": "kv_producer", "decode": "kv_consumer"}[name]
            return Server(model, transfer_config(role, meeting, **HOW), ports[name], CACHED, **ENV)

        servers = {name: start(name) for name in ports}
        stack.callback(lambda: [server.__exit__() for server in servers.values()])
        urls = [[server.wait_until_ready().url] for server in servers.values()]
        proxy = stack.enter_context(proxied.Proxy(*urls, {}))
        proxy.wait_until_ready()
        alone = {length: servers["decode"].complete(prompt).tokens for length, prompt in prompts.items()}

        with Clients(model, prompts, alone, {**ports, "proxy": proxy.port}) as clients:
            for fault in FAULTS:
                clients.wait_for(BETWEEN_FAULTS)
                what, how = fault.split()
                if what == "pause":
                    pause(servers["prefill"], float(how))
                    continue
                clients.pause_s, clients.is_decode_down = 1.0, how == "decode"
                servers[how].__exit__()
                servers[how] = start(how)
                servers[how].wait_until_ready()
                clients.pause_s, clients.is_decode_down = 0.0, False
            clients.wait_for(BETWEEN_FAULTS)
        assert not clients.wrong

        no_reader = {"do_remote_decode": False}

        def are_free() -> bool:  # blocks come back in a step
            for server in servers.values():
                server.complete(prompts[300][:4], max_tokens=1, kv_transfer_params=no_reader)
            return not any(map(blocks_in_use, servers.values()))

        until(are_free, REQUEST_S, "the end of all leases")
        loads = servers["decode"].transfers("load")
        assert loads > 0, "since its last start"
    with capsys.disabled():
        print(f"\n{dict(clients.counted)}; {loads:g} pulls since decode's last start")
