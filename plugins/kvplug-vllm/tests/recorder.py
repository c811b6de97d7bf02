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
    kvplug_vllm.connector.build_connector = Recorder(kvplug_vllm.connector.build_connector).build


def begin(llm: Any) -> None:
    """A run begins. What was called at the engine's start is part of it."""
    _of(llm).begin()


def wait_for_loads(llm: Any) -> None:
    """Returns when what the connector "lookup" loads in the background is there, though not reported yet."""
    limit = time.monotonic() + WAIT_S
    while not all(load.has_ended for load in _of(llm).worker._loads.values()):
        assert time.monotonic() < limit, "the loads do not end"
        time.sleep(0.001)


def end(llm: Any) -> list[Any]:
    """The run is over; returns its calls."""
    return _of(llm).calls


def end_engine(llm: Any) -> list[Any]:
    """Shut the engine down; returns the calls that this makes."""
    recorder = _of(llm)
    before = len(recorder.calls)
    llm.llm_engine.engine_core.shutdown()
    return recorder.calls[before:]


def _of(llm: Any) -> Recorder:
    recorder: Recorder = llm.llm_engine.engine_core.engine_core.scheduler.connector._connector.recorder
    return recorder


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
        self.worker: Any = None
        """The worker side that is wrapped."""

    def build(self, config: Any, side: str, **arguments: Any) -> Any:
        built = self._build(config, side, **arguments)
        wrapped = SchedulerSide(built) if isinstance(built, SchedulerConnector) else WorkerSide(built)
        wrapped.recorder = self
        if isinstance(wrapped, WorkerSide):
            self.worker = built
        wrapped.loads = config.role is not Role.PRODUCER
        wrapped.layers = {name: at for at, name in enumerate(arguments["cache"].groups[0].layer_names)}
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


def _wrapping(base: type) -> type:
    """A subclass that passes every call of the ABC on to what it wraps, and notes it."""

    def passing(name: str) -> Callable[..., Any]:
        def passes(self: Any, *arguments: Any) -> Any:
            return self.note(name, *arguments)

        return passes

    names = [
        name for name, what in vars(base).items() if inspect.isfunction(what) and not name.startswith("_")
    ]
    return type(base)(f"Wrapped{base.__name__}", (base,), {name: passing(name) for name in names})


class _Wrapped:
    recorder: Recorder
    loads: bool
    layers: dict[str, int]
    side: str

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def note(self, method: str, *arguments: Any, request: str = "", **given: Any) -> Any:
        answer = getattr(self.inner, method)(*arguments)
        self.recorder.note(self.side, method, request, given, None)
        return answer


