"""Fast child processes for tests: one process imports everything once, and forks each child.

A fresh interpreter that imports torch takes seconds to start; a fork of such a process takes milliseconds.
The server only imports, so its children are as good as fresh: they hold no transport, and no library has
started a thread in them. Linux only: it signals through pidfds, because the pid of an ended process can be
reused.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from kvplug_testing import peers
from kvplug_testing.peers import DEFAULT_TIMEOUT_S

_NUMBER = struct.Struct("<q")


class ForkServer:
    """A child process that forks on request. :meth:`start` returns a :class:`kvplug_testing.peers.Peer`, as
    ``peers.start`` does.
    """

    def __init__(self, prepare: str, *args: Any) -> None:
        """``prepare`` names a function, ``"module:function"``, that imports what the children will need;
        ``args`` are plain values for it.
        """
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = peers.start(
                _serve, theirs.fileno(), prepare, list(args), pass_fds=[theirs.fileno()]
            )
        self.pid = self._server.pid
        try:
            self._server.recv()
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, *modules: str) -> Self:
        """A server that has imported these modules."""
        return cls(f"{__name__}:_import_all", *modules)

    @staticmethod
    def works() -> bool:
        """Whether this system supports it."""
        return hasattr(os, "fork") and hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")

    def start(self, target: str, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> peers.Peer:
        """Run ``target(parent, *args)`` in a forked child; ``target`` is a string in a form that
        ``peers.start`` takes.
        """
        sys.audit("kvplug_testing.forkserver.fork", target)
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the peer
        with theirs:
            number, pidfds = self._ask(f"fork {timeout_s}", [theirs.fileno(), stderr.fileno()])
        return _Forked(target, args, _Process(number, pidfds[0], self._status), ours, stderr)

    def close(self) -> None:
        """End the server. Close its children first: only the server can read their exit status."""
        self._control.close()
        self._server.close()

    def _status(self, number: int) -> int:
        return os.waitstatus_to_exitcode(self._ask(f"wait {number}")[0])

    def _ask(self, question: str, fds: Sequence[int] = ()) -> tuple[int, list[int]]:
        with self._lock:
            socket.send_fds(self._control, [question.encode()], fds)
            answer, received, _, _ = socket.recv_fds(
                self._control, _NUMBER.size, 1, flags=socket.MSG_CMSG_CLOEXEC
            )
        if not answer:
            raise ChildProcessError(f"the fork server is gone; it wrote:\n{self._server.stderr}")
        return int(_NUMBER.unpack(answer)[0]), received


class _Forked(peers.Peer):
    _process: _Process

    def close(self) -> None:
        super().close()
        self._process.close()


class _Process:
    """A grandchild of this process, held by its pidfd. The server may be in another pid namespace."""

    def __init__(self, number: int, pidfd: int, status: Callable[[int], int]) -> None:
        """``number`` is its pid in the server's namespace."""
        # The server reaps it when it is asked for the status. Until then the pid cannot be reused.
        self._number = number
        self._pidfd = pidfd
        self._status = status
        facts = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
        self.pid = next(int(line.split()[1]) for line in facts if line.startswith("Pid:"))
        self._asking = threading.Lock()
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and peers.is_readable(self._pidfd, 0):
            self._ended()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not peers.is_readable(self._pidfd, timeout):
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)
            self._ended()
        assert self._code is not None
        return self._code

    def _ended(self) -> None:
        # Ask the server only once: afterwards the pid can be reused.
        with self._asking:
            if self._code is None:
                self._code = self._status(self._number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        if self._code is None:
            signal.pidfd_send_signal(self._pidfd, sig)

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _import_all(*modules: str) -> None:
    import importlib

    for module in modules:
        importlib.import_module(module)


def _serve(parent: peers.Parent, fd: int, prepare: str, args: list[Any]) -> None:
    """Import what children need, and serve."""
    import faulthandler
    import gc
    import importlib

    control = socket.socket(fileno=fd)
    module, _, name = prepare.rpartition(":")
    getattr(importlib.import_module(module), name)(*args)
    # The server has no time limit. A timer that runs here could also not be restarted in a child, because the
    # timer's thread does not exist there.
    faulthandler.cancel_dump_traceback_later()
    # A garbage collection in a child would touch, and so copy, the memory of all imported modules.
    gc.collect()
    gc.freeze()
    parent.send("ready")
    serve(control, parent.disown)


def serve(control: socket.socket, disown: Callable[[], None]) -> None:
    """Run the server until its client is gone. A child calls ``disown`` to close what is the server's."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, 64, 2)
        if not data:
            return
        word, _, number = data.decode().partition(" ")
        pidfds = []
        if word == "wait":
            answer = os.waitpid(int(number), 0)[1]
        else:
            with warnings.catch_warnings():
                # Python 3.12 warns of forks in processes with threads. The thread here only reads, and holds
                # no lock that a child needs.
                warnings.simplefilter("ignore", DeprecationWarning)
                answer = os.fork()
            if answer == 0:
                disown()
                _be_a_child(control, fds, float(number))
            pidfds = [os.pidfd_open(answer)]
        socket.send_fds(control, [_NUMBER.pack(answer)], pidfds)
        for each in (*fds, *pidfds):
            os.close(each)


def _be_a_child(control: socket.socket, fds: Sequence[int], timeout_s: float) -> None:
    code = 1
    try:
        peers.die_with_parent()
        wire, stderr = fds
        os.dup2(stderr, 2)
        os.close(stderr)
        control.close()
        peers._live(wire, timeout_s)
        code = 0
    finally:
        os._exit(code)
