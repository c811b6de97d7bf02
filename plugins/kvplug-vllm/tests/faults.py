"""What goes wrong in an engine under test: called in its process before vLLM starts, or switched later."""

from __future__ import annotations

import functools
import threading
from typing import Any

import attrs

import kvplug_vllm.connector
from kvplug import Config, build_connector
from kvplug_lab.faults import FaultyPipe, Rule

HELD_S = 60.0
"""What is held is let go then: no test ends hanging."""


def corrupt_what_is_sent() -> None:
    """Bits of KV (not of the token ids beside it) flip after the sender has hashed it."""
    _wrap_pipes(functools.partial(FaultyPipe, rules=flips(min_bytes=64 << 10)))


def flips(min_bytes: int) -> list[Rule]:
    """In each tensor that is hit so many bits that the tokens are others."""
    return [Rule("flip", bits=4096, min_bytes=min_bytes)]


def schedule_ahead() -> None:
    """Let ``async_scheduling=True`` count: on a CPU vLLM takes it back ("not required"), though it works."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def update_and_keep(vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        update(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = staticmethod(update_and_keep)


def load_in_steps() -> None:
    """The connector "lookup" as one that cannot load in the background, whatever its engine asks for."""
    build = kvplug_vllm.connector.build_connector

    def build_for_steps(*arguments: Any, loads_in_background: bool, **more: Any) -> Any:
        return build(*arguments, **more)

    kvplug_vllm.connector.build_connector = build_for_steps


# -- with switches ----------------------------------------------------------------------------------

_SIGNAL_BYTES = 16 << 10
_flips = threading.Event()
_flows = threading.Event()


def switchable() -> None:
    """Nothing goes wrong before :func:`switch` says so."""
    _flows.set()
    _wrap_pipes(_SwitchedPipe)


def switch(llm: Any, *, corrupt: bool = False, hold: bool = False) -> None:
    """From now on the KV that is sent is corrupted, or is held until this is switched off again."""
    (_flips.set if corrupt else _flips.clear)()
    (_flows.clear if hold else _flows.set)()


class _SwitchedPipe(FaultyPipe):
    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe, flips(min_bytes=_SIGNAL_BYTES), when=_flips.is_set)

    def _send_tensor(self, tensor: Any, timeout: Any) -> Any:
        if tensor is not None and tensor.nbytes >= _SIGNAL_BYTES:
            _flows.wait(HELD_S)
        return super()._send_tensor(tensor, timeout)


def _wrap_pipes(wrap: Any) -> None:
    def build(config: Config, *arguments: Any, **more: Any) -> Any:
        return build_connector(over_pipes(config), *arguments, wrap_pipe=wrap, **more)

    kvplug_vllm.connector.build_connector = build


def over_pipes(config: Config) -> Config:
    """With no memory that peers map: pages cross a pipe, in which they can be changed and held."""
    host = {**config.options.get("host", {}), "map": False}
    return attrs.evolve(config, options={**config.options, "host": host})
