"""Recorded calls of real engines to a connector: the order in which they are made.

::

    traces = call_traces.load("vllm-0.32")
    for call in traces.runs["load in the background"].calls:
        print(call.step, call.role, call.method, call.request, call.given, call.answer)

A record is one JSON file next to this module. A test of the engine's adapter makes it, and fails if the
engine calls differently. Methods are those of :class:`kvplug.engine.SchedulerConnector` and
:class:`kvplug.engine.WorkerConnector`. Requests are named r0, r1, ... in the order of their arrival. Blocks
are identified by their request and their position in its block table, layers by their position in the forward
pass. A record keeps these arguments and answers:

=================================  ===============================================  =========================
method                             given                                            answer
=================================  ===============================================  =========================
on_new_request                     num_tokens
get_num_new_matched_tokens         num_tokens, num_computed                         (tokens or None, is_async)
update_state_after_alloc           num_tokens, num_external, num_blocks
build_connector_meta               scheduled: ((request, computed, new), ...),
                                   preempted, finished: (request, ...)
update_connector_output            sending, receiving: (request, ...),
                                   invalid: {request: (place, ...)}
request_finished                   end, num_tokens, num_blocks                      keeps_blocks
set_xfer_handshake_metadata        ranks: (rank, ...)
get_finished_count                                                                  count or None
register_kv_caches                 num_layers
handle_preemptions                 preempted: (request, ...)
wait_for_layer_load                layer
save_kv_layer                      layer
get_finished                       finished: (request, ...)                         (sending, receiving)
get_block_ids_with_load_errors                                                      {request: (place, ...)}
has_connector_metadata                                                              bool
has_pending_push_work                                                               bool
=================================  ===============================================  =========================

Calls of all other methods are recorded without arguments and answers: data between a connector's two sides,
stats and events are specific to the connector. Blocks that belong to no request any more are recorded with
their last request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

import attrs

from kvplug.engine import Side

FORMAT = 1
"""Version of the file format. Other versions are refused."""


@attrs.frozen(kw_only=True)
class TracedCall:
    """One call of one method."""

    step: int
    """The number of steps that the scheduler side has planned; 0 before the first. At the worker side: the
    number of the running step, which begins with ``handle_preemptions``.
    """
    role: Side
    method: str
    request: str = ""
    """The request that the call is about, if any."""
    given: Mapping[str, Any] = MappingProxyType({})
    answer: Any = None


@attrs.frozen(kw_only=True)
class Prompt:
    """The prompt of a request."""

    num_tokens: int
    """Length of the prompt. Two prompts of a run never have the same token at the same position."""
    num_stored: int = 0
    """Leading tokens whose KV the peer engine holds, in whole blocks."""
    spoilt: bool = False
    """Whether loading it fails."""


@attrs.frozen(kw_only=True)
class TracedRun:
    """All calls of one engine that runs a few requests."""

    name: str
    about: str
    """A description of the run."""
    role: str
    """``producer``, ``consumer`` or ``both``."""
    is_async: bool
    """Whether the connector loads in the background."""
    block_size: int
    num_layers: int
    prompts: Mapping[str, Prompt]
    """Prompts by request."""
    calls: tuple[TracedCall, ...]


@attrs.frozen(kw_only=True)
class CallTraces:
    """All recorded runs of one engine."""

    name: str
    engine: str
    """The engine's name and version."""
    runs: Mapping[str, TracedRun]


def names() -> tuple[str, ...]:
    """The names that :func:`load` knows."""
    files = (entry.name for entry in resources.files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))


def load(name: str) -> CallTraces:
    """The record with this name.

    Raises:
        LookupError: there is no such record; the message lists the known ones.
        ValueError: its format is not the one that this release of kvplug reads.
    """
    if name not in names():
        raise LookupError(f"there are no call traces named {name!r}; known are {', '.join(names())}")
    return from_text(name, (resources.files(__name__) / f"{name}.json").read_text(encoding="utf-8"))


def from_text(name: str, text: str) -> CallTraces:
    """The record in a file's content. Raises like :func:`load`."""
    data = json.loads(text)
    if data.get("format") != FORMAT:
        raise ValueError(f"{name} is in format {data.get('format')!r}, and this kvplug reads {FORMAT}")
    runs = (run_from_plain(run) for run in data["runs"])
    return CallTraces(
        name=name, engine=data["engine"], runs=MappingProxyType({run.name: run for run in runs})
    )


def to_text(traces: CallTraces) -> str:
    """The content of a record's file: one call per line, so that a diff is readable."""
    runs = ",\n".join(_run_to_text(run) for run in traces.runs.values())
    return f'{{"format": {FORMAT}, "engine": {json.dumps(traces.engine)}, "runs": [\n{runs}\n]}}\n'


def run_from_plain(data: Mapping[str, Any]) -> TracedRun:
    """A run from its JSON: an object with the fields of :class:`TracedRun`; each call is a list of its
    fields.
    """
    prompts = {name: Prompt(**prompt) for name, prompt in data["prompts"].items()}
    fields = {**data, "prompts": MappingProxyType(prompts), "calls": tuple(map(_call, data["calls"]))}
    return TracedRun(**fields)


def _call(row: Iterable[Any]) -> TracedCall:
    step, role, method, request, given, answer = row
    return TracedCall(
        step=step,
        role=Side(role),
        method=method,
        request=request,
        given=_frozen(given),
        answer=_frozen(answer),
    )


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return MappingProxyType({key: _frozen(each) for key, each in value.items()})
    return value


def _run_to_text(run: TracedRun) -> str:
    facts = attrs.asdict(run, recurse=False) | {
        "prompts": {name: attrs.asdict(prompt) for name, prompt in run.prompts.items()}
    }
    del facts["calls"]
    head = json.dumps(facts)[:-1]
    rows = (
        [call.step, call.role, call.method, call.request, _plain(call.given), _plain(call.answer)]
        for call in run.calls
    )
    return head + ', "calls": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]}"


def _plain(value: Any) -> Any:
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value
