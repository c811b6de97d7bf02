"""The base of the connector suite: connected engines, injected faults, and cleanup."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar
from unittest import mock

import attrs
import pytest

from kvplug import Config, build_connector
from kvplug.engine import Request, WorkerOutput
from kvplug.kit import Kind
from kvplug.transport import Deadline, Job, PageBuffers, PutReason, Store
from kvplug_testing import waits
from kvplug_testing.contract import base
from kvplug_testing.contract.base import Contract
from kvplug_testing.contract.connector.fault_injection import FaultInjectingPipe, FaultSwitch
from kvplug_testing.engine import FakeEngine, Scheduled, request_of
from kvplug_testing.waits import Call

_numbers = itertools.count(1)

BLOCK = 16
PROMPT = range(100)
KV_OF_A_TOKEN = 2 * 3 * 2 * 8 * 4
"""Bytes of a token in the fake engine's cache: keys and values, layers, heads, elements, float32."""
ASYNC_OPTION = "async_load"
"""The option of a connector that makes it load in the background."""
STALL_OPTION = "stall_timeout_s"
"""The option of a connector for how long nothing of a load may come before it has failed."""


def done(figures: Mapping[str, Any] | None, op: str) -> int:
    """How many transfers of this operation succeeded."""
    return int((figures or {}).get("ops", {}).get(op, {}).get("count", 0))


def failed(figures: Mapping[str, Any] | None, op: str) -> int:
    """How many transfers of this operation failed, for any reason."""
    return sum((figures or {}).get("failures", {}).get(op, {}).values())


@attrs.frozen
class Promise:
    """A request that was promised tokens, and has its blocks."""

    engine: FakeEngine
    prompt: Request
    blocks: tuple[int, ...]
    found: int
    """How many tokens were promised."""
    is_async: bool
    """Whether they load in the background."""

    @property
    def work(self) -> Scheduled:
        """What is computed in the step that needs the load."""
        return self.prompt, self.blocks, self.found, len(self.prompt.token_ids) - self.found

    def check_reported(self, *reports: WorkerOutput) -> frozenset[int]:
        """Blocks that have wrong KV are in the reports. Returns all that are in these."""
        invalid = frozenset[int]().union(*(report.invalid_block_ids for report in reports))
        wrong = self.engine.cache.wrong_blocks(self.prompt.token_ids, self.blocks, 0, self.found)
        assert wrong <= invalid, f"blocks {sorted(wrong - invalid)} have wrong KV, and no report names them"
        assert invalid <= {*self.blocks}, "blocks of others were reported"
        return invalid

    def check_computes_again(self) -> None:
        """The engine computes all of it, and nothing is written into its blocks meanwhile."""
        total = len(self.prompt.token_ids)
        self.engine.step([(self.prompt, self.blocks, 0, total)])
        is_right = self.engine.is_right(self.prompt.token_ids, self.blocks, total)
        assert is_right, "what was computed again was overwritten"


