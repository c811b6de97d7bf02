"""The order of calls: a connector accepts every allowed order and names a breach (law CONN-1)."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug_testing import call_traces, waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import PROMPT, ConnectorSuite
from kvplug_testing.engine import CallOrder, Departed, FakeEngine, replay, request_of
from kvplug_testing.engine.cache import layout_of
from kvplug_testing.waits import Call

RUNS = [
    pytest.param(name, run, id=f"{name}: {run}")
    for name in call_traces.names()
    for run in call_traces.load(name).runs
]
_ORDERS = [
    CallOrder(drafts=drafts, loads_after_forward=late) for drafts in (False, True) for late in (False, True)
]


class CallSequence(ConnectorSuite):
    """Recorded orders, orders that the law leaves open, and calls that break the order."""

    @law("CONN-1", "CONN-2", "CONN-3", "CONN-5")
    @pytest.mark.parametrize(("record", "name"), RUNS)
    def test_what_engines_were_seen_to_do_is_done_rightly(self, record: str, name: str) -> None:
        run = call_traces.load(record).runs[name]
        if run.is_async and self.background:
            pytest.skip(self.background)
        size: dict[str, Any] = {"block_size": run.block_size, "num_layers": run.num_layers}
        prompts = {
            request: tuple(range(10_000 * number, 10_000 * number + prompt.num_tokens + 16))
            for number, (request, prompt) in enumerate(run.prompts.items())
        }
        if run.role == "producer":
            fake = self.engine("producer", **size)
        else:
            prefill = self.engine("producer", **size)
            fake = self.engine("consumer", background=run.is_async, **size)
            self.meet(fake)
            for request, prompt in run.prompts.items():
                if prompt.num_stored:
                    self.stored(prefill, prompts[request][: prompt.num_stored], f"stored-{request}")
        spoils = any(prompt.spoilt for prompt in run.prompts.values())
        if spoils:
            self.inject_fault("fail")
        try:
            audit = self.run(replay, run, fake, prompts, within=2 * waits.patience_s)
        except Departed as e:
            self.inject_fault("")
            if e.is_nothing:
                self._promises_as_little(run, run.prompts[e.request], prompts[e.request], size)
            if spoils:
                self.skip_unless_injected()
            pytest.skip(f"the record ends to fit: {e}")
        finally:
            self.inject_fault("")
        if spoils:
            self.skip_unless_injected()
            aborted = any(
                call.given["end"] == "aborted" for call in run.calls if call.method == "request_finished"
            )
            assert audit.num_failed or aborted, "its load was made to fail, and did not"

    def _promises_as_little(
        self,
        run: call_traces.TracedRun,
        prompt: call_traces.Prompt,
        tokens: tuple[int, ...],
        size: dict[str, Any],
    ) -> None:
        """A promise of no tokens is allowed only if the same prompt alone gets no promise either."""
        self._host = ""
        prefill, decode = self.pair(background=run.is_async, **size)
        self.stored(prefill, tokens[: prompt.num_stored])
        found = self.num_promised(decode, request_of("alone", tokens[: prompt.num_tokens]))
        assert not found, (
            f"nothing is promised in an order of calls that an engine was seen to make, and {found} tokens of"
            " the same prompt where it is the only one"
        )

    @law("CONN-1")
    @pytest.mark.parametrize("order", _ORDERS, ids=str)
    @pytest.mark.parametrize("chunk", [None, 37])
    def test_a_prompt_is_handed_off_and_loaded_whole_wherever_its_engines_make_the_calls(
        self, order: CallOrder, chunk: int | None
    ) -> None:
        """The fake engine empties block tables after planning: they are looked up while a step is planned."""
        prefill, decode = self.pair()
        _, params = self.run(prefill.hand_off, request_of("s", PROMPT), chunk=chunk, order=order)
        again = request_of("a", PROMPT, params=params)
        needed = CallOrder(drafts=order.drafts)  # a load that its step needs is begun before it
        blocks, found, report = self.run(decode.load, again, order=needed)
        assert found and not report.invalid_block_ids, "what was computed cannot be had"
        assert decode.is_right(again.token_ids, blocks, 100), "the KV is wrong"

    @law("CONN-1", "CONN-3")
    @pytest.mark.parametrize("first", ["wait_for_save", "get_finished", "get_block_ids_with_load_errors"])
    def test_the_steps_loads_have_ended_with_whichever_call_comes_first(self, first: str) -> None:
        load = self.loading()
        planned = load.engine.plan([load.work])
        worker = load.engine.worker
        self.run(worker.bind_connector_metadata, planned.metadata)
        self.run(worker.start_load_kv)
        self.run(getattr(worker, first), *([frozenset()] if first == "get_finished" else []))
        assert not load.wrong, f"after {first} loads have not ended: blocks {sorted(load.wrong)} are wrong"

    @law("CONN-1")
    def test_the_hooks_of_layers_do_nothing_outside_of_a_step(self) -> None:
        engine = self.engine("producer")
        worker = engine.worker
        assert not worker.has_connector_metadata(), "metadata is bound before any step"
        before = {name: cache.clone() for name, cache in engine.kv_caches.items()}
        for name in engine.layer_names:
            self.run(worker.wait_for_layer_load, name)
            self.run(worker.save_kv_layer, name, engine.kv_caches[name])
        planned = engine.plan([])
        worker.bind_connector_metadata(planned.metadata)
        worker.clear_connector_metadata()
        assert not worker.has_connector_metadata(), "the step is over, and its metadata is still bound"
        for name, cache in engine.kv_caches.items():
            assert_same(before[name], cache, "a hook outside of a step wrote into the cache")

    @law("CONN-1")
    def test_a_load_into_a_cache_that_was_not_registered_is_refused_by_name(self) -> None:
        prefill = self.engine("producer")
        decode = self.run(_Unregistered, self.config_of("consumer"), make=self.make_side, seed=2)
        self.later(lambda: self.shut(decode))
        self.meet(decode)
        load = self.promised(decode, request_of("a", PROMPT, params=self.stored(prefill)))
        self._is_named("register_kv_caches", lambda: decode.step([load.work]))

    @law("CONN-1")
    def test_blocks_for_tokens_that_were_never_promised_are_refused_by_name(self) -> None:
        decode = self.engine("consumer")
        prompt = request_of("a", PROMPT)
        decode.scheduler.on_new_request(prompt)
        blocks = decode.allocate(100)
        self._is_named(
            "update_state_after_alloc",
            lambda: decode.scheduler.update_state_after_alloc(prompt, (blocks,), 96),
        )

    @staticmethod
    def _is_named(method: str, breach: Any) -> None:
        error = Call(breach).end().error
        assert error is not None, f"{method} is missing or comes where it may not, and no error says so"
        assert method in str(error), (
            f"the call that broke the order is {method}, and the error says: {error!r}"
        )

    @law("CONN-1")
    def test_a_cache_that_is_not_what_the_config_says_is_refused(self) -> None:
        import torch

        engine = self.engine("producer")
        others = {name: torch.zeros(layout_of("KBTHD", 8, 3).shape) for name in engine.layer_names}
        error = Call(lambda: engine.worker.register_kv_caches(others)).end().error
        assert isinstance(error, ValueError), f"tensors of another shape were registered: {error!r}"


class _Unregistered(FakeEngine):
    """An engine that does not register its KV cache."""

    def _begin(self) -> None:
        self.scheduler.get_finished_count()
