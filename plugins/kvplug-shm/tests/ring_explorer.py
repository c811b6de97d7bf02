"""Every interleaving of the ends of a ring, on CPUs with store buffers.

The explorer runs the real code of the ends, and the compiled steps of ring.c. Before each memory access of
one end, any other end may run.

Each CPU has a store buffer, whose stores other CPUs see in order at any later time (x86-TSO; P. Sewell et
al., "x86-TSO: a rigorous and usable programmer's model for x86 multiprocessors", CACM 53(7), 2010). It is
empty after fences and system calls. The kernel compares the futex word and enqueues the sleeper in one step.
Spurious wake-ups are possible. A process that may be killed can die at any time, and its buffered stores
still become visible.

The explorer checks every program: from each reachable state all processes can end without spurious wake-ups
(:class:`StuckError`), and no process runs for ever while the others do nothing (:class:`BusyError`).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from ring_processes import (
    ASLEEP,
    AWAKE,
    CHOOSE,
    DEATH,
    KILLED,
    LOAD,
    SEEN,
    STORE,
    WAIT,
    WAKE,
    Local,
    Process,
    Program,
    Steps,
)


class StuckError(AssertionError):
    """A process waits for an event that never happens."""


class BusyError(AssertionError):
    """A process waits without sleeping."""


State = tuple[Any, ...]
"""The words, then the position of each process."""


@contextmanager
def _unmeasured() -> Iterator[None]:
    """Disable coverage, which would double the time of millions of steps."""
    before = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(before)


class Explorer:
    """``late=False``: stores are visible at once. The kernel compares the lowest ``bits`` of a word."""

    def __init__(
        self, num_words: int, programs: list[Program], steps: Steps, *, late: bool = True, bits: int = 32
    ) -> None:
        self._num_words = num_words
        self._processes = [Process(program, steps, late=late) for program in programs]
        self._late = late
        self._mask = (1 << bits) - 1
        self._calm: set[Any] = set()

    @_unmeasured()
    def explore(self, at_end: Callable[[tuple[int, ...]], None] = lambda words: None) -> int:
        """Returns the number of states. Raises errors of a turn, or of ``at_end``, which gets the final
        words.
        """
        begin = (*(0,) * self._num_words, *(process.start for process in self._processes))
        numbers, came, before = {begin: 0}, [0], [[]]
        todo, ends = deque([begin]), []
        while todo:
            state = todo.popleft()
            number = numbers[state]
            try:
                self._check_calm(state)
                going = False
                for successor, _, how in self._moves(state):
                    known = numbers.setdefault(successor, len(came))
                    if known == len(came):
                        came.append(number)
                        before.append([])
                        todo.append(successor)
                    if how is not AWAKE and how is not KILLED:
                        going = True
                        before[known].append(number)
                if not going:
                    if any(local.node is not None for local in state[self._num_words :]):
                        raise StuckError("no end goes on")
                    at_end(state[: self._num_words])
                    ends.append(number)
            except AssertionError as breach:
                breach.add_note(self._story(list(numbers), came, number))
                raise
        ending = set(ends)
        while ends:
            for number in before[ends.pop()]:
                if number not in ending:
                    ending.add(number)
                    ends.append(number)
        if len(ending) < len(came):
            number = next(number for number in range(len(came)) if number not in ending)
            stuck = StuckError("some go on, and never to the end")
            stuck.add_note(self._story(list(numbers), came, number))
            raise stuck
        return len(came)

    def _moves(self, state: State) -> Iterator[tuple[State, int, str]]:
        first = self._num_words
        for k, process in enumerate(self._processes):
            at: Local = state[first + k]
            if at.buffer:
                word, value = at.buffer[0]
                yield self._with(state, k, process.moved(at, SEEN), word, value), k, SEEN
            if at.node is None:
                continue
            if process.killable:
                yield self._with(state, k, process.moved(at, KILLED)), k, KILLED
            if at.sleeping is not None:
                yield self._with(state, k, process.moved(at, AWAKE)), k, AWAKE
                continue
            what, word, value = at.node[2]
            if what == LOAD:
                yield self._with(state, k, process.answered(at, state[word])), k, what
            elif what == STORE and self._late:
                yield self._with(state, k, process.answered(at)), k, what
            elif what == STORE:
                yield self._with(state, k, process.answered(at), word, value), k, what
            elif what == CHOOSE:
                yield self._with(state, k, process.answered(at, 0)), k, what
                yield self._with(state, k, process.answered(at, 1)), k, what
            elif what == DEATH:
                other: Local = state[first + word]
                if other.node is None and not other.buffer:
                    yield self._with(state, k, process.answered(at, other.dead)), k, what
            elif at.buffer:
                continue
            elif what == WAIT and not (state[word] ^ value) & self._mask:
                yield self._with(state, k, process.moved(at, ASLEEP)), k, what
            elif what == WAKE:
                yield self._woken(self._with(state, k, process.answered(at)), word), k, what
            else:
                yield self._with(state, k, process.answered(at)), k, what

    def _with(self, state: State, k: int, local: Local, word: int | None = None, value: int = 0) -> State:
        changed = list(state)
        changed[self._num_words + k] = local
        if word is not None:
            changed[word] = value
        return tuple(changed)

    def _woken(self, state: State, word: int) -> State:
        for k, process in enumerate(self._processes):
            at: Local = state[self._num_words + k]
            if at.sleeping == word:
                state = self._with(state, k, process.moved(at, AWAKE))
        return state

    def _check_calm(self, state: State) -> None:
        """Check that each process, running alone, reaches a sleep, a wait for a death, or its end."""
        for k, process in enumerate(self._processes):
            words, at = list(state[: self._num_words]), state[self._num_words + k]
            if at.node is None or at.node[1] or at.buffer:
                continue
            passed = set()
            while at.node is not None and at.sleeping is None and at.node[2].what != DEATH:
                here = (*words, at)
                if here in self._calm:
                    break
                if here in passed:
                    raise BusyError(f"{process.name} waits without sleeping")
                passed.add(here)
                at = self._alone(process, words, at)
            self._calm |= passed

    def _alone(self, process: Process, words: list[int], at: Local) -> Local:
        """One step of a process whose stores are visible at once."""
        what, word, value = at.node[2]
        if at.buffer:
            word, value = at.buffer[0]
            words[word] = value
            return process.moved(at, SEEN)
        if what == LOAD:
            return process.answered(at, words[word])
        if what == WAIT and not (words[word] ^ value) & self._mask:
            return process.moved(at, ASLEEP)
        if what == STORE and not self._late:
            words[word] = value
        return process.answered(at)

    def _story(self, states: list[State], came: list[int], number: int) -> str:
        """The shortest sequence of steps to the failure, as text."""
        path = [number]
        while path[-1]:
            path.append(came[path[-1]])
        path.reverse()
        lines = [self._told(states[one], states[next_one]) for one, next_one in pairwise(path)]
        return "\n".join([*lines, f"words: {states[number][: self._num_words]}"])

    def _told(self, state: State, successor: State) -> str:
        k, how = next((k, how) for following, k, how in self._moves(state) if following == successor)
        at: Local = state[self._num_words + k]
        if how == SEEN:
            return f"{self._processes[k].name} {how} {at.buffer[0]}"
        if how in (AWAKE, KILLED):
            return f"{self._processes[k].name} {how}"
        _, word, value = at.node[2]
        return f"{self._processes[k].name}: {how} {word}, {state[word] if how == LOAD else value}"
