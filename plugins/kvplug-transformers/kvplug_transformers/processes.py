"""Processes that answer commands. Each command and each event is one line of JSON.

:class:`Processes` is the end of the program that starts them, :class:`Parent` the end in the process. A
process receives one command at a time, on its stdin. It may report progress, on its stdout, and then answers.
Both are the same socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import attrs

from kvplug import KvplugError, PeerGoneError, TimeoutError
from kvplug.transport import peer_text

Event = dict[str, Any]
"""``"event"`` is its kind: the command that it answers, a kind of progress, or ``"error"``."""

_ENVIRONMENT = {
    # Threads that spin while they wait are fast on an idle machine. On a busy one, where the thread they wait
    # for is not running, they are ten times slower than threads that sleep.
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
_TICK_S = 0.5
_VERDICT_S = 1.0
"""How long to look for the process at fault, once another one has failed because of it."""
_STOP_S = 10.0
"""How long a process may take to end after "stop"."""
_LAST_BYTES = 8192
"""How much of the end of its stderr is in the error of a process that has ended."""
_OF_OTHERS = ("PeerGoneError", "TimeoutError", "TransportError")
"""Errors of a process whose cause may be another process."""
_PR_SET_PDEATHSIG = 1


def command_of(module: str) -> tuple[str, ...]:
    """The command line of a Python module. It imports no modules from the current folder."""
    return (sys.executable, "-P", "-m", module)


class ProcessError(KvplugError):
    """A process has reported an error. The message names the process and its pid, and has that error."""


@attrs.define(eq=False)
class _Process:
    name: str
    popen: subprocess.Popen[bytes]
    wire: socket.socket
    stderr: IO[bytes] | None
    """``None``: it is shown."""
    rest: bytes = b""
    """The beginning of an event that has not wholly arrived."""
    silent_s: float = 0.0
    """Counted in ticks, so that time in which this program did not run does not count."""
    answers: deque[Event] = attrs.field(factory=deque)
    error: Event | None = None
    """The error that it has reported; it ends after that."""
    end: KvplugError | None = None
    """How it has ended."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.popen.pid})"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped it. False if the system does not report this."""
        try:
            stat = Path(f"/proc/{self.popen.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    def stopped(self) -> KvplugError:
        """The error of a process that is stopped."""
        return TimeoutError(f"{self} is stopped (SIGCONT resumes it)")

    def failed(self) -> KvplugError:
        """The error of a process that has reported an error, or ended without one."""
        if self.error is not None:
            return ProcessError(f"{self} failed: {self.error['text']}")
        code = self.popen.returncode
        try:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        except ValueError:
            how = f"was killed by signal {-code}"
        output = ""
        if code >= 0 and self.stderr is not None:
            begin = max(0, self.stderr.seek(0, os.SEEK_END) - _LAST_BYTES)
            last = os.pread(self.stderr.fileno(), _LAST_BYTES, begin)
            output = last.decode(errors="replace").strip()
        return PeerGoneError(f"{self} {how}" + (f":\n{output}" if output else ""))

    def wait_for_end(self) -> None:
        """Wait for its exit status; kill it if this takes long."""
        try:
            self.popen.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


class Processes:
    """Starts processes, asks them, notices how they end, and ends them.

    One thread calls it, the main thread: on Linux a process is killed when the *thread* that started it ends.

    A call that waits for an answer raises:

    - ``PeerGoneError``: the process has ended; with the last lines of its stderr;
    - ``ProcessError``: it has reported an error;
    - ``TimeoutError``: it is stopped, or has reported nothing for ``patience_s``.

    Each names the process and its pid.
    """

    def __init__(
        self,
        *,
        patience_s: float,
        advice: str,
        show: Callable[[str, Event], object] = lambda name, event: None,
    ) -> None:
        """
        Args:
            patience_s: how long a process may report nothing while its answer is awaited.
            advice: what to do on a slow machine; the end of a sentence.
            show: receives each event, with the name of the process.
        """
        self._patience_s = patience_s
        self._advice = advice
        self._show = show
        self._processes: dict[str, _Process] = {}

    def start(self, name: str, argv: Sequence[str]) -> None:
        """Start one process; its name is added to its arguments. It waits for its first command.

        Its stderr, which includes the log, is in the error if it ends; with ``KVPLUG_LOG`` it is shown.
        """
        ours, theirs = socket.socketpair()
        shows = bool(os.environ.get("KVPLUG_LOG", "").strip())
        stderr = None if shows else tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        with theirs:
            popen = subprocess.Popen(
                [*argv, name],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=stderr,
                env={**_ENVIRONMENT, **os.environ},
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        ours.settimeout(self._patience_s + 1)  # a stopped process does not read a long command
        self._processes[name] = _Process(name, popen, ours, stderr)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, in the order of their start."""
        return tuple(process.popen.pid for process in self._processes.values())

    def send(self, name: str, op: str, **arguments: Any) -> None:
        """Send one command. A dead process does not receive it: waiting for its answer raises.

        Raises:
            TimeoutError: the process does not read.
        """
        process = self._processes[name]
        try:
            process.wire.sendall((json.dumps({"op": op, **arguments}) + "\n").encode())
        except ConnectionError:
            pass
        except OSError as e:  # the time is up
            raise self._silence([process]) from e

    def answers(self, *names: str) -> list[Event]:
        """Wait until each of these has answered; returns the answers in that order.

        Raises:
            The errors of the class.
        """
        processes = [self._processes[name] for name in names]
        for process in processes:
            process.silent_s = 0.0
        while awaited := [process for process in processes if not process.answers]:
            if any(process.end for process in awaited):
                raise self.fault(*names) or AssertionError("a process has ended")
            if self._receive(_TICK_S):
                continue
            for process in awaited:
                process.silent_s += _TICK_S
            if late := [process for process in awaited if process.silent_s >= self._patience_s]:
                raise self._silence(late)
        return [process.answers.popleft() for process in processes]

    def ask(self, name: str, op: str, **arguments: Any) -> Event:
        """Send one command, and wait for its answer. Raises the errors of the class."""
        self.send(name, op, **arguments)
        return self.answers(name)[0]

    def has_ended(self, *names: str) -> bool:
        """Whether one of these, or of all, has ended. Costs little."""
        while self._receive(0):
            pass
        return any(self._processes[name].end for name in names or self._processes)

    def wait_for_end(self, name: str) -> KvplugError:
        """Wait without a limit until this process ends by itself; returns its error."""
        while (end := self._processes[name].end) is None:
            self._receive(None)
        return end

    def fault(self, *names: str) -> KvplugError | None:
        """The error of the process at fault, of these or of all; ``None`` if all seem well.

        A process that ended without an error comes first, then a stopped one, then one whose error does not
        come from another process. This waits a second for such a process; after that, any error counts.
        """
        processes = [self._processes[name] for name in names or self._processes]
        end = time.monotonic() + _VERDICT_S
        self.has_ended()  # handles the events that have arrived
        while True:
            found = (
                *(each.end for each in processes if each.end is not None and each.error is None),
                *(each.stopped() for each in processes if each.is_stopped),
                *(each.failed() for each in processes if each.error and each.error["kind"] not in _OF_OTHERS),
            )
            if found:
                return found[0]
            if not self._receive(max(0.0, end - time.monotonic())):
                return next((each.failed() for each in processes if each.error), None)

    def close(self, *, at_once: bool = False) -> None:
        """End all processes and wait for them: with "stop", or with SIGKILL if ``at_once``. Idempotent."""
        for name, process in self._processes.items():
            if at_once:
                process.popen.kill()
                continue
            with contextlib.suppress(TimeoutError):
                self.send(name, "stop")
        for process in self._processes.values():
            process.wait_for_end()
            process.wire.close()
            if process.stderr is not None:
                process.stderr.close()
        self._processes.clear()

    def _receive(self, timeout: float | None) -> bool:
        """Handle what processes report, and how they end; false if nothing arrived in time."""
        alive = {process.wire: process for process in self._processes.values() if process.end is None}
        ready = select.select(alive, (), (), timeout)[0]
        for wire in ready:
            process = alive[wire]
            process.silent_s = 0.0
            try:
                data = wire.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                process.wait_for_end()
                process.end = process.failed()
            *lines, process.rest = (process.rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b'{"event": '):  # else a library has printed it
                    self._handle(process, json.loads(line))
        return bool(ready)

    def _handle(self, process: _Process, event: Event) -> None:
        if event["event"] == "error":
            process.error = event
        elif event.pop("is_answer", False):
            process.answers.append(event)
        self._show(process.name, event)

    def _silence(self, processes: Sequence[_Process]) -> KvplugError:
        if stopped := [process for process in processes if process.is_stopped]:
            return stopped[0].stopped()
        return TimeoutError(
            f"{', '.join(map(str, processes))} reported nothing for {self._patience_s:.0f} s; on a slow"
            f" machine, or for a large model, {self._advice}"
        )


