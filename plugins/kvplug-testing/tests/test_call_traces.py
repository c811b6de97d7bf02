"""Recorded orders of calls: they can be read, and engines keep the order that the ABCs' docstrings say."""

from __future__ import annotations

import inspect
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import resources

import attrs
import pytest

from kvplug.engine import SchedulerConnector, WorkerConnector
from kvplug.engine.connector.values import Side
from kvplug_testing import call_traces
from kvplug_testing.call_traces import TracedCall, TracedRun

RUNS = [
    pytest.param(run, id=f"{name}: {run.name}")
    for name in call_traces.names()
    for run in call_traces.load(name).runs.values()
]
LAYER_HOOKS = ("wait_for_layer_load", "save_kv_layer")
REPORTS = (
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_stats",
    "take_events",
    "build_worker_metadata",
)
AT_END = ("wait_for_save", "clear_connector_metadata")


# -- the rules --------------------------------------------------------------------------------------


def faults_of(run: TracedRun) -> Iterator[str]:
    """What in this run is not as the docstrings of the two ABCs say; nothing if all is."""
    known = {Side.SCHEDULER: methods_of(SchedulerConnector), Side.WORKER: methods_of(WorkerConnector)}
    for call in run.calls:
        if call.method not in known[call.role]:
            yield f"{call.role} has no method {call.method}"
    yield from faults_at_start_and_end(run)
    for step, calls in itertools.groupby(worker_calls(run), key=lambda call: call.step):
        yield from (f"step {step}: {fault}" for fault in faults_of_step(run, step, list(calls)))
    for request in run.prompts:
        about = [call for call in run.calls if request in named_by(call)]
        yield from (f"{request}: {fault}" for fault in faults_of_request(request, about))
    reported = [call.step for call in run.calls if call.method == "update_connector_output"]
    if reported != sorted(set(reported)):
        yield f"steps are reported as {reported}"


def faults_at_start_and_end(run: TracedRun) -> Iterator[str]:
    for role in Side:
        calls = [call for call in run.calls if call.role is role]
        if calls[-1].method != "shutdown" or calls[-1].step != max(call.step for call in calls):
            yield f"{role}: the last call is {calls[-1].method}"
        at_start = [call.method for call in calls if call.step == 0 and not call.request]
        once = Counter(call.method for call in calls)
        for method in STARTS[role]:
            if once[method] != 1 or method not in at_start:
                yield f"{role}: {method} is called {once[method]} times"
        if role is Side.WORKER and at_start[0] != "register_kv_caches":
            yield f"worker: the first call is {at_start[0]}"
        planned = [call.step for call in calls if call.method == "build_connector_meta"]
        if planned != list(range(1, len(planned) + 1)):
            yield f"scheduler: steps are planned as {planned}"


STARTS = {
    Side.SCHEDULER: ("get_finished_count", "set_xfer_handshake_metadata"),
    Side.WORKER: ("register_kv_caches", "get_handshake_metadata"),
}


def faults_of_step(run: TracedRun, step: int, calls: list[TracedCall]) -> Iterator[str]:
    """Of one step at the worker side: every call once, in its place."""
    if step == 0:
        return
    methods = [call.method for call in calls if call.method not in ("has_connector_metadata", "shutdown")]
    if methods[0] == "handle_preemptions":
        del methods[0]
    drafts = (
        methods[-len(AT_END) :] == list(AT_END) and "wait_for_save" in methods[methods.index(REPORTS[0]) :]
    )
    layers = [name for name in methods if name in LAYER_HOOKS]
    end = [*REPORTS, *AT_END] if drafts else ["wait_for_save", *REPORTS, "clear_connector_metadata"]
    first = ["bind_connector_metadata", "start_load_kv", *layers, *end]
    after = ["bind_connector_metadata", *layers, "start_load_kv", *end]
    if methods not in (first, after):
        yield f"the order is {', '.join(methods)}"
    planned = [call for call in run.calls if call.method == "build_connector_meta" and call.step == step]
    if not planned:
        yield "it was not planned"
        return
    scheduled = scheduled_by(planned[0])
    visited = range(run.num_layers) if scheduled else ()
    wanted = [(hook, layer) for layer in visited for hook in LAYER_HOOKS]
    found = [(call.method, call.given["layer"]) for call in calls if call.method in LAYER_HOOKS]
    if found != wanted:
        yield f"layers are visited as {found}"
    needed = scheduled & loaded_before(run, step)
    if needed and methods != first:
        yield f"loads begin after the forward pass, which needs those of {', '.join(sorted(needed))}"


