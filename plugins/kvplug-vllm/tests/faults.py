"""What goes wrong in an engine under test: called in its process before vLLM is started."""

from __future__ import annotations

import functools

import kvplug_vllm.connector
from kvplug import build_connector
from kvplug.testing.corrupt import CorruptingPipe


def corrupt_what_is_sent() -> None:
    """Bits of KV (not of the token ids beside it) flip after the sender has hashed it."""
    wrap = functools.partial(CorruptingPipe, min_bytes=64 << 10)
    kvplug_vllm.connector.build_connector = functools.partial(build_connector, wrap_pipe=wrap)
