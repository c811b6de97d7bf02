"""Writes down in which order vLLM calls a connector: put in place in an engine's process before vLLM starts.

Both sides of the connector are wrapped. The wrapping also sets the pace, so that a recording is the same each
time: a question is answered "not yet" once and then waits for its answer; a background load is reported as
received in the second step after the one that begins it; stats are kept back, since they come when they come.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import kvplug_vllm.connector
from kvplug.engine import BlockIds, Request, Role, SchedulerConnector, WorkerConnector

WAIT_S = 60.0
STEPS_TO_LOAD = 2


def record() -> None:
    """From now on, in this process; around whatever is in place there."""
    global _recorder
    _recorder = Recorder(kvplug_vllm.connector.build_connector)
    kvplug_vllm.connector.build_connector = _recorder.build


_recorder: Recorder


def begin(llm: Any) -> None:
    """A run begins. What was called at the engine's start is part of it."""
    _recorder.begin()


def wait_for_loads(llm: Any) -> None:
    """Returns when all loads in the background have ended, though vLLM is not told yet."""
    limit = time.monotonic() + WAIT_S
    while len(_recorder.received) < len(_recorder.loading):
        assert time.monotonic() < limit, "the loads do not end"
        _recorder.received |= _recorder.worker.get_finished(frozenset())[1]


def end(llm: Any) -> list[Any]:
    """The run is over; returns its calls."""
    return _recorder.calls


def end_engine(llm: Any) -> list[Any]:
    """Shut the engine down; returns the calls that this makes."""
    before = len(_recorder.calls)
    llm.llm_engine.engine_core.shutdown()
    return _recorder.calls[before:]


