"""Measuring processes: each runs one function, and exchanges plain values with the process that started it.

Values cross a socket pair in kvplug's wire format. A measuring process ends when its time is up, after it has
written the stacks of its threads, and when the process that started it is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from typing import IO, Any, Self

from kvplug.errors import KvplugError
from kvplug.net.wire import decode, encode
from kvplug.transport.spec import load_target

SETTLE_S = 1.0
"""How long to wait for processes to end after one of them has failed."""
_SIZE = struct.Struct("<Q")
_VALUE, _RETURNED, _RAISED = "value", "returned", "raised"


class EndError(KvplugError):
    """A measuring process raised, died or did not answer in time. ``kind`` is the class of its error."""

    def __init__(self, message: str, kind: str = "") -> None:
        self.kind = kind
        super().__init__(message)


class _Wire:
    """Values with a length prefix, in both directions. One thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, value: Any) -> None:
        data = encode(value)
        with self._lock:
            self._sock.sendall(_SIZE.pack(len(data)) + data)

    def recv(self) -> Any:
        """Raises EOFError: the other process is gone."""
        (size,) = _SIZE.unpack(self._read(_SIZE.size))
        return decode(self._read(size))

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                chunk = self._sock.recv(size - len(data))
            except ConnectionError as e:
                raise EOFError from e
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)

    def close(self) -> None:
        self._sock.close()


class MeasuringProcess:
    """A started process, as seen by its parent. Leaving the ``with`` block kills it."""

    def __init__(
        self,
        target: str,
        task: Mapping[str, Any],
        *,
        life_s: float,
        wait_s: float,
        env: Mapping[str, str],
        python: str,
    ) -> None:
        """Run ``target``, ``"package.module:function"``, with a :class:`Parent` and the task.

        Args:
            life_s: its time limit.
            wait_s: how long :meth:`recv` waits.
            env: added to the environment of this process.
            python: the interpreter.

        Raises:
            EndError: it has ended already. OSError: it cannot be started. Nothing is left then.
        """
        boot = f"from {__name__} import main; main()"
        with contextlib.ExitStack() as stack:
            ours, theirs = map(stack.enter_context, socket.socketpair())
            ours.settimeout(wait_s)
            self._wire = _Wire(ours)
            self._stderr: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                [python, "-P", "-c", boot, str(theirs.fileno()), str(life_s)],
                stdin=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **env},
            )
            theirs.close()
            stack.callback(self.close)
            self.send([target, dict(task)])
            stack.pop_all()

    @property
    def exit_code(self) -> int | None:
        """``None`` while it runs; negative if a signal killed it."""
        return self._process.poll()

    def send(self, value: Any) -> None:
        """Send a value, which the process's :meth:`Parent.recv` returns. Raises EndError: it has ended."""
        try:
            self._wire.send(value)
        except OSError as e:
            raise self._end_error() from e

    def recv(self) -> Any:
        """The next value from it. Raises EndError: it raised, ended, or sent nothing in time."""
        return self._next(_VALUE)

    def wait_until_returned(self) -> None:
        """Wait until its function has returned. Raises EndError: as :meth:`recv`."""
        self._next(_RETURNED)

    def close(self) -> None:
        """Kill it if it still runs."""
        self._process.kill()
        self._process.wait()
        self._wire.close()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, wanted: str) -> Any:
        try:
            kind, value = self._wire.recv()
        except (EOFError, TimeoutError) as e:
            raise self._end_error() from e
        if kind == _RAISED:
            name, text = value
            raise EndError(f"{name} in process {self._process.pid}:\n{text}", name)
        assert kind == wanted, f"{kind} of process {self._process.pid}, where {wanted} was expected"
        return value

    def _end_error(self) -> EndError:
        """The error of a process that no longer communicates: how it ended, and its stderr."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SETTLE_S)
        code = self.exit_code
        if code is None:
            end = "did not answer in time"
        elif code < 0:
            end = f"was killed by {signal.Signals(-code).name}"
        else:
            end = f"ended with exit code {code}"
        size = os.fstat(self._stderr.fileno()).st_size
        written = os.pread(self._stderr.fileno(), size, 0).decode("utf-8", "replace")
        return EndError(f"process {self._process.pid} {end}\n{written}")


class Parent:
    """The parent process, as seen by the function that measures."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire
        self._values: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="kvplug bench parent", daemon=True).start()

    def send(self, value: Any) -> None:
        """Send a value, which :meth:`MeasuringProcess.recv` returns."""
        self._wire.send([_VALUE, value])

    def recv(self, timeout: float) -> Any:
        """The next value that the parent sent. Raises TimeoutError."""
        try:
            return self._values.get(timeout=timeout)
        except queue.Empty as e:
            raise TimeoutError(f"no value from the parent in {timeout} s") from e

    def _listen(self) -> None:
        try:
            while True:
                self._values.put(self._wire.recv())
        except EOFError:
            os._exit(1)


def main() -> None:
    """The program of a measuring process. Its arguments are a descriptor and the time limit in seconds."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
    wire = _Wire(socket.socket(fileno=int(sys.argv[1])))
    target, task = wire.recv()
    parent = Parent(wire)
    try:
        load_target(target)(parent, task)
        answer: list[Any] = [_RETURNED, None]
    except BaseException as e:
        answer = [_RAISED, [type(e).__name__, traceback.format_exc()]]
    faulthandler.cancel_dump_traceback_later()
    wire.send(answer)