def loaded_before(run: TracedRun, step: int) -> set[str]:
    """Requests whose blocks were allocated for this step with tokens to load in front of it."""
    return {
        call.request
        for call in run.calls
        if call.method == "update_state_after_alloc" and call.step == step - 1 and call.given["num_external"]
    }


def faults_of_request(request: str, calls: list[TracedCall]) -> Iterator[str]:
    """From its first call to its last."""
    methods = [call.method for call in calls]
    if methods[0] != "on_new_request" or methods.count("on_new_request") != 1:
        yield "it does not begin with on_new_request"
    if methods.count("request_finished") != 1:
        yield f"it ends {methods.count('request_finished')} times"
        return
    end = methods.index("request_finished")
    yield from (f"{method} comes after its end" for method in methods[end + 1 :] if method not in REPORTING)
    answered = is_async = has_blocks = waits = False
    for call in calls:
        if call.method == "get_num_new_matched_tokens":
            if has_blocks:
                yield "it is asked about though it has its blocks"
            answered, is_async = call.answer[0] is not None, call.answer[1]
        elif call.method == "update_state_after_alloc":
            if not (answered or has_blocks):
                yield "blocks are allocated before its question is answered"
            if waits:
                yield "it goes on before it is received"
            # A load in its step is over after it; an engine that also waits for it does not say so.
            waits = is_async and bool(call.given["num_external"])
            has_blocks, answered = True, False
        elif call.method == "update_connector_output" and request in call.given["receiving"]:
            waits = False
            has_blocks = not call.given["invalid"].get(request)
        elif call.method == "build_connector_meta":
            if request in scheduled_by(call) and (waits or not has_blocks):
                yield "it is computed without its blocks, or before they are received"
            has_blocks = has_blocks and request not in call.given["preempted"]
    named = [names for call in calls if call.method == "get_finished" for names in call.answer]
    if calls[end].answer and sum(request in names for names in named) != 1:
        yield "its blocks are kept, and it is not named once"


REPORTING = (
    "build_connector_meta",
    "handle_preemptions",
    "get_finished",
    "get_block_ids_with_load_errors",
    "update_connector_output",
)


def scheduled_by(call: TracedCall) -> set[str]:
    return {name for name, _, _ in call.given.get("scheduled", ())}


def named_by(call: TracedCall) -> set[str]:
    """Every request that a call names."""
    given = call.given
    names = {call.request, *scheduled_by(call)}
    for key in ("preempted", "finished", "sending", "receiving", "invalid"):
        names |= set(given.get(key, ()))
    if call.method == "get_finished":
        names |= set(call.answer[0]) | set(call.answer[1])
    elif call.method == "get_block_ids_with_load_errors":
        names |= set(call.answer)
    return names


def worker_calls(run: TracedRun) -> list[TracedCall]:
    return [call for call in run.calls if call.role is Side.WORKER]


def methods_of(base: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(base, inspect.isfunction) if not name.startswith("_")}


# -- the tests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", RUNS)
def test_engines_keep_the_documented_order(run: TracedRun) -> None:
    assert list(faults_of(run)) == []


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_what_its_facts_say(run: TracedRun) -> None:
    requests = {call.request for call in run.calls} - {""}
    assert requests == set(run.prompts)
    offers = [call.answer for call in run.calls if call.method == "get_num_new_matched_tokens"]
    assert any(found for found, _ in offers) == any(prompt.num_stored for prompt in run.prompts.values())
    assert any(is_async for _, is_async in offers) == run.is_async
    invalid = {
        name for call in run.calls if call.method == "get_block_ids_with_load_errors" for name in call.answer
    }
    spoilt = {name for name, prompt in run.prompts.items() if prompt.spoilt}
    assert spoilt <= invalid
    assert all(call.role is Side.WORKER for call in run.calls if call.method in LAYER_HOOKS)