class Recorder:
    """The calls of one engine's two sides, in their order."""

    def __init__(self, build: Callable[..., Any]) -> None:
        self._build = build
        self._at_start: list[Any] | None = None
        self.calls: list[Any] = []
        self.planned = self.running = 0
        """Steps."""
        self._names: dict[str, str] = {}
        self._places: dict[int, tuple[str, int]] = {}
        """By block: whose it is, or was, and where in that table."""
        self.answered: Counter[str] = Counter()
        self.in_background: dict[str, bool] = {}
        self.loading: dict[str, int] = {}
        """Requests whose load was planned: steps until it is reported."""
        self.received: set[str] = set()
        """Those whose load has ended, and is not reported yet."""
        self.layers: dict[str, int] = {}
        self.worker: Any = None
        """The worker side that is wrapped."""

    def build(self, config: Any, side: str, **arguments: Any) -> Any:
        built = self._build(config, side, **arguments)
        wrapped = SchedulerSide(built) if isinstance(built, SchedulerConnector) else WorkerSide(built)
        wrapped.recorder = self
        if isinstance(wrapped, WorkerSide):
            self.worker = built
        wrapped.loads = config.role is not Role.PRODUCER
        self.layers = {name: at for at, name in enumerate(arguments["cache"].groups[0].layer_names)}
        return wrapped

    def begin(self) -> None:
        if self._at_start is None:
            served = {"on_new_request", "has_pending_push_work"}
            self._at_start = list(itertools.takewhile(lambda call: call[2] not in served, self.calls))
        self.calls = list(self._at_start)
        self.planned = self.running = 0
        self._names, self._places = {}, {}

    def note(self, side: str, method: str, request: str, given: Mapping[str, Any], answer: Any) -> None:
        step = self.running if side == "worker" else self.planned
        self.calls.append([step, side, method, request, dict(given), answer])

    # -- names of what has another one in each recording ---------------------------------------

    def name(self, request_id: str) -> str:
        return self._names.setdefault(request_id, f"r{len(self._names)}")

    def requests(self, request_ids: Iterable[str]) -> list[str]:
        return sorted(map(self.name, request_ids))

    def tables(self, request_id: str, block_ids: BlockIds) -> None:
        for place, block in enumerate(block_ids[0]):
            self._places[block] = (self.name(request_id), place)

    def blocks(self, block_ids: Iterable[int]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name, place in sorted(self._places[block] for block in block_ids):
            found.setdefault(name, []).append(place)
        return found


GIVEN: dict[str, Callable[..., dict[str, Any]]] = {
    "set_xfer_handshake_metadata": lambda recorder, metadata: {"ranks": sorted(metadata)},
    "update_state_after_alloc": lambda recorder, request, block_ids, num_external: {
        "num_external": num_external,
        "num_blocks": len(block_ids[0]),
    },
    "build_connector_meta": lambda recorder, output: {
        "scheduled": [
            [recorder.name(one.request_id), one.num_computed_tokens, one.num_scheduled_tokens]
            for one in output.scheduled
        ],
        "preempted": recorder.requests(output.preempted_request_ids),
        "finished": recorder.requests(output.finished_request_ids),
    },
    "update_connector_output": lambda recorder, output: {
        "sending": recorder.requests(output.finished_sending),
        "receiving": recorder.requests(output.finished_recving),
        "invalid": recorder.blocks(output.invalid_block_ids),
    },
    "request_finished": lambda recorder, request, block_ids, end: {
        "end": str(end),
        "num_blocks": len(block_ids[0]),
    },
    "register_kv_caches": lambda recorder, kv_caches: {"num_layers": len(kv_caches)},
    "handle_preemptions": lambda recorder, request_ids: {"preempted": recorder.requests(request_ids)},
    "wait_for_layer_load": lambda recorder, layer_name: {"layer": recorder.layers[layer_name]},
    "save_kv_layer": lambda recorder, layer_name, kv_layer: {"layer": recorder.layers[layer_name]},
}
"""What is noted of a call's arguments, beside its request."""
ANSWERS: dict[str, Callable[..., Any]] = {
    "request_finished": lambda recorder, answer: answer[0],
    "has_pending_push_work": lambda recorder, answer: answer,
    "get_block_ids_with_load_errors": lambda recorder, answer: recorder.blocks(answer),
}
"""What is noted of its answer."""


class _Wrapped:
    recorder: Recorder
    loads: bool
    side: str

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def noted(self, method: str, *arguments: Any) -> Any:
        """Pass a call on, and note it."""
        answer, recorder = getattr(self.inner, method)(*arguments), self.recorder
        given, request = GIVEN[method](recorder, *arguments) if method in GIVEN else {}, ""
        if arguments and isinstance(arguments[0], Request):
            given["num_tokens"] = len(arguments[0].token_ids)
            request = recorder.name(arguments[0].request_id)
        shown = ANSWERS[method](recorder, answer) if method in ANSWERS else None
        recorder.note(self.side, method, request, given, shown)
        return answer


def _wrapping(base: type) -> type:
    """A subclass that passes every call of the ABC on to what it wraps, and notes it."""

    def passing(name: str) -> Callable[..., Any]:
        return lambda self, *arguments: self.noted(name, *arguments)

    names = [
        name for name, what in vars(base).items() if inspect.isfunction(what) and not name.startswith("_")
    ]
    return type(base)(f"Wrapped{base.__name__}", (base,), {name: passing(name) for name in names})


class SchedulerSide(_Wrapped, _wrapping(SchedulerConnector)):  # type: ignore[misc]
    """The scheduler side, wrapped."""

    side = "scheduler"

    @property
    def supports_hma(self) -> bool:
        return bool(self.inner.supports_hma)

    @property
    def requires_kv_delivery(self) -> bool:
        return bool(self.inner.requires_kv_delivery)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = (None, False)
        self.recorder.answered[request.request_id] += 1
        if not self.loads or self.recorder.answered[request.request_id] > 1:
            answer = self._settled(request, num_computed_tokens)
        self.recorder.in_background[request.request_id] = answer[1]
        given = {"num_tokens": len(request.token_ids), "num_computed": num_computed_tokens}
        name = self.recorder.name(request.request_id)
        self.recorder.note(self.side, "get_num_new_matched_tokens", name, given, list(answer))
        return answer

    def _settled(self, request: Request, num_computed_tokens: int) -> Any:
        limit = time.monotonic() + WAIT_S
        while (answer := self.inner.get_num_new_matched_tokens(request, num_computed_tokens))[0] is None:
            assert time.monotonic() < limit, f"no answer about {request.request_id}"
            time.sleep(0.001)
        return answer

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        if num_external_tokens and self.recorder.in_background[request.request_id]:
            self.recorder.loading[request.request_id] = STEPS_TO_LOAD
        self.recorder.tables(request.request_id, block_ids)
        super().update_state_after_alloc(request, block_ids, num_external_tokens)

    def build_connector_meta(self, output: Any) -> Any:
        self.recorder.planned += 1
        for one in output.scheduled:
            self.recorder.tables(one.request_id, output.block_ids(one.request_id))
        return super().build_connector_meta(output)

    def get_hit_sources(self, request: Request, num_external_tokens: int) -> Any:
        """Not recorded: a question for vLLM's figures, after which nothing is different."""
        return self.inner.get_hit_sources(request, num_external_tokens)


class WorkerSide(_Wrapped, _wrapping(WorkerConnector)):  # type: ignore[misc]
    """The worker side, wrapped."""

    side = "worker"

    def handle_preemptions(self, request_ids: frozenset[str]) -> None:
        self.recorder.running += 1
        super().handle_preemptions(request_ids)
        self.recorder.running -= 1

    def bind_connector_metadata(self, metadata: Any) -> None:
        self.recorder.running += 1
        super().bind_connector_metadata(metadata)

    def has_connector_metadata(self) -> bool:
        """True, so that a recording has the calls of every layer."""
        self.recorder.note(self.side, "has_connector_metadata", "", {}, True)
        return True

    def get_finished(self, finished_request_ids: frozenset[str]) -> Any:
        loading = self.recorder.loading
        for request_id in loading:
            loading[request_id] -= 1
        due = {request_id for request_id, steps in loading.items() if steps < 0}
        sent, received = frozenset[str](), frozenset(self.recorder.received & due)
        limit = time.monotonic() + WAIT_S
        while due - received or not loading:
            sending, receiving = self.inner.get_finished(finished_request_ids)
            sent, received = sent | sending, received | receiving
            assert received <= due, "runs are recorded in which loads begin together"
            if not loading:
                break
            assert time.monotonic() < limit, f"the loads of {due - received} do not end"
        self.recorder.received -= received
        for request_id in received:
            del loading[request_id]
        given = {"finished": self.recorder.requests(finished_request_ids)}
        answer = [self.recorder.requests(sent), self.recorder.requests(received)]
        self.recorder.note(self.side, "get_finished", "", given, answer)
        return sent, received

    def get_stats(self) -> None:
        super().get_stats()
