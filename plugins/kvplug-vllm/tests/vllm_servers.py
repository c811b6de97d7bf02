"""vLLM's own API server for the tests: front end and engine core, a process each, as operators start it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import attrs
import psutil

from kvplug_testing.waits import DeadlineError, until
from vllm_engines import HOST, QUIET, group, runs

BOOT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: when the process that runs the tests is killed
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
SETTINGS = {
    "enforce-eager": True,
    "dtype": "float32",
    "max-num-seqs": 4,
    "max-model-len": 2048,
    "block-size": 32,
}
"""The engine's own, as for the engines of vllm_engines.py."""
CACHED = {**SETTINGS, "enable-prompt-tokens-details": True, "num-gpu-blocks-override": 192}
"""With the number of cached tokens in each answer."""
QUIET_CORES = {"OMP_NUM_THREADS": "1"}
"""Environment of servers that share the cores."""
REQUEST_S = 300.0
"""For what takes seconds, unless the machine is busy."""


@attrs.frozen
class Holdings:
    """The processes of a server, and what of kvplug's others could find after them."""

    processes: frozenset[psutil.Process]
    ports: frozenset[int]
    """TCP ports that it listens on, vLLM's too; another process may take one as soon as it is free."""
    names: frozenset[str]
    """Of abstract Unix sockets, and of files in /dev/shm."""

    def left(self) -> list[Any]:
        """Processes that run, and names that are there, still."""
        sockets = Path("/proc/net/unix").read_text(errors="replace")
        names = [name for name in self.names if f" {name}\n" in sockets or Path(name).exists()]
        return [*filter(runs, self.processes), *names]