class _Printable(logging.Formatter):
    """Replaces control characters: text of peers can be logged."""

    def format(self, record: logging.LogRecord) -> str:
        return peer_text(super().format(record), keep_lines=True)


class Parent:
    """The program that has started this process.

    This process dies with it: on Linux the kernel kills it, even while it computes or is stopped. Elsewhere,
    and if the parent died before this was set up, it ends at the end of stdin. Stdout of libraries is
    redirected to stderr, so that it does not mix with the events.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        self._commands = os.fdopen(os.dup(0), encoding="utf-8")
        self._events = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        # Programs that inherit stdin and stdout do not keep the socket open.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        if given := os.environ.get("KVPLUG_LOG", "").strip().upper():  # the command line has checked it
            levels = {word.strip() for word in given.split(",")} - {"JSON", ""}  # the lines get a prefix
            handler = logging.StreamHandler()
            handler.setFormatter(
                _Printable(f"{sys.argv[-1]}: %(asctime)s %(levelname)s %(name)s: %(message)s")
            )
            logging.basicConfig(level=(*levels, "INFO")[0], handlers=[handler])

    def report(self, event: str, **facts: Any) -> None:
        """Send one event. Ends this process if the parent no longer reads."""
        try:
            self._events.write(json.dumps({"event": event, **facts}) + "\n")
        except ConnectionError:
            os._exit(1)

    def commands(self, idle: Callable[[], object] = lambda: None) -> Iterator[Event]:
        """Yield each command until the parent sends "stop" or is gone. ``idle`` is called every half second
        without a command.
        """
        while True:
            while not select.select([self._commands], [], [], _TICK_S)[0]:
                idle()
            line = self._commands.readline()
            if not line or (command := json.loads(line))["op"] == "stop":
                return
            yield command

    def run(self, work: Callable[[contextlib.ExitStack], None]) -> NoReturn:
        """Call ``work``, report its failure, close what it has put on the stack, and end this process."""
        status = 1
        with contextlib.ExitStack() as stack:
            try:
                work(stack)
                status = 0
            except Exception as e:
                text = str(e)
                if not isinstance(e, (KvplugError, ValueError, OSError)):
                    traceback.print_exc()
                    text = f"{type(e).__name__}: {e}"
                self.report("error", kind=type(e).__name__, text=text)
        sys.stderr.flush()
        os._exit(status)  # everything is shut down; the interpreter's own shutdown only takes longer
