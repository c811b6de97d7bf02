"""The order of calls: a connector names the call that breaks it (law CONN-1)."""

from __future__ import annotations

from typing import Any

from kvplug_testing.contract.base import law
from kvplug_testing.contract.connector.suite import PROMPT, ConnectorSuite
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.engine.cache import layout_of
from kvplug_testing.waits import Call


class CallSequence(ConnectorSuite):
    """Calls that break the order. The random schedules make the allowed orders."""

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
        assert method in str(error), f"{method} is missing or comes too early, and the error says: {error!r}"

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
