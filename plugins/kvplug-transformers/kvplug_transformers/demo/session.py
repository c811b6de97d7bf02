"""The workers of one demo, as long as it lasts: told what to do, listened to, and ended."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvplug_transformers.demo.display import Display
from kvplug_transformers.demo.processes import REFERENCE, WORKER, Child, Event, end_all, how_it_ended

PREFILL, DECODE, ALONE, CONVERT = "prefill", "decode", "reference", "convert"

_TICK_S = 0.5
_NOTE_AFTER_S = 60.0
"""Of silence: the person is told who is waited for."""


class DemoError(Exception):
    """The demo cannot go on. The text is for the person in front of it."""


class WorkerLostError(DemoError):
    """A worker ended before it said what was waited for."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self.why = why
        super().__init__(f"the {name} process {why}")


class WorkerSilentError(DemoError):
    """A worker is there and reports nothing."""


class Session:
    """The workers of one demo. Leaving it ends them: politely after success, at once otherwise.

    A worker that is waited for and reports nothing for ``patience_s`` ends the demo. They report each step
    of a prompt and each token, so the longest honest silence is that of loading a large model.
    """

    def __init__(
        self, display: Display, programs: Mapping[str, Sequence[str]] | None = None, *, patience_s: float
    ) -> None:
        self._display = display
        self._programs = {ALONE: REFERENCE, **(programs or {})}
        self._patience_s = patience_s
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._children: dict[str, Child] = {}
        self._said: dict[tuple[str, str], dict[str, Any]] = {}
        self._silent_s: dict[str, float] = {}
        self.lost: dict[str, str] = {}
        """Workers that have ended, and how."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        end_all(self._children.values(), at_once=kind is not None)

    def start(self, name: str) -> Child:
        """Start one worker. It waits for its first command."""
        self._children[name] = Child(name, self._programs.get(name, WORKER), self._events)
        return self._children[name]

    def kill(self, name: str) -> None:
        """End one worker at once, and see it gone."""
        self._children[name].end(at_once=True)

    def tell(self, name: str, op: str, **arguments: Any) -> None:
        self._children[name].send(op, **arguments)

    def wait_for(self, *wanted: tuple[str, str], while_alive: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Until each of these (worker, event) has come; what they said, in that order.

        Raises:
            WorkerLostError: one of these workers, or of ``while_alive``, ended first.
            WorkerSilentError: one of these workers has reported nothing for too long.
        """
        self._silent_s = {}
        while not all(key in self._said for key in wanted):
            missing = {name for name, event in wanted if (name, event) not in self._said}
            for name in self.lost.keys() & {*missing, *while_alive}:
                raise WorkerLostError(name, self.lost[name])
            self._listen(missing)
        return [self._said.pop(key) for key in wanted]

    def wait_for_end(self, name: str) -> None:
        """Until this worker ends by itself, however long that takes."""
        while name not in self.lost:
            self._hear(*self._events.get())

    def _listen(self, awaited: set[str]) -> None:
        """Hear the next event, or a moment of silence."""
        began = time.monotonic()
        try:
            speaker, event = self._events.get(timeout=_TICK_S)
        except queue.Empty:
            speaker = ""
        # No more than a tick or so at once: of the hours in which this process itself was stopped, or the
        # machine asleep, nobody could have heard anything.
        passed = min(time.monotonic() - began, 2 * _TICK_S)
        for name in awaited:
            self._be_silent(name, passed)
        if speaker:
            self._silent_s[speaker] = 0.0
            self._hear(speaker, event)
            return
        if any(self._silent_s[name] >= self._patience_s for name in awaited):
            # A stopped one first: the others may be waiting for it.
            name = min(awaited, key=lambda name: (not self._children[name].is_stopped, -self._silent_s[name]))
            state = " and is stopped (SIGCONT lets it go on)" if self._children[name].is_stopped else ""
            raise WorkerSilentError(
                f"the {name} process has reported nothing for {self._silent_s[name]:.0f} s{state}; on a slow"
                " machine, or for a large model, give it longer with --patience"
            )

    def _be_silent(self, name: str, seconds: float) -> None:
        before = self._silent_s.get(name, 0.0)
        self._silent_s[name] = before + seconds
        if before < _NOTE_AFTER_S <= self._silent_s[name] < self._patience_s:
            self._display.note(
                f"the {name} process has reported nothing for {_NOTE_AFTER_S:.0f} s; it is given"
                f" {self._patience_s:.0f} s"
            )

    def _hear(self, name: str, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "exit":
            said = self._said.get((name, "error"))
            words = self._children[name].last_words
            why = how_it_ended(event["code"]) + (f":\n{words}" if words else "")
            self.lost[name] = f"gave up: {said['text']}" if said else why
        else:
            self._said[name, kind] = event
            self._display.hear(name, event)
