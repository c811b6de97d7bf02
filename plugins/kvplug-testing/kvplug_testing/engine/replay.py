"""Replays the recorded calls of a real engine, in the same order, to any connector."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvplug.engine import Request, RequestEnd, Side, WorkerOutput
from kvplug_testing.call_traces import TracedCall, TracedRun
from kvplug_testing.engine import fake
from kvplug_testing.engine.fake import FakeEngine, PlannedStep, Scheduled
from kvplug_testing.engine.load_audit import Load, LoadAudit


class Departed(Exception):  # noqa: N818 - it ends a replay, and is not an error
    """The connector's answer is allowed, but differs from the recorded one."""

    def __init__(self, text: str, *, request: str, is_nothing: bool) -> None:
        """``is_nothing``: the recording has a promise for ``request``, and this connector makes none."""
        super().__init__(text)
        self.request, self.is_nothing = request, is_nothing


def replay(run: TracedRun, fake: FakeEngine, prompts: Mapping[str, tuple[int, ...]]) -> LoadAudit:
    """Make the calls of a recorded run, one by one, up to the last before ``shutdown``.

    Args:
        fake: a new engine with the run's block size and number of layers.
        prompts: the tokens of each of the run's requests: its prompt and the tokens that it generates.

    Raises:
        AssertionError: a promise was broken.
        Departed: the replay cannot continue; the message says why.
    """
    replaying = _Replay(run, fake, prompts)
    for call in run.calls:
        if call.method != "shutdown":
            replaying.make(call)
    replaying.end()
    return replaying.audit


