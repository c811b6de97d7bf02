"""The processes of an explorer: real code, run again up to each of its memory accesses.

Their memory is a recording: it stops the code at the first access without a recorded answer. The explorer
then runs the code again from the beginning of its turn, with one more answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

LOAD, STORE, FENCE, WAIT, WAKE = "load", "store", "fence", "wait", "wake"
CHOOSE, DEATH = "choose", "death"
ASLEEP, AWAKE, SEEN, KILLED = (
    "falls asleep",
    "wakes up without a reason",
    "is seen to have stored",
    "is killed",
)


class Op(NamedTuple):
    what: str
    word: int = 0
    value: int = 0


class _Stopped(BaseException):
    pass


class Recording:
    """A memory that returns recorded answers, and stops at the first access without one."""

    def __init__(self, answers: tuple[int, ...]) -> None:
        self._answers = answers
        self._at = 0
        self.asked: Op | None = None
        self.words = self

    def __getitem__(self, word: int) -> int:
        return self._access(Op(LOAD, word))

    def __setitem__(self, word: int, value: int) -> None:
        self._access(Op(STORE, word, value))

    def fence(self) -> None:
        self._access(Op(FENCE))

    def wait(self, word: int, seen: int, seconds: float | None) -> None:
        self._access(Op(WAIT, word, seen))

    def wake(self, word: int) -> None:
        self._access(Op(WAKE, word))

    def choose(self) -> bool:
        """The explorer tries both results."""
        return bool(self._access(Op(CHOOSE)))

    def death(self, process: int) -> bool:
        """Returns, when that process has ended and all its stores are visible, whether it was killed."""
        return bool(self._access(Op(DEATH, process)))

    def _access(self, op: Op) -> int:
        if self.asked is None and self._at < len(self._answers):
            self._at += 1
            return self._answers[self._at - 1]
        if self.asked is None:
            self.asked = op
        raise _Stopped


Turn = Callable[[Any, Any], Hashable]
"""One turn of a process: from a state to the next, by accesses of a memory; ``None`` at its end."""


class Program(NamedTuple):
    name: str
    turn: Turn
    start: Hashable = 0
    killable: bool = False


class Local:
    """The position of one process: its next access, its store buffer, and the word it sleeps on."""

    __slots__ = ("answered", "buffer", "dead", "moved", "node", "sleeping")

    def __init__(
        self, node: Any, buffer: tuple[tuple[int, int], ...], sleeping: int | None, dead: bool
    ) -> None:
        self.node = node
        self.buffer = buffer
        self.sleeping = sleeping
        self.dead = dead
        self.answered: dict[int, Local] = {}
        self.moved: dict[str, Local] = {}


class Process:
    """All positions of one process. A node is (state, answers so far, next access)."""

    def __init__(self, program: Program, *, late: bool) -> None:
        self.name, self._turn, self.killable = program.name, program.turn, program.killable
        self._late = late
        self._locals: dict[Any, Local] = {}
        self.start = self._local(self._settle(program.start, ()))

    def answered(self, at: Local, answer: int = 0) -> Local:
        """The position after the next access."""
        if answer not in at.answered:
            at.answered[answer] = self._local(
                self._following(at.node, answer), self._stored(at.node, at.buffer)
            )
        return at.answered[answer]

    def moved(self, at: Local, how: str) -> Local:
        """The position after another event."""
        if how not in at.moved:
            if how == ASLEEP:
                to = self._local(self._following(at.node, 0), (), at.node[2].word)
            elif how == AWAKE:
                to = self._local(at.node, at.buffer)
            elif how == SEEN:
                to = self._local(at.node, at.buffer[1:], at.sleeping, at.dead)
            else:
                to = self._local(None, at.buffer, None, True)
            at.moved[how] = to
        return at.moved[how]

    def _local(
        self,
        node: Any,
        buffer: tuple[tuple[int, int], ...] = (),
        sleeping: int | None = None,
        dead: bool = False,
    ) -> Local:
        """Accesses that other processes cannot observe happen at once: their order does not matter."""
        while node is not None and sleeping is None:
            what, word, _ = node[2]
            own = dict(buffer)
            if what == LOAD and word in own:
                node = self._following(node, own[word])
            elif what == STORE and self._late and not self.killable:
                node, buffer = self._following(node, 0), self._stored(node, buffer)
            elif what == FENCE and not buffer:
                node = self._following(node, 0)
            else:
                break
        key = node, buffer, sleeping, dead
        if key not in self._locals:
            self._locals[key] = Local(*key)
        return self._locals[key]

    def _stored(self, node: Any, buffer: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        what, word, value = node[2]
        return (*buffer, (word, value)) if what == STORE and self._late else buffer

    def _following(self, node: Any, answer: int) -> Any:
        state, answers, _ = node
        return self._settle(state, (*answers, answer))

    def _settle(self, state: Hashable, answers: tuple[int, ...]) -> Any:
        while state is not None:
            memory = Recording(answers)
            try:
                state, answers = self._turn(state, memory), ()
            except _Stopped:
                return state, answers, memory.asked
        return None
