"""The processes of an explorer: the compiled steps, run again up to each of their memory accesses.

Their memory is a recording: it stops the code at the first access without a recorded answer. The explorer
then runs the code again from the beginning of its turn, with one more answer.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

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


STEPS = (
    *("publish", "release", "end_writing", "end_reading", "evict", "evict_writer", "evicted", "room"),
    *("available", "poll_room", "poll_units", "publish_behind", "arrived_next"),
)
"""In the order of ring_explored.c."""
_OPS = (LOAD, STORE, FENCE, WAIT, WAKE)
_STOPPED = -(2**63)


class _Access(ctypes.Structure):
    _fields_ = (("what", ctypes.c_int64), ("word", ctypes.c_int64), ("value", ctypes.c_uint64))


class Steps:
    """The compiled steps of ring.c, whose accesses are a recording's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._explored = library.explored
        self._num_used = ctypes.c_int64.in_dll(library, "explored_answers")
        self._asked = _Access.in_dll(library, "explored_access")
        self.recording: Recording | None = None
        for number, name in enumerate(STEPS):
            setattr(self, name, functools.partial(self._call, number))

    def _call(self, step: int, end: Any, count: int = 0, _: int = 0, nap_ns: int = 0) -> int:
        recording = self.recording
        assert recording is not None
        left = recording.left()
        given = (ctypes.c_uint64 * len(left))(*left)
        result = int(self._explored(step, end, count, nap_ns, given, len(left)))
        recording.use(self._num_used.value)
        if result == _STOPPED:
            asked = self._asked
            recording.stop(Op(_OPS[asked.what], asked.word, asked.value))
        return result

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., int]: ...


class Recording:
    """Words that return recorded answers, and stop the code at the first access without one."""

    address = 0

    def __init__(self, answers: tuple[int, ...], steps: Steps) -> None:
        self._answers = answers
        self._at = 0
        self.asked: Op | None = None
        self.words = self
        self.steps = steps
        steps.recording = self

    def left(self) -> tuple[int, ...]:
        """Answers that were not used yet."""
        return self._answers[self._at :]

    def use(self, count: int) -> None:
        self._at += count

    def stop(self, op: Op) -> NoReturn:
        self.asked = op
        raise _Stopped

    def check(self) -> None:
        """The memory is not released."""

    def nap_ns(self, seconds: float | None) -> int:
        return 0 if seconds == 0.0 else 1

    def load(self, word: int) -> int:
        return self[word]

    def __getitem__(self, word: int) -> int:
        return self._access(Op(LOAD, word))

    def __setitem__(self, word: int, value: int) -> None:
        self._access(Op(STORE, word, value))

    def choose(self) -> bool:
        """The explorer tries both results."""
        return bool(self._access(Op(CHOOSE)))

    def death(self, process: int) -> bool:
        """Returns, when that process has ended and all its stores are visible, whether it was killed."""
        return bool(self._access(Op(DEATH, process)))

    def _access(self, op: Op) -> int:
        if self._at < len(self._answers):
            self._at += 1
            return self._answers[self._at - 1]
        self.stop(op)


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

    def __init__(self, program: Program, steps: Steps, *, late: bool) -> None:
        self._steps = steps
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
            memory = Recording(answers, self._steps)
            try:
                state, answers = self._turn(state, memory), ()
            except _Stopped:
                return state, answers, memory.asked
        return None
