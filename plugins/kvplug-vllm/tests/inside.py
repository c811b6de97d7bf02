"""What is seen, and done, in an engine's own process: called there before vLLM is started, or by order."""

from __future__ import annotations

import functools
import inspect
import time
from typing import Any

from kvplug_lookup.connector.scheduler import LookupScheduler
from kvplug_lookup.connector.worker import LookupWorker
from kvplug_vllm.plugin import register

handshakes: list[dict[int, Any]] = []


def version(llm: Any) -> str:
    """vLLM's."""
    import vllm

    return str(vllm.__version__)


def silence_workers() -> None:
    """The workers of "lookup" say nothing at start, and what its scheduler sides are told of that is kept."""
    tell = LookupScheduler.set_xfer_handshake_metadata

    def note(self: LookupScheduler, metadata: Any) -> None:
        handshakes.append(dict(metadata))
        tell(self, metadata)

    LookupScheduler.set_xfer_handshake_metadata = note  # type: ignore[method-assign]
    LookupWorker.get_handshake_metadata = lambda self: None  # type: ignore[method-assign]


def noted_handshakes(llm: Any) -> list[dict[int, Any]]:
    return handshakes


def register_twice() -> None:
    """vLLM, which does it once in each process, makes it three times."""
    register()
    register()


def reset_prefix_cache(llm: Any, **how: bool) -> bool:
    return bool(llm.reset_prefix_cache(**how))


def change_weights(llm: Any) -> None:
    """To other norms, which make other keys and values of every token in every layer; or back."""

    def change(model: Any) -> None:
        model.is_changed = not getattr(model, "is_changed", False)
        for layer in model.model.layers:
            layer.input_layernorm.weight.data[::2] *= 2 if model.is_changed else 0.5

    llm.apply_model(change)


def connector_wants_a_step(llm: Any) -> bool:
    return bool(llm.llm_engine.engine_core.engine_core.scheduler.connector.has_pending_push_work())


def counter(llm: Any, name: str) -> float:
    """One of vLLM's own, so far."""
    return float(sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}"))


def cached_by_source(llm: Any) -> dict[str, float]:
    """Cached tokens of prompts, by where they came from, without sources that gave none."""
    name = "vllm:prompt_tokens_cached_by_source"
    found = {metric.labels["source"]: metric.value for metric in llm.get_metrics() if metric.name == name}
    return {source: value for source, value in found.items() if value}


def num_steps_in_flight(llm: Any) -> int:
    """How many there may be."""
    return int(llm.llm_engine.engine_core.engine_core.batch_queue_size)


def shut_down(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()


def log_stats(llm: Any) -> None:
    """What vLLM does every ten seconds."""
    llm.llm_engine.do_log_stats()


def reached(llm: Any) -> list[bool]:
    """Of each child of a MultiConnector whose connector is "lookup": has its worker reached a store?"""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group = get_kv_transfer_group()
    children = group.sub_connectors if hasattr(group, "sub_connectors") else group._connectors
    return [child._worker.connector.link is not None for child in children]


_longest: dict[str, float] = {}


def time_calls() -> None:
    """From now on it is known how long vLLM waited for each of KvplugConnector's methods."""
    from kvplug_vllm.connector import KvplugConnector

    def timed(name: str, call: Any) -> Any:
        @functools.wraps(call)
        def run(*arguments: Any, **more: Any) -> Any:
            begun = time.monotonic()
            try:
                return call(*arguments, **more)
            finally:
                _longest[name] = max(_longest.get(name, 0.0), time.monotonic() - begun)

        return run

    for name, what in list(vars(KvplugConnector).items()):
        if inspect.isfunction(what) and not name.startswith("_") and name != "shutdown":
            setattr(KvplugConnector, name, timed(name, what))


def longest_calls(llm: Any) -> dict[str, float]:
    """Seconds, by method, since it was asked last."""
    found = dict(_longest)
    _longest.clear()
    return found
