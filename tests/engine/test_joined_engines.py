"""The engines of a directory as they join and leave, also while the directory does not answer."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kvplug.engine import Engine, JoinedEngines
from kvplug.transport import Deadline

A, B = (
    Engine(engine_id=name, epochs=("1",), contacts={0: f"at {name}"}, role="both", model="m") for name in "ab"
)


class Members:
    """A directory whose answers the test gives."""

    model = "m"
    is_closed = False
    waited: Deadline | None = None

    def follow(self, listener: Any) -> None:
        self.tell = listener

    def wait_until_known(self, deadline: Deadline) -> None:
        self.waited = deadline

    def close(self) -> None:
        self.is_closed = True


@attrs.define(eq=False)
class Joined:
    engine: Engine
    is_up: bool = True
    calls: list[str] = attrs.field(factory=list)

    def end(self) -> None:
        self.calls.append("end")

    def close(self) -> None:
        self.calls.append("close")


def joined(join: Any = Joined, **given: Any) -> tuple[Members, JoinedEngines[Joined]]:
    members = Members()
    context: Any = SimpleNamespace(members=members)
    engines: JoinedEngines[Joined] = JoinedEngines(context, join, **given)
    engines.follow()
    return members, engines


def test_engines_join_and_leave_and_one_that_has_restarted_does_both() -> None:
    members, engines = joined()
    members.tell((A, B), False)
    members.tell((A, B), False)
    first, second = engines.all()
    assert (first.engine, second.engine) == (A, B)
    again = attrs.evolve(A, epochs=("2",))
    members.tell((again,), False)
    assert [each.engine for each in engines.all()] == [again]
    assert first.calls == second.calls == ["end"]


def test_engines_that_cannot_be_loaded_from_do_not_join_and_other_models_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    members, engines = joined(is_wanted=lambda engine: engine.engine_id != "b")
    foreign = attrs.evolve(A, engine_id="c", model="another")
    for _ in range(2):
        members.tell((attrs.evolve(A, role="consumer"), B, foreign), False)
    assert engines.all() == []
    assert [each for each in caplog.messages if "another model" in each] == [
        "not loading from engine c in the directory: it has another model"
    ]


def test_while_the_directory_is_silent_engines_that_are_up_stay_and_none_joins() -> None:
    members, engines = joined()
    members.tell((A, B), False)
    up, down = engines.all()
    down.is_up = False
    members.tell((A, B, attrs.evolve(A, engine_id="c")), True)
    assert engines.all() == [up]
    assert (up.calls, down.calls) == ([], ["end"])
    members.tell((A, B), False)
    assert [each.engine for each in engines.all()] == [A, B]


def test_an_engine_whose_object_could_not_be_made_joins_with_the_next_answer() -> None:
    failures = [RuntimeError("no more threads")]

    def join(engine: Engine) -> Joined:
        if failures:
            raise failures.pop()
        return Joined(engine)

    members, engines = joined(join)
    with pytest.raises(RuntimeError):
        members.tell((A,), False)
    assert engines.all() == []
    members.tell((A,), False)
    assert [each.engine for each in engines.all()] == [A]


def test_all_are_ended_before_any_is_waited_for_and_none_joins_afterwards() -> None:
    members, engines = joined()
    members.tell((A, B), False)
    calls: list[str] = []
    for each in engines.all():
        each.calls = calls
    engines.close()
    engines.close()
    assert calls == ["end", "end", "close", "close"]
    assert members.is_closed
    members.tell((A,), False)
    assert engines.all() == []


def test_without_a_directory_there_are_no_engines() -> None:
    context: Any = SimpleNamespace(members=None)
    engines: JoinedEngines[Joined] = JoinedEngines(context, Joined)
    engines.follow()
    engines.wait_until_known(Deadline.after(0))
    assert engines.all() == []
    engines.close()


def test_waiting_is_that_of_the_directory() -> None:
    members, engines = joined()
    deadline = Deadline.after(1)
    engines.wait_until_known(deadline)
    assert members.waited is deadline
