"""Child processes for tests: run a function in one, exchange values with it, kill it, check for leaks.

The function is at the top level of the test file (or of any module) and takes the :class:`Parent` first::

    def echo(parent, times):
        for _ in range(times):
            parent.send(parent.recv())
        return "done"

    def test_a_child_answers():
        with peers.start(echo, 1) as child:
            child.send({"a": 1})
            assert child.recv() == {"a": 1}
            assert child.result() == "done"

Values cross in kvplug's wire format: plain values only, nothing is pickled. No wait is endless: a wait that
takes too long ends the child, and raises an error with the stacks of *both* processes; a child dumps its
stacks and exits after its time limit. When its parent is gone the kernel kills the child, even if it is
stopped; but not if a thread other than the main one started it, since the kernel would watch that thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from kvplug import KvplugError, PeerGoneError, TimeoutError
from kvplug.net.wire import Limits, decode, encode
from kvplug_testing.resources import Resources
from kvplug_testing.sources import at_source, source_of

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "Resources",
    "ChildError",
    "Parent",
    "Peer",
    "nothing_left",
    "stacks",
    "start",
]

DEFAULT_TIMEOUT_S = 30.0
"""Seconds that a wait takes at most, and that a child lives."""
_LIMITS = Limits()
_SIZE = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
"""Loaded before any fork: a forked child calls it."""


class ChildError(KvplugError):
    """The function in the child raised; the message holds its traceback. ``kind`` is the error's class."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        """Name of the error's class in the child."""
        super().__init__(f"{kind} in the child:\n{text}")


def start(
    target: Callable[..., Any] | str,
    *args: Any,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    env: Mapping[str, str] | None = None,
    python: str = sys.executable,
    flags: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
) -> Peer:
    """Run ``target(parent, *args)`` in a new process.

    ``target`` is a function at the top level of a file, ``"package.module:function"`` or
    ``"/path/to/file.py:function"``. The child imports the file, so code at its top level runs again.
    ``timeout_s`` is the child's time limit: then it dumps its stacks and exits. ``env`` is added to the
    environment of this process. ``flags`` go to the interpreter. The child inherits the descriptors
    ``pass_fds`` with the same numbers.
    """
    if not isinstance(target, str):
        function, target = target, source_of(target)
        if not target:
            raise ValueError(f"{function!r} cannot run in a child: it must be at the top level of a file")
    ours, theirs = socket.socketpair()
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the peer
    is_watched = threading.current_thread() is threading.main_thread()
    boot = f"from kvplug_testing import peers; peers._live({theirs.fileno()}, {timeout_s}, {is_watched})"
    with theirs:
        process = subprocess.Popen(
            [python, *flags, "-c", boot],
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=[theirs.fileno(), *pass_fds],
            env={**os.environ, **(env or {})},
        )
    return Peer(target, args, os.pidfd_open(process.pid), process.wait, ours, stderr)


class Peer:
    """A child process. Leaving the ``with`` block kills it if it still runs."""

    def __init__(
        self,
        target: str,
        args: Sequence[Any],
        pidfd: int,
        reap: Callable[[], int],
        wire: socket.socket,
        stderr: IO[bytes],
    ) -> None:
        """:func:`start` and the fork server call this. ``reap`` returns the exit code of an ended process."""
        self._target = target
        self._pidfd = pidfd
        self._reap = reap
        self._reaping = threading.Lock()
        self._code: int | None = None
        facts = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
        self.pid = int(facts.partition("\nPid:")[2].split()[0])
        """Process id of the child, as this process sees it."""
        self._wire = _Wire(wire)
        self._stderr = stderr
        self._wire.send((target, list(args)))

    def __repr__(self) -> str:
        code = self.exit_code
        return f"<Peer {self._target} pid {self.pid}, {'running' if code is None else end_of(code)}>"

    @property
    def exit_code(self) -> int | None:
        """``None`` while it runs; negative if a signal killed it."""
        self._ends(0.0)
        return self._code

    def _ends(self, within: float | None) -> bool:
        """Whether it has ended, or does so in time."""
        if self._code is None and is_readable(self._pidfd, within):
            with self._reaping:
                if self._code is None:  # only once: afterwards the pid can be reused
                    self._code = self._reap()
        return self._code is not None

    def _signal(self, number: int) -> None:
        if self._code is None:
            signal.pidfd_send_signal(self._pidfd, number)

    @property
    def stderr(self) -> str:
        """What the child has written to stderr so far."""
        end = self._stderr.seek(0, os.SEEK_END)
        return os.pread(self._stderr.fileno(), end, 0).decode("utf-8", "replace")

    def send(self, value: Any) -> None:
        """Send the child a value, which its ``parent.recv()`` returns.

        Raises:
            PeerGoneError: the child has ended.
        """
        try:
            self._wire.send(value)
        except OSError as e:
            raise PeerGoneError(f"{self!r} is gone; it wrote:\n{self.stderr}") from e

    def recv(self, timeout: float | None = DEFAULT_TIMEOUT_S) -> Any:
        """The next value that the child sent with ``parent.send``.

        Raises:
            TimeoutError: no value arrived; the message holds the stacks of both processes. The child is
                killed, unless it is stopped.
            ChildError: the child's function raised.
            PeerGoneError: the child ended without a value or an error.
        """
        return self._next("value", timeout)

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether :meth:`recv` can return or raise at once; waits up to ``timeout`` seconds for that."""
        return self._wire.poll(timeout)

    def result(self, timeout: float | None = DEFAULT_TIMEOUT_S) -> Any:
        """The return value of the child's function. Raises like :meth:`recv`."""
        value = self._next("result", timeout)
        self.wait(timeout)
        return value

    def kill(self) -> None:
        """Send SIGKILL, and wait until the child is gone."""
        self._signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        """Send SIGSTOP, and wait until the child has stopped.

        Raises:
            PeerGoneError: it has ended; what it sent before can still be received.
            TimeoutError: it has not stopped.
        """
        self._signal(signal.SIGSTOP)
        limit = time.monotonic() + DEFAULT_TIMEOUT_S
        while not self._is_stopped():
            if self.exit_code is not None:
                raise PeerGoneError(f"{self!r} cannot be stopped: it has ended; it wrote:\n{self.stderr}")
            if time.monotonic() > limit:
                raise TimeoutError(f"{self!r} does not stop")
            time.sleep(0.001)

    def cont(self) -> None:
        """Send SIGCONT."""
        self._signal(signal.SIGCONT)

    def wait(self, timeout: float | None = DEFAULT_TIMEOUT_S) -> int:
        """Wait until the child ends; returns the exit code.

        Raises:
            TimeoutError: it has not; the message holds the stacks of both processes. The child is killed,
                unless it is stopped.
        """
        if not self._ends(timeout):
            raise TimeoutError(f"{self!r} has not ended\n{self._both_stacks()}")
        assert self._code is not None
        return self._code

    def _both_stacks(self) -> str:
        """The stacks of all threads of both processes, for a report. The child ends, unless it is stopped."""
        if self.exit_code is None and not self._is_stopped():
            self._signal(signal.SIGABRT)  # its faulthandler dumps them
            self._ends(2.0)
        return f"-- this process --\n{stacks()}\n-- {self!r}, which wrote --\n{self.stderr}"

    def _is_stopped(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        return False

    def close(self) -> None:
        """Kill the child if it still runs, reap it, and release its resources. Idempotent."""
        if self._pidfd < 0:
            return
        self._signal(signal.SIGKILL)
        self._ends(None)
        self._wire.close()
        self._stderr.close()
        os.close(self._pidfd)
        self._pidfd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, wanted: str, timeout: float | None) -> Any:
        try:
            kind, value = self._wire.recv(timeout)
        except EOFError as e:
            self._ends(2.0)
            raise PeerGoneError(f"{self!r} ended without a result; it wrote:\n{self.stderr}") from e
        except TimeoutError as e:
            raise TimeoutError(f"no {wanted} from {self!r} in {timeout} s\n{self._both_stacks()}") from e
        if kind == "error":
            raise ChildError(*value)
        assert kind == wanted, f"{self!r} gave a {kind} ({value!r}) where a {wanted} was expected"
        return value


