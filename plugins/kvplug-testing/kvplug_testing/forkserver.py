"""Fast child processes for tests: one process imports everything once, and forks each child.

A fresh interpreter that imports torch takes seconds to start; a fork of such a process takes milliseconds.
The server only imports, so its children are as good as fresh: they hold no transport, and no library has
started a thread in them. It signals through pidfds, because the pid of an ended process can be reused.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

from kvplug_testing import peers
from kvplug_testing.peers import DEFAULT_TIMEOUT_S, Parent, Peer
from kvplug_testing.sources import at_source

_NUMBER = struct.Struct("<q")
_START_S = 120.0
"""How long a server may take until it can fork. It imports torch, for example, and test machines are busy."""


class ForkServer:
    """A child process that forks on request. :meth:`start` returns a :class:`kvplug_testing.peers.Peer`, as
    ``peers.start`` does.
    """

    def __init__(self, prepare: str, *args: Any, forked_from: ForkServer | None = None) -> None:
        """``prepare`` names a function, ``"module:function"``, that imports what the children will need;
        ``args`` are plain values for it. A server that is forked from another one has what that imported, and
        the environment of this process; close it first.
        """
        start = peers.start if forked_from is None else forked_from.start
        given = ({**os.environ}, prepare, list(args))
        self._attach(lambda name: start(f"{__name__}:_run_server", name, *given, timeout_s=_START_S))
        try:
            self._server.recv(_START_S)
        except BaseException:
            self.close()
            raise

    def _attach(self, start: Callable[[bytes], Peer]) -> None:
        """``start`` starts a process that calls :func:`connected` with this name, and :func:`serve`."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # the kernel chooses an abstract name
            listener.listen()
            listener.settimeout(_START_S)
            self._server = start(listener.getsockname())
            try:
                self._control, _ = listener.accept()
            except BaseException:
                self._server.close()
                raise
        self._control.settimeout(None)
        self._lock = threading.Lock()
        self.pid = self._server.pid

    @classmethod
    def of(cls, *modules: str, forked_from: ForkServer | None = None) -> Self:
        """A server that has imported these modules."""
        return cls(f"{__name__}:_import_all", *modules, forked_from=forked_from)

    def start(self, target: str, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> Peer:
        """Run ``target(parent, *args)`` in a forked child; ``target`` is a string in a form that
        ``peers.start`` takes.
        """
        sys.audit("kvplug_testing.forkserver.fork", target)
        ours, theirs = socket.socketpair()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the peer
        with theirs:
            number, (pidfd,) = self._request(f"fork {timeout_s}", [theirs.fileno(), stderr.fileno()])

        def reap() -> int:
            # ``number`` is its pid for the server, which may be in another pid namespace.
            return os.waitstatus_to_exitcode(self._request(f"wait {number}")[0])

        return Peer(target, args, pidfd, reap, ours, stderr)

    def close(self) -> None:
        """End the server. Close its children first: only the server can read their exit status."""
        self._control.close()
        self._server.close()

    def _request(self, request: str, fds: Sequence[int] = ()) -> tuple[int, list[int]]:
        with self._lock:
            socket.send_fds(self._control, [request.encode()], fds)
            answer, received, _, _ = socket.recv_fds(
                self._control, _NUMBER.size, 1, flags=socket.MSG_CMSG_CLOEXEC
            )
        if not answer:
            raise ChildProcessError(f"the fork server is gone; it wrote:\n{self._server.stderr}")
        return int(_NUMBER.unpack(answer)[0]), received


def _import_all(*modules: str) -> None:
    for module in modules:
        importlib.import_module(module)


def connected(name: bytes) -> socket.socket:
    """The server's connection to its client, which listens at this name."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(name)
    return control


def _run_server(
    parent: Parent, name: bytes, environment: dict[str, str], prepare: str, args: list[Any]
) -> None:
    """Import what children need, and serve."""
    control = connected(name)
    os.environ.clear()
    os.environ.update(environment)
    at_source(prepare)(*args)
    # The server has no time limit. A timer that runs here could also not be restarted in a child, because the
    # timer's thread does not exist there.
    faulthandler.cancel_dump_traceback_later()
    # A garbage collection in a child would touch, and so copy, the memory of all imported modules.
    gc.collect()
    gc.freeze()
    parent.send("ready")
    serve(parent, control)


def serve(parent: Parent, control: socket.socket) -> None:
    """Run the server until its client is gone. Its children close both arguments, which are the server's."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, 64, 2)
        if not data:
            return
        word, _, number = data.decode().partition(" ")
        pidfds = []
        if word == "wait":
            answer = os.waitpid(int(number), 0)[1]
        else:
            answer = os.fork()
            if answer == 0:
                _be_a_child(parent, control, fds, float(number))
            pidfds = [os.pidfd_open(answer)]
        socket.send_fds(control, [_NUMBER.pack(answer)], pidfds)
        for each in (*fds, *pidfds):
            os.close(each)


def _be_a_child(parent: Parent, control: socket.socket, fds: Sequence[int], timeout_s: float) -> None:
    code = 1
    try:
        parent.disown()
        control.close()
        wire, stderr = fds
        os.dup2(stderr, 2)
        os.close(stderr)
        peers._live(wire, timeout_s, is_watched=True)
        code = 0
    finally:
        os._exit(code)
