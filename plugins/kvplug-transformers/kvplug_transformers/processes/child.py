"""The parent's side of its workers: starts them, reads their events, and ends all of them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from kvplug.transport import peer_text

Event = tuple[str, dict[str, Any]]
"""A worker's name and an event of it."""

_ENVIRONMENT = {
    # Threads that spin while they wait are fast on an idle machine. On a busy one, where the thread they wait
    # for is not running, they are ten times slower than threads that sleep.
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


class Child:
    """One worker process. Its events go into a queue that all workers share.

    Its last event is ``exit``. Start children from the main thread only: on Linux a child is
    killed when the *thread* that started it ends.
    """

    def __init__(self, name: str, argv: Sequence[str], events: queue.SimpleQueue[Event]) -> None:
        self.name = name
        self._events = events
        self._stderr: deque[str] = deque(maxlen=40)
        self._logs = bool(os.environ.get("KVPLUG_LOG", "").strip())
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**_ENVIRONMENT, **os.environ},
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._commands: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, args=(stream,), name=f"kvplug-demo-{name}", daemon=True)
            for target, stream in (
                (self._keep_stderr, self._process.stderr),  # the next thread waits for its end
                (self._read_events, self._process.stdout),
                (self._write_commands, self._process.stdin),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_output(self) -> str:
        """The last lines that it wrote to stderr."""
        return "".join(self._stderr).strip()

    def send(self, op: str, **arguments: Any) -> None:
        """Send one command, without waiting. A dead worker does not receive it, and reports ``exit``
        instead.
        """
        self._commands.put(json.dumps({"op": op, **arguments}) + "\n")

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped it. False if the system does not report this."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    def kill(self) -> None:
        self._process.kill()

    def _read_events(self, stream: IO[str]) -> None:
        for line in stream:
            try:
                event = json.loads(line)
            except ValueError:
                self._stderr.append(line)  # from a library, before the worker redirected stdout
            else:
                self._events.put((self.name, event))
        stream.close()
        code = self._process.wait()
        self._threads[0].join()  # the rest of its stderr
        self._events.put((self.name, {"event": "exit", "code": code}))

    def _keep_stderr(self, stream: IO[str]) -> None:
        """Keep the last lines of the worker's stderr, which include its log; with ``KVPLUG_LOG``, show all
        lines.
        """
        for line in stream:
            self._stderr.append(line)
            if self._logs:
                with contextlib.suppress(OSError):  # our stderr is closed: the worker continues
                    sys.stderr.write(peer_text(f"{self.name}: {line}", keep_lines=True))
        stream.close()

    def _write_commands(self, stream: IO[str]) -> None:
        """Runs in its own thread, since a worker that does not read blocks the writer forever."""
        try:
            while (line := self._commands.get()) is not None:
                stream.write(line)
                stream.flush()
        except BrokenPipeError:
            pass
        try:
            stream.close()
        except BrokenPipeError:
            pass  # the worker did not read a command

    def end(self, *, at_once: bool, patience_s: float = 10.0) -> None:
        """End it and wait for its exit: first with "stop", or with SIGKILL if ``at_once``."""
        if at_once:
            self.kill()
        else:
            self.send("stop")
        try:
            self._process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self._commands.put(None)
        for thread in self._threads:
            thread.join()


def end_all(children: Iterable[Child], *, at_once: bool) -> None:
    """End all of them, in parallel."""
    children = list(children)
    for child in children:
        child.kill() if at_once else child.send("stop")
    for child in children:
        child.end(at_once=at_once)


def describe_exit(code: int) -> str:
    """A return code as text."""
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with status {code}"