def test_what_happens_to_requests_is_all_there() -> None:
    runs = call_traces.load("vllm-0.32").runs
    ends = {
        call.given["end"] for run in runs.values() for call in run.calls if call.method == "request_finished"
    }
    assert ends == {"finished", "aborted", "failed"}
    assert any(
        call.given["preempted"] for call in runs["preemption"].calls if call.method == "handle_preemptions"
    )
    assert any(call.answer for call in runs["abort while loading"].calls if call.method == "request_finished")
    chunks = [call for call in runs["save in chunks"].calls if call.method == "build_connector_meta"]
    starts = {computed for call in chunks for name, computed, _ in call.given["scheduled"] if name == "r2"}
    assert {start % 32 for start in starts} - {0}, "chunks end within blocks"


def moved(run: TracedRun, method: str, before: str) -> TracedRun:
    """The run with one call moved in front of another of its step."""
    calls = list(run.calls)
    at = next(at for at, call in enumerate(calls) if call.method == method and call.step > 1)
    call = calls.pop(at)
    to = next(to for to, each in enumerate(calls) if each.method == before and each.step == call.step)
    calls.insert(to, call)
    return attrs.evolve(run, calls=tuple(calls))


def without(run: TracedRun, method: str) -> TracedRun:
    calls = list(run.calls)
    del calls[max(at for at, call in enumerate(calls) if call.method == method)]
    return attrs.evolve(run, calls=tuple(calls))


@pytest.mark.parametrize(
    "alter",
    [
        lambda run: moved(run, "start_load_kv", before="bind_connector_metadata"),
        lambda run: moved(run, "save_kv_layer", before="wait_for_layer_load"),
        lambda run: moved(run, "clear_connector_metadata", before="build_worker_metadata"),
        lambda run: moved(run, "get_block_ids_with_load_errors", before="get_finished"),
        lambda run: moved(run, "wait_for_save", before="save_kv_layer"),
        lambda run: without(run, "update_state_after_alloc"),
        lambda run: without(run, "on_new_request"),
        lambda run: without(run, "request_finished"),
        lambda run: without(run, "save_kv_layer"),
        lambda run: without(run, "shutdown"),
        lambda run: without(run, "get_handshake_metadata"),
        lambda run: without(run, "build_connector_meta"),
    ],
)
def test_another_order_would_be_found(alter: Callable[[TracedRun], TracedRun]) -> None:
    for name in ("load layer by layer", "preemption"):
        assert list(faults_of(alter(call_traces.load("vllm-0.32").runs[name])))


def test_a_load_that_ends_too_late_would_be_found() -> None:
    run = call_traces.load("vllm-0.32").runs["load in the background"]
    never = tuple(
        attrs.evolve(call, given={**call.given, "receiving": ()})
        if call.method == "update_connector_output"
        else call
        for call in run.calls
    )
    assert list(faults_of(attrs.evolve(run, calls=never))) == [
        "r0: it goes on before it is received",
        "r1: it goes on before it is received",
    ]


# -- reading and writing ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", call_traces.names())
def test_what_is_written_is_what_was_read(name: str) -> None:
    text = (resources.files(call_traces) / f"{name}.json").read_text(encoding="utf-8")
    assert call_traces.to_text(call_traces.load(name)) == text


def test_an_order_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(LookupError, match=r"'vllm-0\.1'.*vllm-0\.32"):
        call_traces.load("vllm-0.1")


def test_a_file_of_another_format_is_refused() -> None:
    text = json.dumps({"format": call_traces.FORMAT + 1, "engine": "x", "runs": []})
    with pytest.raises(ValueError, match=f"format {call_traces.FORMAT + 1}"):
        call_traces.from_text("x", text)


def test_nothing_that_was_loaded_can_be_changed() -> None:
    run = call_traces.load("vllm-0.32").runs["preemption"]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        run.calls[0].step = 7  # type: ignore[misc]
    with pytest.raises(TypeError):
        run.calls[-1].given["x"] = 1  # type: ignore[index]