class _Replay:
    def __init__(self, run: TracedRun, fake: FakeEngine, prompts: Mapping[str, tuple[int, ...]]) -> None:
        self.run, self.fake, self.prompts = run, fake, prompts
        self.audit = LoadAudit(fake.cache)
        self.audit.must_arrive = not any(prompt.spoilt for prompt in run.prompts.values())
        self._tables: dict[str, tuple[int, ...]] = {}
        self._answers: dict[str, tuple[int | None, bool]] = {}
        self._asked_with: dict[str, int] = {}
        self._promised: set[str] = set()
        """Requests to which tokens were promised."""
        self._planned: dict[int, PlannedStep] = {}
        self._reports: dict[int, WorkerOutput] = {}
        self._parts: dict[str, Any] = {}
        """The parts of the running step's report so far."""
        self._unheard: set[str] = set()
        self._received: set[str] = set()
        self._done: set[tuple[str, int]] = set()

    def make(self, call: TracedCall) -> None:
        if call.step == 0 and not call.request and call.method in _AT_START:
            return  # the fake engine has made these calls
        side = self.fake.worker if call.role is Side.WORKER else self.fake.scheduler
        own: Callable[[TracedCall], Any] | None = getattr(self, f"_{call.role.value}_{call.method}", None)
        if own is not None:
            own(call)
        else:
            getattr(side, call.method)()

    def _request(self, name: str, num_tokens: int) -> Request:
        prompt = self.run.prompts[name].num_tokens
        tokens = self.prompts[name][: max(prompt, num_tokens)]
        return Request(request_id=name, token_ids=tokens, num_prompt_tokens=prompt)

    def _table(self, name: str, num_blocks: int) -> tuple[int, ...]:
        table = self._tables.get(name, ())
        missing = num_blocks - len(table)
        if missing > 0:
            table += self.fake.allocate(missing * self.fake.block_size)
        self._tables[name] = table
        return table

    # -- the scheduler side --------------------------------------------------------------------

    def _scheduler_on_new_request(self, call: TracedCall) -> None:
        self.fake.scheduler.on_new_request(self._request(call.request, call.given["num_tokens"]))

    def _scheduler_get_num_new_matched_tokens(self, call: TracedCall) -> None:
        request = self._request(call.request, call.given["num_tokens"])
        computed, (wanted, in_background) = call.given["num_computed"], call.answer
        if wanted is None:
            answer = self.fake.scheduler.get_num_new_matched_tokens(request, computed)
        else:
            answer = self.fake.ask(request, computed)
        found, is_async = answer
        self.audit.promise(request, computed, found, is_async)
        self._answers[call.request], self._asked_with[call.request] = answer, computed
        if wanted is not None and (found, is_async) != (wanted, in_background):
            raise Departed(
                f"the engine was promised {wanted} tokens of {call.request} (in the background:"
                f" {in_background}), and is now promised {found} (in the background: {is_async})",
                request=call.request,
                is_nothing=not found and wanted > 0 and call.request not in self._promised,
            )
        if found:
            self._promised.add(call.request)

    def _scheduler_update_state_after_alloc(self, call: TracedCall) -> None:
        name, count = call.request, call.given["num_external"]
        request = self._request(name, call.given["num_tokens"])
        table = self._table(name, call.given["num_blocks"])
        self.fake.scheduler.update_state_after_alloc(request, (table,), count)
        if count:
            start, is_async = self._asked_with[name], self._answers[name][1]
            end = min(start + count, len(request.token_ids) - 1)
            self.audit.begin(Load(request, table, start, end, is_async))

    def _scheduler_build_connector_meta(self, call: TracedCall) -> None:
        scheduled: list[Scheduled] = []
        for name in call.given["preempted"]:
            self.fake.free_blocks += self._tables.pop(name, ())
        for name, computed, new in call.given["scheduled"]:
            table = self._table(name, -(-(computed + new) // self.fake.block_size))
            scheduled.append((self._request(name, computed + new), table, computed, new))
        planned = self.fake.plan(scheduled, preempted=frozenset(call.given["preempted"]))
        self.audit.plan(planned.number)
        self._planned[call.step] = planned

    def _scheduler_update_connector_output(self, call: TracedCall) -> None:
        *before, report = (self._reports[step] for step in sorted(self._reports))
        self._reports.clear()
        for each in before:
            self._hear(each)
        waited = set(call.given["receiving"]) - report.finished_recving
        unnamed = {name for name in waited if name in self.audit.loads}
        # If a request waited for a load that is not in the background, the engine itself names it.
        by_itself = frozenset(waited - unnamed - self._received)
        self._hear(attrs.evolve(report, finished_recving=report.finished_recving | by_itself))
        self._step_until(lambda: not unnamed & self.audit.loads.keys())

    def _hear(self, report: WorkerOutput) -> None:
        self.fake.hear(report)
        self._received |= report.finished_recving

    def _scheduler_request_finished(self, call: TracedCall) -> None:
        name = call.request
        request = self._request(name, call.given["num_tokens"])
        table = self._tables.pop(name, ())[: call.given["num_blocks"]]
        end = RequestEnd(call.given["end"])
        if end is RequestEnd.FINISHED:
            computed = len(request.token_ids) - 1
            wrong = self.fake.cache.wrong_blocks(request.token_ids, table, 0, computed)
            assert not wrong, f"{name} has ended, and its KV is wrong in blocks {sorted(wrong)} of {table}"
        keeps, _ = self.fake.finish(request, table, end)
        reported = any(name in report.finished_recving for report in self._reports.values())
        self.audit.end(name, keeps, is_reported=keeps and reported)

    # -- the worker side -----------------------------------------------------------------------

    def _worker_handle_preemptions(self, call: TracedCall) -> None:
        self.fake.worker.handle_preemptions(frozenset(call.given["preempted"]))

    def _worker_bind_connector_metadata(self, call: TracedCall) -> None:
        self._catch_up(call)
        self.fake.worker.bind_connector_metadata(self._planned[call.step].metadata)

    def _catch_up(self, call: TracedCall) -> None:
        """Pass on the empty reports, which the recording does not contain."""
        at = next(index for index, each in enumerate(self.run.calls) if each is call)
        if not any(each.method == "update_connector_output" for each in self.run.calls[at:]):
            for step in sorted(self._reports):
                self._hear(self._reports.pop(step))

    def _worker_wait_for_layer_load(self, call: TracedCall) -> None:
        self.fake.worker.wait_for_layer_load(self.fake.layer_names[call.given["layer"]])

    def _worker_save_kv_layer(self, call: TracedCall) -> None:
        layer = call.given["layer"]
        for request, table, computed, new in self._planned[call.step].scheduled:
            self.fake.cache.compute(layer, request.token_ids, table, computed, computed + new)
        name = self.fake.layer_names[layer]
        self.fake.worker.save_kv_layer(name, self.fake.kv_caches[name])

    def _worker_get_finished(self, call: TracedCall) -> None:
        planned = self._planned[call.step]
        sending, receiving = self.fake.worker.get_finished(planned.finished)
        self._parts = {"finished_sending": frozenset(sending), "finished_recving": frozenset(receiving)}

    def _worker_get_block_ids_with_load_errors(self, call: TracedCall) -> None:
        self._parts["invalid_block_ids"] = frozenset(self.fake.worker.get_block_ids_with_load_errors())

    def _worker_build_worker_metadata(self, call: TracedCall) -> None:
        said = self.fake.worker.build_worker_metadata()
        report = WorkerOutput(**self._parts, worker_metadata=() if said is None else (said,))
        self.audit.judge(self._planned[call.step].number, report)
        self._reports[call.step] = report

    # -- calls that are not recorded -----------------------------------------------------------

    def _step_until(self, condition: Callable[[], bool]) -> None:
        """Run steps without requests, which are always allowed, for a connector that takes longer."""
        limit = time.monotonic() + fake.PATIENCE_S
        while not condition():
            assert time.monotonic() < limit, f"no step has named {sorted(self.audit.loads)}"
            planned = self.fake.plan([])
            report = self.fake.execute(planned)
            self.audit.judge(planned.number, report)
            self._hear(report)
            time.sleep(0.0005)

    def end(self) -> None:
        """Pass on all remaining reports; all kept requests must be named."""
        while self._reports:
            self._hear(self._reports.pop(min(self._reports)))
        self._step_until(lambda: not self.audit.loads and not self.audit.kept)
        self.fake.settle()


_AT_START = (
    "register_kv_caches",
    "set_host_xfer_buffer_ops",
    "get_finished_count",
    "get_handshake_metadata",
    "set_xfer_handshake_metadata",
)
