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
        from kvplug_testing.contract.store import machine

        def make() -> tuple[StoreSuite, Store, Store]:
            return self, *self.first_and(end, 64 << 20)

        machine.run(make, examples=10, steps=30)