class ServerProcess:
    """An engine's API server in processes of its own. Leaving the ``with`` block kills all, orphans too."""

    headers: Mapping[str, str] = MappingProxyType({})
    """Of each request."""

    def __init__(
        self,
        program: Sequence[str],
        port: int,
        options: Mapping[str, Any],
        env: Mapping[str, str],
        *,
        deadline_s: float,
        **how: Any,
    ) -> None:
        """
        Args:
            program: a script, or ``-m`` and a module.
            options: of its command line, beside its address.
            deadline_s: for its start.
            how: more arguments of ``Popen``.
        """
        self.port = port
        self._deadline_s = deadline_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        command = [sys.executable, "-c", BOOT, *program, "--host", HOST, "--port", str(port)]
        for name, value in options.items():
            values = value if isinstance(value, list) else [] if value is True else [value]
            command += [f"--{name}", *map(str, values)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            **how,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        end = self._log.seek(0, os.SEEK_END)
        return os.pread(self._log.fileno(), end, 0).decode("utf-8", "replace")

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self) -> Self:
        def answers() -> bool:
            assert self.runs, f"the server has ended; it wrote:\n{self.log}"
            with contextlib.suppress(OSError), self.request("GET", "/health") as answer:
                return answer.status == 200
            time.sleep(0.1)
            return False

        try:
            until(answers, self._deadline_s, "the server's answer")
        except DeadlineError as e:
            raise AssertionError(f"it wrote:\n{self.log}") from e
        return self

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
        return request(self.port, method, path, body, **self.headers, **headers)

    def send_signal(self, number: signal.Signals) -> None:
        """To the API server's process alone."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Every process of it."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.wait()
        self._log.close()


class Server(ServerProcess):
    """vLLM's."""

    def __init__(
        self,
        model: str,
        transfer: Mapping[str, Any],
        port: int,
        settings: Mapping[str, Any] = SETTINGS,
        **env: str,
    ) -> None:
        """``settings``: further options of its command line."""
        self._model = model
        super().__init__(
            ["-m", "vllm.entrypoints.openai.api_server"],
            port,
            {"model": model, "kv-transfer-config": json.dumps(transfer), **settings},
            {**QUIET, **env},
            deadline_s=600.0,
            process_group=0,  # not a session: see vllm_engines.py
        )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def complete(self, prompt: Sequence[int], **more: Any) -> Answer:
        """A greedy answer."""
        return answer_of(json.loads(self._post(prompt, **more).read()))

    def stream(self, prompt: Sequence[int], **more: Any) -> Iterator[tuple[int, ...]]:
        """The tokens of one, one by one. Ends, or raises, where the server does."""
        with self._post(prompt, stream=True, **more) as answer:
            for line in answer:
                word = line.strip().removeprefix(b"data: ")
                if word and word != b"[DONE]":
                    for choice in json.loads(word)["choices"]:
                        yield tuple(choice["token_ids"] or ())

    def post(self, path: str) -> int:
        """The status of the answer to a request without a body."""
        with self.request("POST", path) as answer:
            return answer.status

    def transfers(self, op: str) -> float:
        """How many operations of kvplug's have succeeded, by its Prometheus metrics."""
        lines = self.request("GET", "/metrics").read().decode().splitlines()
        series = [line for line in lines if line.startswith("kvplug_operations_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in series if f'op="{op}"' in line)

    def holdings(self) -> Holdings:
        running = group(self.pid)
        connections = [each for process in running for each in process.net_connections("tcp")]
        names = [_sockets(process) | _shared_memory(process) for process in running]
        return Holdings(
            processes=frozenset(running),
            ports=frozenset(each.laddr.port for each in connections if _listens(each)),
            names=frozenset(name for each in names for name in each if "kvplug" in name),
        )

    def kill(self) -> None:
        """Kill what runs still; Python's resource tracker last, which removes what the others cannot.

        And what it does not remove either: the memory through which vLLM's processes talk.
        """
        shared = frozenset[str]()
        for grace_s in (60.0, 0.0):
            running = group(self.pid)
            shared |= frozenset(path for process in running for path in _shared_memory(process))
            for process in running:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if not grace_s or "resource_tracker" not in " ".join(process.cmdline()):
                        process.kill()
            self._process.poll()
            psutil.wait_procs(running, grace_s)
        for path in shared:
            if "kvplug" not in path:
                Path(path).unlink(missing_ok=True)

    def _post(
        self, prompt: Sequence[int], *, rank: int | None = None, **more: Any
    ) -> http.client.HTTPResponse:
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        answer = self.request("POST", "/v1/completions", completion(self._model, prompt, **more), **headers)
        if answer.status != 200:
            raise AssertionError(f"{answer.status} {answer.read()!r}\n{self.log}")
        return answer


@contextlib.contextmanager
def started(
    model: str,
    configs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    free_port: Callable[[], int],
    **env: str,
) -> Iterator[tuple[Server, ...]]:
    """A server for each kv-transfer-config and its settings. All start at once, and are ready."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(Server(model, transfer, free_port(), settings, **env))
            for transfer, settings in configs
        ]
        for server in servers:
            server.wait_until_ready()
        yield tuple(servers)


@attrs.frozen
class Answer:
    """What a server, or the proxy, answered to a prompt."""

    tokens: tuple[int, ...]
    num_cached: int
    params: Mapping[str, Any] | None


def answer_of(said: Mapping[str, Any]) -> Answer:
    (choice,), details = said["choices"], (said.get("usage") or {}).get("prompt_tokens_details") or {}
    tokens, params = tuple(choice.get("token_ids") or ()), said.get("kv_transfer_params")
    return Answer(tokens, int(details.get("cached_tokens", 0)), params)


def completion(model: str, prompt: Sequence[int], *, salt: str = "", **more: Any) -> dict[str, Any]:
    """The body of a request for a greedy answer."""
    asked = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    return {**asked, "return_token_ids": True, **({"cache_salt": salt} if salt else {}), **more}


def request(port: int, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_S)
    raw = None if body is None else json.dumps(body)
    connection.request(
        method, path, raw, {"Content-Type": "application/json", "Connection": "close", **headers}
    )
    return connection.getresponse()


def new_salt() -> str:
    """One with which no engine has cached anything."""
    return uuid.uuid4().hex


def until_loaded(ask: Callable[[], Any], tokens: tuple[int, ...]) -> int:
    """Ask until an answer is made with loaded KV: the engines may not have met. All answers are right.

    Returns how many tokens were loaded.
    """
    answers: list[Any] = []

    def is_loaded() -> bool:
        answers.append(ask())
        assert answers[-1].tokens == tokens
        return answers[-1].num_cached > 0

    until(is_loaded, REQUEST_S, "an answer with loaded KV")
    return int(answers[-1].num_cached)


def _listens(connection: Any) -> bool:
    return bool(connection.status == psutil.CONN_LISTEN)


def _sockets(process: psutil.Process) -> set[str]:
    """Names of its abstract Unix sockets. That of `kvplug top` is a file: if its process is killed, the next
    process removes it."""
    return {each.laddr for each in process.net_connections("unix") if each.laddr.startswith("@")}


def _shared_memory(process: psutil.Process) -> set[str]:
    try:
        found = [each.path for each in (*process.memory_maps(), *process.open_files())]
    except psutil.NoSuchProcess:
        found = []
    return {path for path in found if path.startswith("/dev/shm/")}
