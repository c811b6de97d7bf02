"""The laws of everything with an end, ALL-1 to ALL-8, written once for all kinds.

A kind's suite has these tests by naming its :class:`~kvplug_testing.contract.ends.Ends`. Exhaustion (ALL-9)
and lies (ALL-10) are judged by :mod:`kvplug_testing.contract.exhaustion` and
:mod:`kvplug_testing.contract.lied_to`.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

import pytest

from kvplug import ClosedError, KvplugError, TimeoutError
from kvplug.transport import BusyError
from kvplug_testing import peers, waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.ends import (
    CHILD_S,
    LEAVES,
    RUN_END,
    End,
    Handle,
    LocalHandle,
    Pending,
    RemoteHandle,
)
from kvplug_testing.contract.exhaustion import Exhaustion
from kvplug_testing.contract.forked_child import held, in_forked_child, more_than
from kvplug_testing.contract.lied_to import LiedTo

HOW: Final = ("close", "abort")
_DEATHS: Final = ("is killed", "is killed and not reaped", "exits")
_LEAVES_A_CHILD: Final = "is killed, and a child of it holds its descriptors"
HEARTBEAT_S: Final = 0.5
"""``heartbeat_timeout_s`` of ends whose process is stopped for longer: it has no effect on one host."""
SILENCE_S: Final = 2.0
"""``heartbeat_timeout_s`` of ends on two hosts."""
DEADLINE_S: Final = 0.3
_EARLY_S: Final = 0.05
"""How much too early a call may time out: more than the error of reading a clock."""
PART_BYTES: Final = 1 << 20
"""About how many bytes exchange 0 moves: a leak of each is seen in the memory of the process."""
_BLOCKED_S: Final = 0.1
_AFTER_S: Final = 5.0
"""The timeout of an exchange that may fail, since a call was interrupted."""
_WARM_UP: Final = 10
_ROUNDS: Final = 20
_MANY_ROUNDS: Final = 150
"""So many that a leak of a few hundred KB in each is seen."""
_LONGEST: Final = (None, 1e10, 1e300, math.inf, 3600)
_WRONG: Final = (-1, -0.001, -math.inf, math.nan)


class General(LiedTo, Exhaustion):
    """Ends, deadlines, deaths, forks, leaks, what runs out, and lies."""

    @property
    def running_out_processes(self) -> str:
        return self.ends_here or super().running_out_processes

    # -- ends for a test -----------------------------------------------------------------------

    def connected(self, **context: Any) -> list[Handle]:
        """Connected ends in this process, or in processes of their own with ``ends_are_processes``."""
        return self._joined([self.ends_are_processes] * len(self.ends().roles), context)

    def across(self, role: int, **context: Any) -> tuple[list[Handle], Any]:
        """Connected ends, that of ``role`` in another process. Returns all of them, and that one."""
        roles = self._roles
        found = self._joined([self.ends_are_processes or each == role for each in roles], context)
        return found, found[role]

    def _joined(self, are_remote: Sequence[bool], context: dict[str, Any]) -> list[Handle]:
        context = self.ends(**context).shared()
        children = [
            self.start_forked(RUN_END, self.suite_ref(), role, context, timeout_s=CHILD_S) if remote else None
            for role, remote in enumerate(are_remote)
        ]
        return self._met(children, context)

    def _met(self, children: Sequence[peers.Peer | None], context: dict[str, Any]) -> list[Handle]:
        here = self.ends(**context).make(children)  # also those beside the ends of the roles
        there = filter(None, children)
        return [RemoteHandle(next(there)) if end is None else LocalHandle(end) for end in here]

    def between_hosts(self, hosts: Sequence[int] = (0, 1), **context: Any) -> list[Handle]:
        """Connected ends, each in a process on the host of that number. For tests that need another host."""
        context = self.ends(**context).shared()
        children = [
            self.start_at(
                host, RUN_END, self.suite_ref(), role, {**context, "at_host": host}, timeout_s=CHILD_S
            )
            for role, host in enumerate(hosts)
        ]
        found = self._met(children, context)
        self.exchange(found)
        return found

    def exchange(self, ends: Sequence[Handle], number: int = 0) -> None:
        """Run one exchange. Every end checks what it receives."""
        parts = [end.begin("part", number, waits.patience_s) for end in self._partners(ends)]
        for part in parts:
            part.result()

    def _partners(self, ends: Sequence[Handle]) -> Sequence[Handle]:
        return ends[: len(self.ends().roles)]

    def go_on(self, ends: Sequence[Handle], clogged: Sequence[int] = ()) -> None:
        """The ends work: what was sent is received, and then an exchange succeeds."""
        for at, count in enumerate(clogged):
            for other in self._roles:
                if other != at and count:
                    ends[other].run("drain", count)
        self.exchange(ends, 1)

    @property
    def _roles(self) -> range:
        return range(len(self.ends().roles))

    def _facts(self) -> list[Handle]:
        """Ends that have ended, for their descriptions."""
        with self.scope():
            return self.connected()

    def _some_blocking(self) -> list[Handle]:
        """:meth:`_facts`. The test is skipped if no call of any end blocks."""
        found = self._facts()
        if not any(end.blocking for end in found):
            pytest.skip(f"no call of {self.called} blocks")
        return found

    def each_end(self, **context: Any) -> Iterator[tuple[list[Handle], Handle]]:
        """For each end a new connection, which ends with its turn."""
        for at in range(len(self._facts())):
            with self.scope():
                ends = self.connected(**context)
                yield ends, ends[at]

    def each_blocking_call(self, **context: Any) -> Iterator[tuple[list[Handle], Handle, str]]:
        """For each blocking call of each end a new connection, in which that call blocks."""
        for at, end in enumerate(self._some_blocking()):
            for name in end.blocking:
                with self.scope():
                    ends = self.connected(**context)
                    ends[at].run("clog")
                    yield ends, ends[at], name

    def each_process(self, **context: Any) -> Iterator[tuple[list[Handle], Any]]:
        """For each role a new connection whose end of that role is in another process: all ends, and that
        one. An exchange has succeeded.
        """
        for role in self._roles:
            with self.scope():
                ends, there = self.across(role, **context)
                self.exchange(ends)
                yield ends, there

    def others(self, ends: Sequence[Handle], end: Handle) -> list[Handle]:
        """The ends of the same connection, without this one."""
        return [each for each in self._partners(ends) if each is not end]

    # -- ALL-1 ---------------------------------------------------------------------------------

    @law("ALL-1")
    @pytest.mark.parametrize("used", [True, False])
    @pytest.mark.parametrize("how", HOW)
    def test_after_an_end_every_call_raises_closed_and_ending_twice_is_ending_once(
        self, how: str, used: bool
    ) -> None:
        for ends, end in self.each_end():
            if used:
                self.exchange(ends)
            assert not end.run("closed")
            end.run("end", how)
            for again, timeout in ((how, 0), ("close", None), ("abort", waits.patience_s), (how, 0)):
                assert not (wrong := end.run("not_closed", timeout)), wrong
                end.run("end", again)
            for other in ends:
                other.run("end", "abort")
            for again in HOW:  # also if the others are gone
                end.run("end", again)

    @law("ALL-1")
    @pytest.mark.parametrize("how", HOW)
    def test_ending_wakes_a_call_that_is_blocked(self, how: str) -> None:
        for _, end, name in self.each_blocking_call():
            waiting = end.begin("wait", name, None).check_blocked()
            end.run("end", how)
            waiting.raised(ClosedError)

    @law("ALL-1", "ALL-4")
    @pytest.mark.parametrize("timeout", [0, DEADLINE_S])
    def test_closing_ends_at_its_deadline_though_nothing_is_received(self, timeout: float) -> None:
        for _, end in self.each_end():
            end.run("clog")
            end.begin("close", timeout).result()
            assert end.run("closed") is not False

    # -- ALL-2 ---------------------------------------------------------------------------------

    @law("ALL-2")
    @pytest.mark.parametrize("how", HOW)
    def test_blocked_and_later_calls_fail_when_the_other_end_ends(self, how: str) -> None:
        calls = [
            (at, name)
            for at, end in enumerate(self._facts())
            if end.gone and (how == "abort" or end.facts["leaves"])
            for name in end.facts["doomed"]
        ]
        if not calls:
            pytest.skip(self._needs_no_other)
        for at, name in calls:
            with self.scope():
                ends = self.connected()
                end = ends[at]
                end.run("clog")
                waiting = end.begin("wait", name, None).check_blocked()
                for other in self.others(ends, end):
                    other.run("end", how)
                waiting.raised(end.gone or KvplugError)
                end.run("is_gone")
                end.run("close", waits.patience_s)
                assert not (wrong := end.run("not_closed")), wrong

    @law("ALL-2", needs="other_processes")
    def test_blocked_and_later_calls_fail_when_the_other_process_ends(self) -> None:
        """Every end that has to fail: without a blocked call, and in the first and last that need the other
        end.
        """
        partners = enumerate(self._partners(self._facts()))
        cases = [
            (role, at, name)
            for role, (at, end) in itertools.product(self._roles, partners)
            if at != role and end.gone
            for name in ("", *end.facts["doomed"][:1], *end.facts["doomed"][1:][-1:])
        ]
        if not cases:
            pytest.skip(self._needs_no_other)
        ways = _DEATHS if self.forked_processes else (*_DEATHS, _LEAVES_A_CHILD)
        turns = itertools.islice(itertools.cycle(cases), max(len(cases), len(ways)))
        for (role, at, name), way in zip(turns, itertools.cycle(ways), strict=False):
            with self.scope():
                ends, dies = self.across(role, heartbeat_timeout_s=HEARTBEAT_S)
                self.exchange(ends)
                ends[at].run("clog")
                waiting = ends[at].begin("wait", name, None).check_blocked() if name else None
                self._die(dies, way)
                _raises_gone(ends[at], waiting)
                ends[at].run("close", waits.patience_s)
                assert not (wrong := ends[at].run("not_closed")), f"its process {way}: {wrong}"

    def _some_need_another(self) -> None:
        """The test is skipped if no end depends on another one."""
        if not any(end.gone for end in self._partners(self._facts())):
            pytest.skip(self._needs_no_other)

    @property
    def _needs_no_other(self) -> str:
        """The reason to skip a test."""
        return f"no blocked call of {self.called} has to fail when another end ends"

    def _die(self, dies: RemoteHandle, way: str) -> None:
        if way == _LEAVES_A_CHILD:
            self.later(functools.partial(os.kill, dies.run("leave_a_child"), signal.SIGKILL))
        if way == "exits":
            dies.child.send(["exit", "", []])
        elif way == "is killed and not reaped":
            os.kill(dies.child.pid, signal.SIGKILL)
        else:
            dies.child.kill()

    @law("ALL-2", "ALL-5", needs="other_processes", level="long")
    def test_when_a_process_is_killed_at_work_all_ends_fail_and_no_message_arrives_in_part(self) -> None:
        self._some_need_another()
        for ends, dies in self.each_process():
            working = [(end, end.begin("work", 2)) for end in self.others(ends, dies)]
            dies.begin("work", 2)
            time.sleep(0.02)
            dies.child.kill()
            for end, call in working:
                if end.gone:
                    call.raised(end.gone)

    @law("ALL-2", needs="another_host")
    def test_blocked_and_later_calls_fail_when_a_process_on_another_host_is_killed(self) -> None:
        self._some_need_another()
        for role in self._roles:
            with self.scope():
                ends = self.between_hosts()
                self._all_fail([end for end in ends if end is not ends[role]], ends[role].child.kill)  # type: ignore[attr-defined]

    def _all_fail(self, ends: Sequence[Handle], kill: Callable[[], object]) -> None:
        """Each of these ends has a blocked call, which fails after ``kill`` if it needs the other end."""
        waiting = {}
        for end in ends:
            end.run("clog")
            if end.gone:
                waiting[end] = end.begin("wait", end.facts["doomed"][-1], None).check_blocked()
        kill()
        for end, call in waiting.items():
            _raises_gone(end, call)

    # -- ALL-3 ---------------------------------------------------------------------------------

    @law("ALL-3", needs="other_processes")
    def test_a_process_that_is_stopped_is_alive_and_goes_on(self) -> None:
        kind = self.ends()
        for ends, stops in self.each_process(heartbeat_timeout_s=HEARTBEAT_S):
            stops.child.stop()
            for end in self.others(ends, stops):
                for name in end.facts["unclogged"] if end.gone else ():
                    end.begin("wait", name, HEARTBEAT_S).raised(TimeoutError)
                    if kind.breaks_by_timeout:
                        break
            if not kind.breaks_by_timeout:
                parts = [(end, end.begin("part", 1, None)) for end in self._partners(ends)]
                for end, part in parts:
                    if end is not stops and not part.is_blocked(3 * HEARTBEAT_S):
                        part.result()
                stops.child.cont()
                for _, part in sorted(parts, key=lambda each: each[0] is not stops):
                    part.result()
                self.exchange(ends, 2)
            stops.child.cont()

    @law("ALL-3", "ALL-5", "ALL-2", needs="another_host heartbeat", level="long")
    def test_when_the_other_host_vanishes_its_silence_is_a_death_and_idling_is_not(self) -> None:
        ends = self.between_hosts(heartbeat_timeout_s=SILENCE_S)
        time.sleep(2 * SILENCE_S)
        self.exchange(ends, 1)
        with ExitStack() as stack:
            self._all_fail(ends, lambda: stack.enter_context(self.hosts().apart()))

    @property
    def heartbeat(self) -> str:
        """The reason to skip a test, for ``needs``."""
        without = f"the ends of {self.called} have no heartbeat of their own"
        return "" if self.ends().has_heartbeat else without

    # -- ALL-4 ---------------------------------------------------------------------------------

    @law("ALL-4")
    @pytest.mark.parametrize("timeout", [0, DEADLINE_S])
    def test_a_call_that_waits_in_vain_ends_at_its_deadline_and_names_the_reason(
        self, timeout: float
    ) -> None:
        self._time_out(timeout, timeout)

    @law("ALL-4")
    def test_a_call_without_a_timeout_uses_that_of_the_context(self) -> None:
        self._time_out(None, DEADLINE_S, timeout_s=DEADLINE_S)

    def _time_out(self, given: float | None, timeout: float, **context: Any) -> None:
        if self.ends().breaks_by_timeout:
            for _, end, name in self.each_blocking_call(**context):
                self._times_out(end, name, given, timeout)
                end.begin("wait", name, None).raised("TransportError")
            return
        self._some_blocking()
        for ends, end in self.each_end(**context):
            clogged = [0 if each is not end else each.run("clog") for each in ends]
            for name in end.blocking:
                for _ in range(1 if timeout else 2):  # the second time as well
                    self._times_out(end, name, given, timeout)
            self.go_on(ends, clogged)

    def _times_out(self, end: Handle, name: str, given: float | None, timeout: float) -> None:
        found = end.begin("wait", name, *(() if given is None else (given,))).raised(TimeoutError)
        took = f"{name} gave up after {found.took_s:.3f} s of {timeout}"
        assert found.took_s >= timeout - _EARLY_S, took
        wrong = f"{name} does not name what it waited for: {found.text!r}"
        assert len(found.text) > 10 and end.facts["awaits"] in found.text, wrong

    @law("ALL-4")
    def test_timeout_none_waits_longer_than_the_timeout_of_the_context(self) -> None:
        for _, end, name in self.each_blocking_call(timeout_s=DEADLINE_S):
            end.begin("wait", name, None).check_blocked(1.5 * DEADLINE_S)

    @law("ALL-4")
    @pytest.mark.parametrize("timeout", _LONGEST)
    def test_what_comes_while_a_call_waits_long_ends_it(self, timeout: float | None) -> None:
        for ends, end in self.each_end():
            if end not in self._partners(ends):
                continue
            parts = [end.begin("part", 0, timeout)]
            parts[0].is_blocked(_BLOCKED_S)
            parts += [each.begin("part", 0, timeout) for each in self.others(ends, end)]
            for part in parts:
                part.result()

    @law("ALL-4")
    def test_a_wrong_timeout_is_a_value_error_and_nothing_else_happens(self) -> None:
        if not any(end.facts["timed"] for end in self._facts()):
            pytest.skip(f"no call of {self.called} takes a timeout")
        for ends, end in self.each_end():
            clogged = [0 if each is end else each.run("clog") for each in ends]
            for timeout in _WRONG:
                assert not (wrong := end.run("wrong_timeouts", timeout)), f"{timeout}: {wrong}"
                assert not end.run("closed")
            self.go_on(ends, clogged)

    @law("ALL-4")
    def test_a_call_that_waits_uses_hardly_any_processor_time(self) -> None:
        ends = self.connected()
        idle = [end for end in ends if end.facts["idles"]]
        for end in idle:
            end.begin("wait", end.facts["idles"], None).check_blocked()
        if not idle:
            pytest.skip(f"law ALL-4 does not limit the processor time of {self.called}")
        seen = {end.facts["pid"]: end for end in ends}
        before = sum(end.run("cpu_s") for end in seen.values())
        time.sleep(1.0)
        used = sum(end.run("cpu_s") for end in seen.values()) - before
        assert used < 0.1, f"{len(idle)} calls that waited for a second used {used:.2f} s of processor time"

    @law("ALL-4")
    def test_a_second_thread_in_a_call_is_refused_and_the_first_goes_on(self) -> None:
        calls = [(at, name) for at, end in enumerate(self._facts()) for name in end.facts["one_thread"]]
        if not calls:
            pytest.skip(f"several threads may call {self.called} at once")
        for at, name in calls:
            with self.scope():
                ends = self.connected()
                end = ends[at]
                self.exchange(ends, 1)  # what is slow the first time is done
                clogged = 0 if name in end.facts["unclogged"] else end.run("clog")
                part = ("drain", clogged) if clogged else ("part", 0, None)
                first = end.begin("wait", name, None) if clogged else end.begin(*part)
                first.check_blocked(DEADLINE_S)
                end.begin("wait", name, DEADLINE_S).raised(BusyError)
                first.check_blocked()
                for each in [*(other.begin(*part) for other in self.others(ends, end)), first]:
                    each.result()

    @law("ALL-5", needs="other_and_forked_processes", level="long", timeout_s=120)
    def test_an_interrupt_of_a_blocked_call_leaves_an_end_that_works_or_is_broken_and_reports_it(
        self,
    ) -> None:
        if not any(end.facts["unclogged"] for end in self._partners(self._facts())):
            pytest.skip(f"no call of {self.called} waits for another end")
        for found, there in self.each_process():
            for name in there.facts["unclogged"]:
                with self.scope():
                    ends, interrupted = self.across(found.index(there))
                    error = interrupted.in_main_thread("interrupted", name)
                    assert error == "KeyboardInterrupt", f"a blocked {name} was interrupted, and gave {error}"
                    parts = {end: end.begin("part", 1, _AFTER_S) for end in self._partners(ends)}
                    kinds = {end: part.outcome(waits.patience_s + 5).kinds for end, part in parts.items()}
                    if any(kinds.values()):
                        mine = kinds[interrupted]
                        broken = "KvplugError" in mine and "TimeoutError" not in mine
                        assert broken, f"{name} was interrupted, and then {parts[interrupted].outcome()}"

    # -- ALL-6 ---------------------------------------------------------------------------------

    @law("ALL-6", needs="forked_processes")
    def test_in_a_forked_child_every_call_raises_closed_though_a_thread_was_inside_one(self) -> None:
        ends = self.connected()
        self.exchange(ends)
        for end in ends:
            assert not (wrong := end.forks()), wrong
        self.exchange(ends, 1)
        for at, end in enumerate(self._partners(ends)):
            inside = end.begin("part", 2 + at, None)
            inside.is_blocked(_BLOCKED_S)
            for each in [*ends] * 3:
                assert not (wrong := each.forks()), wrong
            others = [each.begin("part", 2 + at, None) for each in self.others(ends, end)]
            for part in [inside, *others]:
                part.result()

    @law("ALL-6", needs="forked_processes")
    def test_forks_under_load_disturb_no_end(self) -> None:
        ends = self._partners(self.connected())
        working = [end.begin("work") for end in ends]
        for _ in range(5):
            for end, call in zip(ends, working, strict=True):
                assert not (wrong := end.forks()), wrong
                call.check_blocked(0.0)
        for end in ends:
            end.run("end", "abort")
        for call in working:
            call.raised(KvplugError)

    @law("ALL-6", needs="ends_here forked_processes")
    def test_a_forked_child_holds_none_of_the_descriptors(self) -> None:
        before = in_forked_child(held)
        ends = self.connected()
        for number in range(5):  # opens all that the transport opens
            self.exchange(ends, number)
            assert not (more := more_than(before)), f"a forked child holds {more}"
        self.exchange(ends)

    @property
    def ends_here(self) -> str:
        """The reason to skip a test, for ``needs``."""
        where = f"the ends of {self.called} are processes here (ends_are_processes)"
        return where if self.ends_are_processes else ""

    # -- ALL-7 ---------------------------------------------------------------------------------

    @law("ALL-7", needs="ends_here")
    def test_ends_that_come_and_go_leave_nothing(self) -> None:
        self._come_and_go(_ROUNDS)

    @law("ALL-7", level="long", needs="ends_here", timeout_s=900)
    def test_very_many_ends_that_come_and_go_leave_nothing(self) -> None:
        self._come_and_go(_MANY_ROUNDS)

    def _come_and_go(self, rounds: int) -> None:
        def one(number: int) -> None:
            with self.scope():
                ends = self.connected()
                self.exchange(ends)
                for end in ends if number % 2 else ends[::-1]:
                    end.run("end", "close" if number % 3 else "abort")

        self._leaves_nothing(one, rounds)

    @law("ALL-7", needs="other_processes", level="long", timeout_s=120)
    def test_processes_that_end_or_are_killed_leave_nothing(self) -> None:
        def one(number: int) -> None:
            with self.scope():
                ends, dies = self.across(self._roles[number % len(self._roles)])
                self.exchange(ends)
                if number % 3:
                    dies.begin("work", 1)
                    dies.child.kill()
                for end in self.others(ends, dies):
                    end.run("end", HOW[number % 2])

        self._leaves_nothing(one, _ROUNDS)

    @law("ALL-7", needs="other_processes", level="long", timeout_s=300)
    def test_exchanges_leave_nothing_here_nor_there(self) -> None:
        """So many that a leak of each is seen, at either end. The ends stay: what one makes when it first has
        to wait ends only with it.
        """
        ends, _ = self.across(0)
        self._leaves_nothing(lambda _: self.exchange(ends), 60, ends, spans=3)

    def _leaves_nothing(
        self, one: Callable[[int], None], rounds: int, ends: Sequence[Handle] = (), spans: int = 1
    ) -> None:
        """Run the rounds, and check that nothing grows after the first few, here and in the processes of the
        ends.

        Growth in a single span of rounds does not count: a module may be imported meanwhile, or a block be
        taken once. With several ``spans``, growth is allowed in fewer than half of them: memory that was
        freed earlier can hide a leak for a while.
        """
        logging.disable(logging.CRITICAL)  # pytest keeps what is logged
        self.later(lambda: logging.disable(logging.NOTSET))
        for number in range(_WARM_UP):
            one(number)
        here: Handle = LocalHandle(End())

        def growth() -> str:
            found = [(each.role, each.in_main_thread("growth", rounds, PART_BYTES)) for each in (here, *ends)]
            return "; ".join(f"the process of the {role} holds {more}" for role, more in found if more)

        steady, grown = 0, list[str]()
        while 2 * steady < spans:
            for each in (here, *ends):
                each.in_main_thread("take_footprint")
            for number in range(rounds):
                one(number)
            limit = time.monotonic() + waits.patience_s / 4
            while (found := growth()) and time.monotonic() < limit:
                time.sleep(0.05)  # something is still to be released
            if found:
                grown.append(found)
            else:
                steady += 1
            assert len(grown) < 2 or 2 * len(grown) < spans, "; and then ".join(grown)

    # -- ALL-8 ---------------------------------------------------------------------------------

    @law("ALL-8", needs="other_and_forked_processes", level="long", timeout_s=120)
    @pytest.mark.parametrize("way", LEAVES)
    def test_a_program_that_leaves_at_work_ends_with_its_own_code(self, way: str) -> None:
        for ends, leaves in self.each_process():
            working = [end.begin("busy", False) for end in self.others(ends, leaves)]
            leaves.begin("busy", True)
            time.sleep(2 * _BLOCKED_S)
            leaves.leave(way)
            for end in self.others(ends, leaves):
                end.run("end", "abort")
            for call in working:
                call.raised(KvplugError)


def _raises_gone(end: Handle, waiting: Pending | None) -> None:
    """An end whose other end has died raises that in a call that was blocked, and in later ones."""
    if waiting is not None:
        waiting.raised(end.gone or KvplugError)
    end.run("is_gone")