class ConnectorSuite(Contract):
    """The subject, and how its engines are made. Authors set the class attributes."""

    kind: ClassVar[Kind] = Kind.CONNECTOR
    _named_by: ClassVar[str] = "connector"
    connector: ClassVar[str] = ""
    """Name of an installed connector."""
    config: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """More keys of both engines' configs: ``transport``, ``lookup_buffer``, ``options`` of these, ..."""
    injects_into_own: ClassVar[bool] = False
    """:meth:`inject_fault` works for what an engine loads from itself, too, in the role "both"."""
    serves_beside_others: ClassVar[bool] = False
    """Another connector of the same engine may load KV, as in vLLM's MultiConnector, and may fail to: nothing
    of that is stored. Without it this is not checked."""
    lends_blocks: ClassVar[bool] = False
    """``request_finished`` hands out references, and its engine keeps the blocks until another engine has
    read them. An engine loads nothing from itself, not even in the role
    "both"."""
    timeout_s: ClassVar[float] = 10.0
    """``timeout_s`` of the configs."""

    _host = ""
    _stored_by: FakeEngine

    def import_all(self) -> None:
        super().import_all()
        if self.spec is not None:
            self.spec.load_worker_factory()

    # -- engines -------------------------------------------------------------------------------

    def config_of(self, role: str, *, background: bool = False, **more: Any) -> Config:
        """The config of one engine. All engines of one test share an address."""
        self.installed()
        self._host = self._host or f"unix:@kvplug-judged-{os.getpid()}-{next(_numbers)}"
        given = {**self.config, **more}
        options = {name: dict(table) for name, table in given.pop("options", {}).items()}
        own = {**options.get(self.transport, {}), **self.options}
        if background:
            own[ASYNC_OPTION] = True
        if own:
            options[self.transport] = own
        known = {"connector": self.transport, "host": self._host, "timeout_s": self.timeout_s}
        return Config.from_dict({**known, **given, "role": role, "options": options})

    def make_side(self, config: Config, side: str, **given: Any) -> Any:
        """One side of the connector."""
        return build_connector(config, side, registry=base._registry(), **given)

    def engine(
        self, role: str, *, background: bool = False, config: Mapping[str, Any] | None = None, **given: Any
    ) -> FakeEngine:
        """An engine in this process, which ends with the test. ``given``: arguments of the fake engine."""
        made: FakeEngine = self.run(
            FakeEngine,
            self.config_of(role, background=background, **(config or {})),
            make=self.make_side,
            wrap_pipe=lambda pipe: FaultInjectingPipe(pipe, self.switch) if role != "producer" else pipe,
            **given,
        )
        self.later(lambda: self.shut(made))
        return made

    def shut(self, engine: FakeEngine, is_worker_first: bool = True) -> None:
        """Shut down both sides, twice each; every call must end in time."""
        sides = [engine.worker, engine.scheduler] if is_worker_first else [engine.scheduler, engine.worker]
        for side in (*sides, *sides):
            self.run(side.shutdown)

    def pair(
        self,
        *,
        background: bool = False,
        producer: Mapping[str, Any] | None = None,
        consumer: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> tuple[FakeEngine, FakeEngine]:
        """A connected producer engine and consumer engine."""
        prefill = self.engine("producer", **{"seed": 1, **given, **(producer or {})})
        decode = self.engine("consumer", background=background, **{"seed": 2, **given, **(consumer or {})})
        self.meet(decode)
        return prefill, decode

    def meet(self, decode: FakeEngine) -> None:
        """Wait until the consumer has found its peer."""
        self.run(decode.scheduler.wait_until_ready, waits.patience_s)
        self.run(decode.worker.wait_until_ready, waits.patience_s)

    def both(self, **given: Any) -> FakeEngine:
        """An engine in the role "both": it loads KV that it has saved."""
        return self.engine("both", **{"num_blocks": 256, **given})

    # -- requests ------------------------------------------------------------------------------

    @staticmethod
    def run(call: Callable[..., Any], *args: Any, within: float | None = None, **given: Any) -> Any:
        """The call's return value; it must return in time."""
        return Call(functools.partial(call, *args, **given)).result(within)

    def stored(
        self, engine: FakeEngine, tokens: Any = PROMPT, name: str = "stored", **given: Any
    ) -> dict[str, Any]:
        """Compute a prompt, hand it off and finish it. Returns the ``kv_transfer_params`` for loading it."""
        self._stored_by = engine
        return self.run(engine.hand_off, request_of(name, tokens, **given))[1] or {}

    def renewed(self, prompt: Request, name: str) -> Request:
        """The same prompt for another request. What a reference finds is handed off again: a reference may be
        good for one load only."""
        params = self.stored(self._stored_by, prompt.token_ids, f"for {name}") if prompt.params else {}
        return attrs.evolve(prompt, request_id=name, params=params)

    def asking(self, **pair: Any) -> tuple[FakeEngine, FakeEngine, Request]:
        """A connected pair, and the consumer's request "a" for a prompt that the producer has stored."""
        prefill, decode = self.pair(**pair)
        return prefill, decode, request_of("a", PROMPT, params=self.stored(prefill))

    def loading(self, **pair: Any) -> Promise:
        """The request of :meth:`asking`, whose tokens are promised to the consumer."""
        _, decode, prompt = self.asking(**pair)
        return self.promised(decode, prompt)

    def admitted(self, engine: FakeEngine, request: Request) -> Promise:
        """Start a request, which may be promised tokens, and allocate its blocks."""
        found, is_async = self.run(engine.matched, request)
        blocks = engine.allocate(len(request.token_ids))
        engine.scheduler.update_state_after_alloc(request, (blocks,), found)
        return Promise(engine, request, blocks, found, is_async)

    def promised(self, engine: FakeEngine, request: Request) -> Promise:
        """Start a request that is promised tokens, and allocate its blocks."""
        load = self.admitted(engine, request)
        assert load.found > 0, f"nothing is promised to {request.request_id}, though its tokens were stored"
        return load

    def run_load(self, load: Promise) -> frozenset[int]:
        """Run the steps of a load. Returns its blocks that they report; all that are wrong must be."""
        if load.is_async:
            return load.check_reported(*self.run_until_named(load.engine, load.prompt.request_id))
        return load.check_reported(self.run(load.engine.step, [load.work]))

    def check_loads(
        self, engine: FakeEngine, prompt: Request, failure: str = "what was stored does not come"
    ) -> None:
        """Load a prompt: tokens are promised, all of them come, and the KV is right."""
        load = self.promised(engine, prompt)
        assert not self.run_load(load), failure
        assert engine.is_right(prompt.token_ids, load.blocks, load.found), "the KV is wrong"

    def num_promised(self, engine: FakeEngine, prompt: Request) -> int:
        """How many tokens are promised to a new request."""
        return int(self.run(engine.matched, prompt)[0])

    def until_promised(self, engine: FakeEngine, prompt: Request) -> None:
        """Wait until tokens of this prompt are promised to a new request."""

        def is_promised() -> bool:
            return self.num_promised(engine, attrs.evolve(prompt, request_id=f"ask{next(_numbers)}")) > 0

        waits.until(is_promised, 2 * waits.patience_s, what="a promise of what the peer has")

    def run_until_named(self, engine: FakeEngine, name: str, work: Sequence[Scheduled] = ()) -> list[Any]:
        """Run steps until one names this request as received. Returns their reports."""
        reports: list[Any] = []

        def is_named() -> bool:
            reports.append(self.run(engine.step, [*work]))
            return name in reports[-1].finished_recving

        waits.until(is_named, self.timeout_s + waits.patience_s, what=f"a step that names {name} as received")
        return reports

    # -- faults --------------------------------------------------------------------------------

    @functools.cached_property
    def switch(self) -> FaultSwitch:
        """The switch for faults of tensors that engines of this test receive."""
        return FaultSwitch()

    def inject_fault(self, how: str) -> None:
        """From now on what is loaded fails (``"fail"``), is changed (``"corrupt"``), or is right (``""``).

        The default does it in the pipes of an engine that consumes. Override it for a connector that loads
        without any.
        """
        self.switch.how = how

    @contextmanager
    def injecting_fault(self, how: str = "fail") -> Iterator[None]:
        """Like :meth:`inject_fault`, while the block runs."""
        self.inject_fault(how)
        try:
            yield
        finally:
            self.inject_fault("")

    @contextmanager
    def holding_up(self) -> Iterator[threading.Event]:
        """While the block runs, what is loaded comes in part, and the rest does not; the event is set once a
        load waits for it.

        The default does it in the pipes of an engine that consumes, until they are closed or the receive has
        run out of time. Override it for a connector that loads without any; the load must end by itself, too.
        """
        with mock.patch.object(self.switch, "how", "hold"):
            yield self.switch.is_held

    @contextmanager
    def refusing_saves(self) -> Iterator[None]:
        """While the block runs, nothing that engines of this test save is kept; skips the test if nothing was
        refused.

        The default does it in stores that a config names. Override it for a connector that saves without any.
        """
        refused: list[Any] = []

        def refuse(store: Store, pages: Any, **_: Any) -> Job[PutReason | None]:
            refused.append(pages)
            store.withdraw(pages.keys)
            if isinstance(pages.memory, PageBuffers):
                store.free(pages.memory)
            job: Job[PutReason | None] = Job(len(pages.keys), Deadline.after(None))
            job.set([PutReason.NO_ROOM] * job.count)
            return job

        with mock.patch.object(Store, "submit_put", refuse):
            yield
        if not refused:
            pytest.skip(f"{self.called} puts nothing into a store: override refusing_saves")

    def skip_unless_injected(self) -> None:
        """Skip the test if no load can have failed."""
        if type(self).inject_fault is ConnectorSuite.inject_fault and not self.switch.num_pipes:
            pytest.skip(f"no load of {self.called} crosses a pipe (override inject_fault)")

    # -- what tests need: "", or the reason to skip them -----------------------------------------

    @property
    def devices(self) -> str:
        if getattr(self.spec, "moves_pages", False) or self.config.get("transport") == "memory":
            return ""
        return f"{self.called} needs a pipe for each device: judge it with the transport 'memory' too"

    @property
    def staging(self) -> str:
        return self.devices or (f"{self.called} stages nothing (lends_blocks)" if self.lends_blocks else "")

    @property
    def background(self) -> str:
        return self._without_option(ASYNC_OPTION)

    @property
    def stall_limit(self) -> str:
        return self._without_option(STALL_OPTION)

    def _without_option(self, name: str) -> str:
        fields = getattr(self.installed().load_options(), "__attrs_attrs__", ())
        return "" if name in {field.name for field in fields} else f"{self.called} has no option {name!r}"

    def skip_unless_possible(self, background: bool) -> None:
        """Skip the test if it wants loads in the background, and there are none."""
        if background and self.background:
            pytest.skip(self.background)

    @property
    def own_faults(self) -> str:
        reason = f"loads of {self.called} from itself cannot be made to fail (injects_into_own)"
        return "" if self.injects_into_own else reason

    @property
    def others_beside_it(self) -> str:
        reason = f"{self.called} is the only connector of its engine (serves_beside_others)"
        return "" if self.serves_beside_others else reason