class Parent:
    """The child's connection to the process that started it."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire

    def send(self, value: Any) -> None:
        """Send the parent a value, which its ``recv()`` returns."""
        self._wire.send(("value", value))

    def recv(self, timeout: float | None = DEFAULT_TIMEOUT_S) -> Any:
        """The next value the parent sent.

        Raises:
            TimeoutError: it has sent none.
            EOFError: it is gone.
        """
        return self._wire.recv(timeout)

    def poll(self) -> bool:
        """Whether a value of the parent has come that ``recv()`` returns at once."""
        return self._wire.poll(0.0)

    def leave(self, code: int) -> NoReturn:
        """Leave the program as ``sys.exit(code)`` does, but out of functions and ``with`` blocks."""
        faulthandler.cancel_dump_traceback_later()
        ctypes.pythonapi["Py_Exit"](code)
        raise AssertionError("Py_Exit has returned")

    def disown(self) -> None:
        """Close this connection in a forked child of the child, which must not use it."""
        self._wire.close()


class _Wire:
    """Values with a length prefix over a socket. Threads may send at the same time; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def send(self, value: Any) -> None:
        data = encode(value, limits=_LIMITS)
        with self._sending:
            self._socket.sendall(_SIZE.pack(len(data)) + data)

    def recv(self, timeout: float | None) -> Any:
        if not self.poll(timeout):
            raise TimeoutError(f"nothing came in {timeout} s")
        (size,) = _SIZE.unpack(self._read(_SIZE.size))
        return decode(self._read(size), limits=_LIMITS)

    def poll(self, timeout: float | None) -> bool:
        return is_readable(self._socket.fileno(), timeout)

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                chunk = self._socket.recv(size - len(data), socket.MSG_WAITALL)
            except ConnectionError:
                chunk = b""
            if not chunk:
                raise EOFError
            data += chunk
        return data


