"""SGLang's own HTTP server on the CPU, as operators start it, for the tests of kvplug-sglang."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import psutil

from kvplug_testing.waits import until
from vllm_engines import runs
from vllm_servers import ServerProcess

PAGE = 16
"""Tokens in a page."""
KEY = "key-of-the-tests"
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
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


class Server(ServerProcess):
    """One server. Leaving the ``with`` block kills every process of it."""

    headers = MappingProxyType({"Authorization": f"Bearer {KEY}"})

    def __init__(
        self,
        model: str,
        port: int,
        extra: Mapping[str, Any],
        *,
        backend: str = "kvplug",
        layout: str = "page_first_direct",
        **more: Any,
    ) -> None:
        own = {
            "model-path": model,
            "hicache-mem-layout": layout,
            "hicache-storage-backend": backend,
            "hicache-storage-backend-extra-config": json.dumps(with_threshold(extra)),
        }
        options = {**SETTINGS, **own, **more}
        super().__init__(
            ("-m", "sglang.launch_server"),
            port,
            options,
            ENVIRONMENT,
            deadline_s=240.0,
            start_new_session=True,
        )

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
        until(lambda: self._request("POST", "/flush_cache", {})[0] == 200, 60, "the caches are flushed")

    def load(self, model: str) -> None:
        """Other weights from here on, and empty caches."""
        status, answer = self._request("POST", "/update_weights_from_disk", {"model_path": model})
        if status != 200:  # it still counts the last request among those that run
            assert "the cache was not flushed" in answer, answer
            self.forget()

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> str:
        status, answer = self._request(method, path, body)
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

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
        with self.request(method, path, body) as answer:
            return answer.status, answer.read().decode("utf-8", "replace")

    def kill(self) -> None:
        """Every process of it at once, as a crash of the host would."""
        for pid in self._members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(30)
        until(lambda: not self._members(), 30, "the end of its processes")

    def _members(self) -> list[int]:
        """The processes of its session, whatever their parents are by now; no zombies."""
        return [each.pid for each in psutil.process_iter() if _session_of(each) == self.pid and runs(each)]


def with_threshold(extra: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang asks the storage about prompts of 256 tokens and more; here about every page."""
    return {"prefetch_threshold": PAGE, **extra}


def _session_of(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except OSError:
        return -1
