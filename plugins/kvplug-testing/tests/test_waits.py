"""Calls in threads of their own."""

from __future__ import annotations

import pytest

from kvplug import PeerGoneError, TimeoutError
from kvplug_testing.waits import Call


def failing(error: BaseException) -> Call:
    def fail() -> None:
        raise error

    return Call(fail)


def test_the_outcome_is_a_result_or_an_error_of_kvplugs() -> None:
    assert Call(lambda: 3).outcome() == 3
    for error in (PeerGoneError("gone"), TimeoutError("late")):
        assert failing(error).outcome() is error


@pytest.mark.parametrize("error", [IndexError(), SystemExit(), OSError(), AssertionError()], ids=repr)
def test_any_other_error_is_no_outcome_and_raised(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        failing(error).outcome()
    assert raised.value is error
