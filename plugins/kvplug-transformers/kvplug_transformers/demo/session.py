"""The workers of one demo: sends them commands, collects their events, and ends them."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvplug_transformers.demo.display import Display
from kvplug_transformers.processes.child import Child, Event, describe_exit, end_all

WORKER_COMMAND = (sys.executable, "-P", "-m", "kvplug_transformers.demo.worker")
# -P: do not import modules from the current folder.
REFERENCE_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("reference.py")))

PREFILL, DECODE, REFERENCE, CONVERT = "prefill", "decode", "reference", "convert"

_TICK_S = 0.5
_NOTE_AFTER_S = 60.0
"""After this silence, a note names the worker that the demo waits for."""


class DemoError(Exception):
    """The demo cannot continue. The message is for its user."""


class WorkerLostError(DemoError):
    """A worker ended before it sent the event that the demo waits for."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self.why = why
        super().__init__(f"the {name} process {why}")


class WorkerSilentError(DemoError):
    """A worker is alive and reports nothing."""


class Session:
    """The workers of one demo. On exit it ends them: with "stop" after success, otherwise with SIGKILL.

    The demo ends if a worker that it waits for reports nothing for ``patience_s``. Workers report each step
    of a prompt and each token, so their longest regular silence is that of loading a large model.
    """

    def __init__(
        self, display: Display, programs: Mapping[str, Sequence[str]] | None = None, *, patience_s: float
    ) -> None:
        self._display = display
        self._programs = {REFERENCE: REFERENCE_COMMAND, **(programs or {})}
        self._patience_s = patience_s
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._children: dict[str, Child] = {}
        self._received: dict[tuple[str, str], dict[str, Any]] = {}
        self._silent_s: dict[str, float] = {}
        self.lost: dict[str, str] = {}
        """How workers have ended, by name."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        end_all(self._children.values(), at_once=kind is not None)

    def start(self, name: str) -> Child:
        """Start one worker. It waits for its first command."""
        self._children[name] = Child(name, self._programs.get(name, WORKER_COMMAND), self._events)
        return self._children[name]

    def kill(self, name: str) -> None:
        """End one worker at once, and wait for its exit."""
        self._children[name].end(at_once=True)

    def send(self, name: str, op: str, **arguments: Any) -> None:
        self._children[name].send(op, **arguments)

    def wait_for(self, *wanted: tuple[str, str], while_alive: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Wait until each of these (worker, event) has arrived; returns the events in that order.

        Raises:
            WorkerLostError: one of these workers, or of ``while_alive``, ended first.
            WorkerSilentError: one of these workers has reported nothing for too long.
        """
        self._silent_s = {}
        while not all(key in self._received for key in wanted):
            missing = {name for name, event in wanted if (name, event) not in self._received}
            for name in self.lost.keys() & {*missing, *while_alive}:
                raise WorkerLostError(name, self.lost[name])
            self._listen(missing)
        return [self._received.pop(key) for key in wanted]

    def wait_for_end(self, name: str) -> None:
        """Wait without a limit until this worker ends by itself."""
        while name not in self.lost:
            self._handle(*self._events.get())

    def _listen(self, awaited: set[str]) -> None:
        """Handle the next event, or record that none arrived for a short time."""
        began = time.monotonic()
        try:
            speaker, event = self._events.get(timeout=_TICK_S)
        except queue.Empty:
            speaker = ""
        # At most two ticks at once: while this process was stopped, or the machine asleep, it could not
        # receive events.
        passed = min(time.monotonic() - began, 2 * _TICK_S)
        for name in awaited:
            self._add_silence(name, passed)
        if speaker:
            self._silent_s[speaker] = 0.0
            self._handle(speaker, event)
            return
        if any(self._silent_s[name] >= self._patience_s for name in awaited):
            # Name a stopped worker first: the others may be waiting for it.
            name = min(awaited, key=lambda name: (not self._children[name].is_stopped, -self._silent_s[name]))
            state = " and is stopped (SIGCONT resumes it)" if self._children[name].is_stopped else ""
            raise WorkerSilentError(
                f"the {name} process has reported nothing for {self._silent_s[name]:.0f} s{state}; on a slow"
                " machine, or for a large model, give it longer with --patience"
            )

    def _add_silence(self, name: str, seconds: float) -> None:
        before = self._silent_s.get(name, 0.0)
        self._silent_s[name] = before + seconds
        if before < _NOTE_AFTER_S <= self._silent_s[name] < self._patience_s:
            self._display.note(
                f"the {name} process has reported nothing for {_NOTE_AFTER_S:.0f} s; it is given"
                f" {self._patience_s:.0f} s"
            )

    def _handle(self, name: str, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "exit":
            error = self._received.get((name, "error"))
            words = self._children[name].last_output
            why = describe_exit(event["code"]) + (f":\n{words}" if words else "")
            self.lost[name] = f"gave up: {error['text']}" if error else why
        else:
            self._received[name, kind] = event
            self._display.show(name, event)
