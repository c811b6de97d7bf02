"""KV goes from cache to cache over the pipe that the config names, and over nothing else."""

from __future__ import annotations

import os
from typing import Any

import pytest

from kvplug import Config, ConfigError, build_connector
from kvplug.net import streams
from kvplug_lab.gpu import pipes
from kvplug_testing import waits
from kvplug_testing.engine import FakeEngine, request_of

PROMPT = range(100)
KV_BYTES = 96 * 2 * 3 * 2 * 8 * 4
"""Of 96 tokens: keys and values, layers, heads, elements, float32."""


@pytest.mark.parametrize(
    ("transport", "chosen"), [("pynccl", "pynccl"), ("cuda-ipc", "cuda-ipc"), ("auto", "cuda-ipc")]
)
def test_kv_crosses_the_pipe_of_the_device_once_and_no_other_memory(
    transport: str, chosen: str, nccl_path: str, cudart_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged: list[Any] = []
    monkeypatch.setattr(streams, "pinned_bytes", staged.append)
    # On a GPU "auto" compares pipes for its tensors: here only these two.
    registry = pipes.registry("cpu", "shm", "nixl", "sample", "testing")
    given = {
        "connector": "p2p",
        "transport": transport,
        "host": f"unix:@kvplug-p2p-{os.getpid()}-{transport}",
        "timeout_s": 20,
        "options": {
            "pynccl": {"library": nccl_path},
            "cuda-ipc": {"library": cudart_path, "staging_bytes": 4 << 20},
        },
    }
    prefill_config, decode_config = (
        Config.from_dict({**given, "role": role}) for role in ("producer", "consumer")
    )

    def make(config: Config, side: str, **more: Any) -> Any:
        return build_connector(config, side, registry=registry, **more)

    with (
        FakeEngine(prefill_config, make=make, seed=1) as prefill,
        FakeEngine(decode_config, make=make, seed=2) as decode,
    ):
        decode.scheduler.wait_until_ready(20)
        _, params = prefill.hand_off(request_of("stored", PROMPT))
        prompt = request_of("loaded", PROMPT, params=params)
        found, _ = decode.matched(prompt)
        blocks = decode.allocate(len(PROMPT))
        decode.scheduler.update_state_after_alloc(prompt, (blocks,), found)
        waits.until(lambda: "loaded" in decode.step([]).finished_recving, what="the pulled KV")
        assert decode.is_right(prompt.token_ids, blocks, 96)
        assert decode.worker.last_route.endswith(chosen)
        waits.until(lambda: "stored" in prefill.step([]).finished_sending, what="the blocks of prefill")
        moved = {
            op: figures["bytes"]
            for engine in (prefill, decode)
            for op, figures in (engine.figures() or {})["ops"].items()
            if op in ("send", "recv")
        }
        assert moved == {"send": KV_BYTES, "recv": KV_BYTES}
        assert not staged, "memory of the host was taken for KV"


def test_a_hash_that_is_asked_for_on_a_device_is_refused_at_start() -> None:
    config = Config.from_dict(
        {
            "connector": "p2p",
            "role": "producer",
            "device": "simulated",
            "integrity": "xxh3_64",
            "host": "unix:@kvplug",
        }
    )
    with pytest.raises(ConfigError, match="does not hash KV on simulated"):
        FakeEngine(config)