def _live(fd: int, timeout_s: float, is_watched: bool) -> None:
    """Run the child from its first import to its exit. ``is_watched``: the kernel is to kill it when the
    thread that started it ends.
    """
    import traceback

    if is_watched:
        die_with_parent()
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    wire = _Wire(socket.socket(fileno=fd))
    where, args = wire.recv(timeout_s)
    try:
        answer = ("result", at_source(where)(Parent(wire), *args))
    except BaseException as e:
        answer = ("error", [type(e).__name__, traceback.format_exc()])
    faulthandler.cancel_dump_traceback_later()
    wire.send(answer)


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def is_readable(fd: int, timeout: float | None) -> bool:
    """Whether the descriptor, of any number, is readable within ``timeout`` seconds."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(None if timeout is None else math.ceil(timeout * 1000)))


def end_of(code: int) -> str:
    """How a process ended, from its exit code, which is negative if a signal killed it."""
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"exit code {code}"


def stacks() -> str:
    """The stacks of all threads of this process."""
    with tempfile.TemporaryFile() as f:
        faulthandler.dump_traceback(f, all_threads=True)
        f.seek(0)
        return f.read().decode("utf-8", "replace")


@contextlib.contextmanager
def nothing_left(settle_s: float = 5.0) -> Iterator[None]:
    """The block must leave no new resource in this process. Resources that are being released get
    ``settle_s``.

    Raises:
        AssertionError: a resource is left; the message names it and holds all stacks.
    """
    before = Resources.of()
    yield
    limit = time.monotonic() + settle_s
    while left := Resources.of().beyond(before):
        if time.monotonic() > limit:
            raise AssertionError(f"left behind: {left}\n{stacks()}")
        time.sleep(0.01)
