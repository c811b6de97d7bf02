"""One NIXL agent with one backend, which moves bytes between memory and files or objects.

If a transfer that is under way is released, NIXL returns at once, but the backend OBJ still writes into the
memory later. Destroying an agent with such a transfer holds the interpreter's lock until the transfer has
ended. So :meth:`Agent.move` returns only when all of its transfers have ended. A caller with a deadline runs
it in another thread, as kvplug's executor does. Each transfer has one piece of memory: a transfer of several
pieces would end at the first error while the other pieces are still moved.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import attrs

from kvplug import ClosedError, TransportError
from kvplug.transport import NamedExhaustion, close_after_fork
from kvplug_nixl.library import nixl

_SPINS: Final = 20
"""How often the state of a transfer is checked before the first pause."""
_PAUSE_S: Final = (20e-6, 2e-3)
"""The first and the longest pause in seconds. Each pause is 1.5 times as long as the one before."""
_DESCRIPTORS: Final = 8
"""Descriptors of the AWS SDK's event loop, which a process has once, and of a first connection."""


@attrs.frozen(eq=False)
class Move:
    """Bytes to move between a buffer and a file or an object."""

    buffer: memoryview
    device: int = 0
    """The descriptor of a file."""
    name: str = ""
    """The name of an object."""
    offset: int = 0
    """Where the bytes begin in the file or object."""


class Agent:
    """One agent, which is made at its first use. Thread-safe: each thread waits for its own transfers."""

    def __init__(
        self,
        backend: Literal["POSIX", "OBJ"],
        parameters: Callable[[], dict[str, str]],
        environment: Mapping[str, str] | None = None,
        *,
        threads: int = 0,
    ) -> None:
        """
        Args:
            parameters: returns the backend's parameters. It is called when the backend is made, so that no
                secret is kept.
            environment: variables that the backend reads when it is made.
            threads: how many threads the backend starts.
        """
        self._backend = backend
        self._kind = "FILE" if backend == "POSIX" else "OBJ"
        self._parameters = parameters
        self._environment = environment or {}
        self._threads = threads
        self._name = f"kvplug-{secrets.token_hex(8)}"
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._agent: Any = None
        self._users = 0
        """The number of calls under way."""
        self._closed = False
        close_after_fork(self)

    def move(self, operation: Literal["READ", "WRITE"], moves: Sequence[Move]) -> list[bool]:
        """Move all of them, and wait until they have ended. Returns which have succeeded.

        If one has failed, the content of its memory is undefined.

        Raises:
            ClosedError: the agent is closed.
            TransportError: the agent cannot be made.
        """
        with self._using() as agent:
            pieces = [self._piece(agent, operation, move) for move in moves]
            try:
                for piece in pieces:
                    piece.begin()
                _wait(pieces)
            finally:  # also after an interrupt
                for piece in pieces:
                    piece.end()
            return [piece.state == "DONE" for piece in pieces]

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Whether each object exists, or each file if the names are paths. NIXL looks for all at once.

        Raises:
            ClosedError: the agent is closed.
            TransportError: NIXL cannot find out.
        """
        with self._using() as agent, self._mapped_errors("it cannot look for objects"):
            wanted = [(0, 0, 0, name) for name in names]
            return [each is not None for each in agent.query_memory(wanted, self._backend, self._kind)]

    def _piece(self, agent: Any, operation: str, move: Move) -> _Piece:
        # the backend OBJ finds the name of an object by a number that the caller chooses
        device = move.device if self._kind == "FILE" else next(self._numbers)
        return _Piece(agent, self._backend, operation, (self._kind, device, move), self._name)

    @contextlib.contextmanager
    def _using(self) -> Iterator[Any]:
        with self._lock:
            if self._closed:
                raise ClosedError("the store is closed")
            if self._agent is None:
                self._agent = self._made()
            self._users += 1
            agent = self._agent
        try:
            yield agent
        finally:
            with self._lock:
                self._users -= 1
                dropped = self._dropped()
            del agent, dropped

    def _made(self) -> Any:
        if self._threads:  # NIXL waits for ever if a thread cannot be started
            NamedExhaustion.ensure_available(
                "starting NIXL", descriptors=_DESCRIPTORS, threads=self._threads + 2
            )
        with nixl(self._environment) as api, self._mapped_errors("it cannot be used"):
            config = api.nixl_agent_config(
                enable_prog_thread=False,
                backends=[],
                sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            agent = api.nixl_agent(self._name, config)
            agent.create_backend(self._backend, self._parameters())
            agent.backend_options.clear()  # secrets are among them
            return agent

    @contextlib.contextmanager
    def _mapped_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            NamedExhaustion.check(e, f"NIXL's backend {self._backend}")
            raise TransportError(f"NIXL's backend {self._backend}: {what}: {type(e).__name__}: {e}") from e

    def close(self) -> None:
        """Refuse further calls. The last transfer destroys the agent. Idempotent."""
        with self._lock:
            self._closed = True
            dropped = self._dropped()
        del dropped

    def _dropped(self) -> Any:
        """With the lock: return NIXL's agent if no call needs it. Its threads end with the last reference."""
        if not self._closed or self._users or self._agent is None:
            return None
        agent, self._agent = self._agent, None
        inner, agent.agent = agent.agent, None
        return inner

    def _after_fork_in_child(self) -> None:
        self._closed = True
        agent, self._agent = self._agent, None
        if agent is not None:  # destroying it would wait for threads that the child does not have
            for each in (agent, agent.agent):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


class _Piece:
    """One transfer, with the memory that is registered for it."""

    def __init__(
        self, agent: Any, backend: str, operation: str, there: tuple[str, int, Move], own_name: str
    ) -> None:
        self._agent = agent
        self._backends = [backend]
        self._operation = operation
        self._kind, self._device, self._move = there
        self._own_name = own_name
        self._registered: list[Any] = []
        self._handle: Any = None
        self.state = "ERR"

    def begin(self) -> None:
        """Start the transfer. It has failed if NIXL refuses it."""
        import numpy

        agent, move, nbytes = self._agent, self._move, self._move.buffer.nbytes
        address = numpy.frombuffer(move.buffer, numpy.uint8).ctypes.data
        with contextlib.suppress(Exception):
            for span, kind in (
                ((address, nbytes, 0, ""), "DRAM"),
                ((0, 0, self._device, move.name), self._kind),
            ):
                self._registered.append(agent.register_memory([span], kind, self._backends))
            here = agent.get_xfer_descs([(address, nbytes, 0)], "DRAM")
            there = agent.get_xfer_descs([(move.offset, nbytes, self._device)], self._kind)
            self._handle = agent.initialize_xfer(
                self._operation, here, there, self._own_name, b"", self._backends
            )
            self.state = agent.transfer(self._handle)

    def is_under_way(self) -> bool:
        if self.state == "PROC":
            self.state = "ERR"
            with contextlib.suppress(Exception):
                self.state = self._agent.check_xfer_state(self._handle)
        return self.state == "PROC"

    def end(self) -> None:
        """Wait for the transfer, and deregister its memory."""
        _wait([self])
        handle, self._handle = self._handle, None
        with contextlib.suppress(Exception):
            if handle is not None:
                handle.release()
        for registered in self._registered:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(registered, self._backends)
        self._registered.clear()


def _wait(pieces: Sequence[_Piece]) -> None:
    """Wait until none of them is under way."""
    pause, longest = _PAUSE_S
    spins = 0
    while sum(piece.is_under_way() for piece in pieces):  # each is checked: NIXL makes progress in the check
        spins += 1
        if spins > _SPINS:
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
