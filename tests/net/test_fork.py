"""What is closed in a forked child."""

from __future__ import annotations

import pytest

from kvplug.net.fork import close_after_fork
from kvplug_testing.contract.forked_child import in_forked_child


class _Thing:
    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.closed = False
        close_after_fork(self)

    def _after_fork_in_child(self) -> None:
        if self._error is not None:
            raise self._error
        self.closed = True


def test_what_fails_to_close_in_a_forked_child_is_logged_and_the_rest_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    things = [_Thing(), _Thing(OSError("it is stuck")), _Thing()]

    def look() -> str:
        return f"{[each.closed for each in things]} {caplog.text}"

    found = in_forked_child(look)
    assert found.startswith("[True, False, True] ")
    assert "closing '_Thing' in a forked child failed" in found and "it is stuck" in found