class SchedulerSide(_Wrapped, _wrapping(SchedulerConnector)):  # type: ignore[misc]
    """The scheduler side, wrapped."""

    side = "scheduler"

    @property
    def supports_hma(self) -> bool:
        return bool(self.inner.supports_hma)

    @property
    def requires_kv_delivery(self) -> bool:
        return bool(self.inner.requires_kv_delivery)

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        self.note("set_xfer_handshake_metadata", metadata, ranks=sorted(metadata))

    def on_new_request(self, request: Request) -> None:
        self._about("on_new_request", request)

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
        self._about(
            "update_state_after_alloc",
            request,
            block_ids,
            num_external_tokens,
            num_external=num_external_tokens,
            num_blocks=len(block_ids[0]),
        )

    def build_connector_meta(self, output: Any) -> Any:
        self.recorder.planned += 1
        for one in output.scheduled:
            self.recorder.tables(one.request_id, output.block_ids(one.request_id))
        return self.note(
            "build_connector_meta",
            output,
            scheduled=[
                [self.recorder.name(one.request_id), one.num_computed_tokens, one.num_scheduled_tokens]
                for one in output.scheduled
            ],
            preempted=self.recorder.requests(output.preempted_request_ids),
            finished=self.recorder.requests(output.finished_request_ids),
        )

    def update_connector_output(self, output: Any) -> None:
        self.note(
            "update_connector_output",
            output,
            sending=self.recorder.requests(output.finished_sending),
            receiving=self.recorder.requests(output.finished_recving),
            invalid=self.recorder.blocks(output.invalid_block_ids),
        )

    def get_hit_sources(self, request: Request, num_external_tokens: int) -> Any:
        """Not recorded: a question for vLLM's figures, after which nothing is different."""
        return self.inner.get_hit_sources(request, num_external_tokens)

    def request_finished(self, request: Request, block_ids: BlockIds, end: Any) -> Any:
        return self._about(
            "request_finished", request, block_ids, end, end=str(end), num_blocks=len(block_ids[0])
        )

    def request_finished_all_groups(self, request: Request, block_ids: BlockIds, end: Any) -> Any:
        """Recorded as ``request_finished``: a replay calls the one that its connector has."""
        answer = self.inner.request_finished_all_groups(request, block_ids, end)
        return self._noted("request_finished", request, answer, end=str(end), num_blocks=len(block_ids[0]))

    def _about(self, method: str, request: Request, *arguments: Any, **given: Any) -> Any:
        return self._noted(method, request, getattr(self.inner, method)(request, *arguments), **given)

    def _noted(self, method: str, request: Request, answer: Any, **given: Any) -> Any:
        given = {"num_tokens": len(request.token_ids), **given}
        kept = answer[0] if isinstance(answer, tuple) else None
        self.recorder.note(self.side, method, self.recorder.name(request.request_id), given, kept)
        return answer

    def has_pending_push_work(self) -> bool:
        return self._asked("has_pending_push_work")

    def get_finished_count(self) -> Any:
        return self._asked("get_finished_count")

    def _asked(self, method: str) -> Any:
        answer = getattr(self.inner, method)()
        self.recorder.note(self.side, method, "", {}, answer)
        return answer


class WorkerSide(_Wrapped, _wrapping(WorkerConnector)):  # type: ignore[misc]
    """The worker side, wrapped."""

    side = "worker"

    def register_kv_caches(self, kv_caches: Any) -> None:
        self.note("register_kv_caches", kv_caches, num_layers=len(kv_caches))

    def handle_preemptions(self, request_ids: frozenset[str]) -> None:
        self.recorder.running += 1
        self.note("handle_preemptions", request_ids, preempted=self.recorder.requests(request_ids))
        self.recorder.running -= 1

    def bind_connector_metadata(self, metadata: Any) -> None:
        self.recorder.running += 1
        self.note("bind_connector_metadata", metadata)

    def has_connector_metadata(self) -> bool:
        """True, so that a recording has the calls of every layer."""
        self.recorder.note(self.side, "has_connector_metadata", "", {}, True)
        return True

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.note("wait_for_layer_load", layer_name, layer=self.layers[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: Any) -> None:
        self.note("save_kv_layer", layer_name, kv_layer, layer=self.layers[layer_name])

    def get_finished(self, finished_request_ids: frozenset[str]) -> Any:
        loading = self.recorder.loading
        for request_id in loading:
            loading[request_id] -= 1
        due = {request_id for request_id, steps in loading.items() if steps < 0}
        sent, received = frozenset[str](), frozenset[str]()
        limit = time.monotonic() + WAIT_S
        while due - received or not loading:
            sending, receiving = self.inner.get_finished(finished_request_ids)
            sent, received = sent | sending, received | receiving
            assert received <= due, "runs are recorded in which loads begin together"
            if not loading:
                break
            assert time.monotonic() < limit, f"the loads of {due - received} do not end"
        for request_id in received:
            del loading[request_id]
        given = {"finished": self.recorder.requests(finished_request_ids)}
        answer = [self.recorder.requests(sent), self.recorder.requests(received)]
        self.recorder.note(self.side, "get_finished", "", given, answer)
        return sent, received

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        failed: frozenset[int] = self.inner.get_block_ids_with_load_errors()
        blocks = self.recorder.blocks(failed)
        self.recorder.note(self.side, "get_block_ids_with_load_errors", "", {}, blocks)
        return failed

    def get_stats(self) -> None:
        self.inner.get_stats()
        self.recorder.note(self.side, "get_stats", "", {}, None)
