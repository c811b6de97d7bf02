"""One thread in each direction; a second one gets an error. Interrupts are in tests/transport."""

from __future__ import annotations

import pytest

from kvplug.transport import BusyError, ExclusiveUse


def test_a_second_thread_is_told_what_is_going_on_and_a_block_that_raises_gives_it_back() -> None:
    use = ExclusiveUse("sending")
    with pytest.raises(ZeroDivisionError), use.taken():
        raise ZeroDivisionError
    with use.taken(), pytest.raises(BusyError, match="already sending"), use.taken():
        pass
    with use.taken():
        pass
