"""What goes wrong in one worker of several, while a file says so: a plugin that vLLM loads in each process.

Tests copy this file into a folder of its own with metadata, as the module ``kvplug_faulty_worker``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

import kvplug_vllm.connector
from kvplug import build_connector
from kvplug.engine import Parallelism
from kvplug_lab.faults import FaultyPipe, Rule

SWITCH = Path(__file__).with_name("corrupt")
"""While this is there, what the worker sends is not what it has hashed."""
RANK = 1


def register() -> None:
    """In vLLM's group of entry points."""
    kvplug_vllm.connector.build_connector = _build


def _build(config: Any, side: str, *, parallelism: Parallelism, **more: Any) -> Any:
    faulty = side == "worker" and parallelism.worker_rank == RANK
    host = {**config.options.get("host", {}), "map": False}  # pages cross the pipe
    config = attrs.evolve(config, options={**config.options, "host": host})
    return build_connector(config, side, parallelism=parallelism, wrap_pipe=_Pipe if faulty else None, **more)


class _Pipe(FaultyPipe):
    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe, [Rule("flip", bits=4096, min_bytes=16 << 10)], when=SWITCH.exists)
