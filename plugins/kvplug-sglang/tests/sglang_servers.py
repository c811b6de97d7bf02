"""SGLang's own HTTP server on the CPU, as operators start it, for the tests of kvplug-sglang."""

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import attrs
import psutil

HOST = "127.0.0.1"
PAGE = 16
"""Tokens in a page."""
KEY = "key-of-the-tests"
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
BOOT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: when the process that runs the tests is killed
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "disable-cuda-graph": True,
    "disable-overlap-schedule": True,
    "skip-server-warmup": True,
    "sleep-on-idle": True,
    "max-total-tokens": 8192,
    "mem-fraction-static": 0.3,
    "max-running-requests": 8,
    "page-size": PAGE,
    "enable-metrics": True,
    "enable-cache-report": True,
    "admin-api-key": KEY,
    "enable-hierarchical-cache": True,
    "hicache-ratio": 2,
    "hicache-write-policy": "write_through",
    "hicache-io-backend": "direct",
    "hicache-storage-prefetch-policy": "wait_complete",
}


@attrs.frozen
class Answer:
    """What the server answered to a prompt."""

    tokens: tuple[int, ...]
    cached: int
    """Tokens of the prompt that were not computed."""
    seconds: float


class Server:
    """One server. Leaving the ``with`` block kills every process of it."""

    def __init__(
        self,
        model: str,
        port: int,
        extra: Mapping[str, Any],
        *,
        backend: str = "kvplug",
        layout: str = "page_first_direct",
        deadline_s: float = 240.0,
        **more: Any,
    ) -> None:
        self.port = port
        self._deadline_s = deadline_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        command = [sys.executable, "-c", BOOT, "-m", "sglang.launch_server", "--host", HOST]
        own = {"port": port, "model-path": model, "hicache-mem-layout": layout}
        own |= {"hicache-storage-backend": backend}
        own |= {"hicache-storage-backend-extra-config": json.dumps(with_threshold(extra))}
        for name, value in {**SETTINGS, **own, **more}.items():
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )

    @property
    def log(self) -> str:
        end = self._log.seek(0, os.SEEK_END)
        return os.pread(self._log.fileno(), end, 0).decode("utf-8", "replace")

    def wait_until_ready(self) -> Self:
        limit = time.monotonic() + self._deadline_s
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > limit:
                raise AssertionError(f"the server does not answer; it wrote:\n{self.log[-20_000:]}")
            time.sleep(0.2)
        return self

    def _answers(self) -> bool:
        try:
            return self._request("GET", "/health")[0] == 200
        except OSError:
            return False

    def ask(self, prompt: Sequence[int], *, max_tokens: int = 8, salt: str | None = None) -> Answer:
        """A greedy answer."""
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        asked = {"input_ids": list(prompt), "sampling_params": sampling}
        asked |= {"extra_key": salt} if salt else {}
        started = time.monotonic()
        answer = json.loads(self.call("POST", "/generate", asked))
        seconds = time.monotonic() - started
        return Answer(tuple(answer["output_ids"]), answer["meta_info"]["cached_tokens"], seconds)

    def forget(self) -> None:
        """The server's own caches, on the device and in host memory, are empty from here on."""
        until(lambda: self._request("POST", "/flush_cache", "{}")[0] == 200, "the caches are flushed")

    def load(self, model: str) -> None:
        """Other weights from here on, and empty caches."""
        status, answer = self._request("POST", "/update_weights_from_disk", json.dumps({"model_path": model}))
        if status != 200:  # it still counts the last request among those that run
            assert "the cache was not flushed" in answer, answer
            self.forget()

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> str:
        status, answer = self._request(method, path, None if body is None else json.dumps(body))
        if status != 200:
            raise AssertionError(f"{path}: {status} {answer}\n{self.log[-20_000:]}")
        return answer

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all series of that name with these labels."""
        lines = self.call("GET", "/metrics").splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(name + "{")
            and all(f'{label}="{value}"' in line for label, value in labels.items())
        )

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=self._deadline_s)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace")
        finally:
            connection.close()

    def kill(self) -> None:
        """Every process of it at once, as a crash of the host would."""
        for pid in _members(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(30)
        until(lambda: not _members(self._process.pid), "its processes are gone", 30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._log.close()


def with_threshold(extra: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang asks the storage about prompts of 256 tokens and more; here about every page."""
    return {"prefetch_threshold": PAGE, **extra}


def until(holds: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    limit = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < limit, f"not in {limit_s:.0f} s: {what}"
        time.sleep(0.1)


def _members(session: int) -> list[int]:
    """The processes of a session, whatever their parents are by now; no zombies."""
    return [process.pid for process in psutil.process_iter() if _is_member(process, session)]


def _is_member(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False
