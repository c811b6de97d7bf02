"""Preempted requests: their former blocks are neither read nor written any more (laws CONN-4 and CONN-5)."""

from __future__ import annotations

from typing import Any

import attrs

from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import ConnectorSuite
from kvplug_testing.engine import FakeEngine, PlannedStep, request_of
from kvplug_testing.waits import Call

_PREEMPTED = frozenset({"a"})


class Preemption(ConnectorSuite):
    """An engine that preempts a request, and does not reuse its blocks."""

    @law("CONN-4", "CONN-5")
    def test_what_is_preempted_before_a_step_was_told_of_its_load_is_not_loaded(self) -> None:
        prefill, decode = self.pair()
        prompt = request_of("a", range(100), params=self.stored(prefill, range(100)))
        blocks, _, _ = self.promised(decode, prompt)
        planned = decode.plan([], preempted=_PREEMPTED)
        self._preempt(decode, blocks)
        self._is_left_alone(decode, blocks, planned)
        self._comes_again(decode, prompt)

    @law("CONN-4", "CONN-5")
    def test_what_is_preempted_after_a_load_that_failed_is_not_reported_later(self) -> None:
        prefill, decode = self.pair()
        prompt = request_of("a", range(100), params=self.stored(prefill, range(100)))
        blocks, found, _ = self.promised(decode, prompt)
        first = decode.plan([(prompt, blocks, found, 100 - found)])
        second = decode.plan([], preempted=_PREEMPTED)
        with self.injecting_fault():
            Call(lambda: decode.execute(first)).result()
        self.skip_unless_injected()
        self._preempt(decode, blocks)
        self._is_left_alone(decode, blocks, second)

    @law("CONN-4", "CONN-5", needs="background")
    def test_what_is_preempted_while_it_loads_in_the_background_is_let_alone(self) -> None:
        prefill, decode = self.pair(background=True)
        prompt = request_of("a", range(100), params=self.stored(prefill, range(100)))
        blocks, _, _ = self.promised(decode, prompt)
        report = Call(lambda: decode.step([])).result()
        planned = decode.plan([], preempted=_PREEMPTED)
        self._preempt(decode, blocks)
        self._is_left_alone(decode, blocks, planned, named=len(report.finished_recving), is_async=True)

    @staticmethod
    def _preempt(decode: FakeEngine, blocks: tuple[int, ...]) -> None:
        """Preempt a request. Its blocks are free as soon as the worker side knows of it."""
        Call(lambda: decode.worker.handle_preemptions(_PREEMPTED)).result()
        decode.cache.free(blocks)

    def _is_left_alone(
        self,
        decode: FakeEngine,
        blocks: tuple[int, ...],
        planned: PlannedStep,
        *,
        named: int = 0,
        is_async: bool = False,
    ) -> None:
        """The blocks stay unchanged in that step and the next ones. ``named``: how often the request was
        named as received before.
        """
        reports: list[Any] = [
            Call(lambda: decode.execute(attrs.evolve(planned, preempted=frozenset()))).result()
        ]
        decode.hear(reports[0])
        reports += [Call(lambda: decode.step([])).result() for _ in range(5)]
        written = sorted(decode.cache.written(blocks))
        assert not written, f"blocks {written} were written after the request that had them was preempted"
        received = [name for report in reports for name in report.finished_recving]
        allowed = ["a"] if is_async and not named else []
        assert received in ([], allowed), f"named as received are {received}; a was preempted"
        sent = [name for report in reports for name in report.finished_sending]
        assert not sent, f"named as sent are {sent}; a was preempted"
        invalid = set() if is_async else {block for each in reports for block in each.invalid_block_ids}
        assert not invalid, f"blocks {sorted(invalid)} are reported, which a had before it was preempted"

    def _comes_again(self, decode: FakeEngine, prompt: Any) -> None:
        """The request is scheduled again, with other blocks, from its first token."""
        prompt = attrs.evolve(prompt, generation=1)
        found, _ = Call(lambda: decode.ask(prompt)).result()
        assert found, "nothing is promised to a request that was preempted before its load"
        blocks = decode.allocate(100)
        decode.scheduler.update_state_after_alloc(prompt, (blocks,), found)
        report = Call(lambda: decode.step([(prompt, blocks, found, 100 - found)])).result()
        assert not report.invalid_block_ids, "it comes again, and its load fails"
        assert decode.is_right(prompt.token_ids, blocks, 100), "the KV is wrong"
