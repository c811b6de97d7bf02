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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import attrs
import psutil

from kvplug_testing.peers import abstract_sockets

HOST = "127.0.0.1"
QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",  # it would report home
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
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
"""The engine's own, as for the engines of engines.py."""


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
        return [*filter(_runs, self.processes), *names]


class Server:
    """One API server. Leaving the ``with`` block kills every process of it, orphans too."""

    def __init__(
        self,
        model: str,
        transfer: Mapping[str, Any],
        port: int,
        deadline_s: float,
        settings: Mapping[str, Any] = SETTINGS,
        **env: str,
    ) -> None:
        self.port = port
        self._model = model
        self._deadline_s = deadline_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        command = [sys.executable, "-c", BOOT, "-m", "vllm.entrypoints.openai.api_server", "--host", HOST]
        command += ["--port", str(port), "--model", model, "--kv-transfer-config", json.dumps(transfer)]
        for name, value in settings.items():
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **QUIET, **env},
            process_group=0,  # not a session: see engines.py
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

    def wait_until_ready(self) -> None:
        self._until(self._answers, "answer")

    def complete(self, prompt: list[int], *, max_tokens: int = 16, salt: str = "") -> tuple[int, ...]:
        """The tokens of a greedy answer."""
        answer = json.loads(self._post(prompt, max_tokens=max_tokens, salt=salt).read())
        return tuple(answer["choices"][0]["token_ids"])

    def stream(self, prompt: list[int], *, max_tokens: int, salt: str = "") -> Iterator[tuple[int, ...]]:
        """The same, token by token. Ends, or raises, where the server does."""
        with self._post(prompt, max_tokens=max_tokens, salt=salt, stream=True) as answer:
            for line in answer:
                word = line.strip().removeprefix(b"data: ")
                if word and word != b"[DONE]":
                    for choice in json.loads(word)["choices"]:
                        yield tuple(choice["token_ids"] or ())

    def post(self, path: str) -> int:
        """The status of the answer to a request without a body."""
        with self._request("POST", path) as answer:
            return answer.status

    def transfers(self, op: str) -> float:
        """How many operations of kvplug's have succeeded, by its Prometheus metrics."""
        lines = self._request("GET", "/metrics").read().decode().splitlines()
        series = [line for line in lines if line.startswith("kvplug_transfers_total{")]
        return sum(float(line.rpartition(" ")[2]) for line in series if f'op="{op}"' in line)

    def holdings(self) -> Holdings:
        running = group(self.pid)
        connections = [each for process in running for each in process.net_connections("tcp")]
        names = [abstract_sockets(process.pid) | _shared_memory(process) for process in running]
        return Holdings(
            processes=frozenset(running),
            ports=frozenset(each.laddr.port for each in connections if _listens(each)),
            names=frozenset(name for each in names for name in each if "kvplug" in name),
        )

    def send_signal(self, number: signal.Signals) -> None:
        """To the API server's process alone."""
        self._process.send_signal(number)

    def reap(self) -> None:
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

    def close(self) -> None:
        """Nothing of it outlives this."""
        self.reap()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self) -> bool:
        try:
            with self._request("GET", "/health") as answer:
                return answer.status == 200
        except OSError:
            return False

    def _post(
        self, prompt: list[int], *, max_tokens: int, salt: str, stream: bool = False
    ) -> http.client.HTTPResponse:
        asked = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        asked |= {"return_token_ids": True, "ignore_eos": True, "stream": stream}
        asked |= {"cache_salt": salt} if salt else {}
        answer = self._request("POST", "/v1/completions", json.dumps(asked))
        if answer.status != 200:
            raise AssertionError(f"{answer.status} {answer.read()!r}\n{self.log}")
        return answer

    def _request(self, method: str, path: str, body: str | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=self._deadline_s)
        connection.request(method, path, body, {"Content-Type": "application/json", "Connection": "close"})
        return connection.getresponse()

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + self._deadline_s
        while not holds():
            if not self.runs or time.monotonic() > limit:
                raise AssertionError(f"the server did not {what}; it wrote:\n{self.log}")
            time.sleep(0.1)


def group(leader: int) -> list[psutil.Process]:
    """The processes of a group, whatever their parents are by now; no zombies."""
    return [process for process in psutil.process_iter() if _group_of(process) == leader and _runs(process)]


def _group_of(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except OSError:
        return -1


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _listens(connection: Any) -> bool:
    return bool(connection.status == psutil.CONN_LISTEN)


def _shared_memory(process: psutil.Process) -> set[str]:
    try:
        found = [each.path for each in (*process.memory_maps(), *process.open_files())]
    except psutil.NoSuchProcess:
        found = []
    return {path for path in found if path.startswith("/dev/shm/")}
