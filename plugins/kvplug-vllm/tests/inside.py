"""What is seen, and done, in an engine's own process: called there before vLLM is started, or by order."""

from __future__ import annotations

import itertools
import time
from typing import Any

from kvplug_vllm.plugin import register


def version(llm: Any) -> str:
    """vLLM's."""
    import vllm

    return str(vllm.__version__)


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


# -- requests ---------------------------------------------------------------------------------------


def _asked(prompt: list[int], salt: str | None) -> Any:
    return {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}


def generate(
    llm: Any,
    prompts: list[list[int]],
    max_tokens: int,
    salt: str | None = None,
    params: dict[str, Any] | None = None,
    **more: Any,
) -> list[Any]:
    """Tokens, number of cached tokens, finish reason, and kv_transfer_params of each."""
    from vllm import SamplingParams

    if params is not None:
        more["extra_args"] = {"kv_transfer_params": params}
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, **more)
    outputs = llm.generate([_asked(prompt, salt) for prompt in prompts], sampling, use_tqdm=False)
    found = [(output, output.outputs[0]) for output in outputs]
    return [
        [list(one.token_ids), output.num_cached_tokens or 0, one.finish_reason, output.kv_transfer_params]
        for output, one in found
    ]


def timed(llm: Any, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[float], int]:
    """The seconds that all take at once, those until each has its first token, and their cached tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens, temperature=0)
    began = time.perf_counter()
    outputs = llm.generate([_asked(prompt, None) for prompt in prompts], sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    firsts = [output.metrics.first_token_latency for output in outputs]
    return seconds, firsts, sum(output.num_cached_tokens or 0 for output in outputs)


_numbers = itertools.count()


def begin(llm: Any, prompt: list[int], max_tokens: int, salt: str | None = None) -> str:
    """Add a request; the engine is stepped by other calls."""
    from vllm import SamplingParams

    request_id = f"begun-{next(_numbers)}"
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
    llm.llm_engine.add_request(request_id, _asked(prompt, salt), sampling)
    return request_id


def step(llm: Any, times: int = 1) -> None:
    for _ in range(times):
        llm.llm_engine.step()


def run(llm: Any) -> dict[str, list[int]]:
    """Step the engine until no request runs or waits; returns the tokens of each."""
    tokens: dict[str, list[int]] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return tokens


def abort(llm: Any, request_id: str) -> None:
    llm.llm_engine.abort_request([request_id])


def state(llm: Any) -> dict[str, Any]:
    """What the scheduler still holds."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return {"requests": sorted(scheduler.requests), "used_blocks": used}


# -- figures ----------------------------------------------------------------------------------------


def count(llm: Any, what: str, labels: list[str]) -> float:
    """The sum of kvplug's series of that name with these labels in this process's Prometheus registry."""
    import prometheus_client

    return sum(
        sample.value
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"kvplug_{what}_total"
        and {*labels} <= {f"{key}={value}" for key, value in sample.labels.items()}
    )


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


def export_spans(llm: Any, is_on: bool) -> None:
    """Export the spans of kvplug's requests from now on, or drop them where they would be exported."""
    from kvplug.metrics.tracing import Tracing

    _exports.setdefault(True, Tracing._export)  # noqa: SLF001
    Tracing._export = _exports[is_on]  # type: ignore[method-assign]  # noqa: SLF001


_exports: dict[bool, Any] = {False: lambda tracing, spans: None}


def shut_down(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()


def log_stats(llm: Any) -> None:
    """What vLLM does every ten seconds."""
    llm.llm_engine.do_log_stats()
