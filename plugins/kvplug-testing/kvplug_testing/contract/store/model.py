"""Random calls of a store."""

from __future__ import annotations

from kvplug.transport import Store
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.suite import StoreSuite, at_both_ends


class Model(StoreSuite):
    """Each call is compared with a dict."""

    @law("STORE-1", "STORE-2", "STORE-9", "STORE-10", timeout_s=120)
    @at_both_ends
    def test_random_calls_give_what_a_dict_gives(self, end: str) -> None:
        self._run(end, examples=10, steps=25, shrink=False)

    @law("STORE-1", "STORE-2", "STORE-9", "STORE-10", level="long", timeout_s=900)
    @at_both_ends
    def test_many_random_calls_give_what_a_dict_gives(self, end: str) -> None:
        self._run(end, examples=100, steps=50, shrink=True)

    def _run(self, end: str, examples: int, steps: int, shrink: bool) -> None:
        from kvplug_testing.contract.store import machine

        def make() -> tuple[StoreSuite, Store, Store]:
            return self, *self.ends(end, 64 << 20)

        machine.run(make, examples, steps, shrink)
