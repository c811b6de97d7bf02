"""How one proven connection becomes a pipe.

Each end says which memory it has and how it watches, maps the other's memory, and says whether it could. The
accepting end takes memory only when the other one has spoken.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
from typing import Any, Final

import attrs

from kvplug import KvplugError, PeerGoneError, TransportError
from kvplug.transport import Channel, Connection, Deadline, WireError
from kvplug_cuda_ipc.cudart.abi import IPC_HANDLE_BYTES
from kvplug_cuda_ipc.cudart.errors import CudaError
from kvplug_cuda_ipc.memory import TOKEN_BYTES, Borrower, Mapping, Staging
from kvplug_cuda_ipc.pipe.pipe import CudaIpcPipe, Tuning
from kvplug_cuda_ipc.pipe.words import Kind

logger = logging.getLogger(__name__)

PURPOSE: Final = "pipe-cuda-ipc"
_LAST_WORDS_S: Final = 0.5


@attrs.frozen(kw_only=True)
class Hello:
    """What each end says first."""

    gpu: str
    """The UUID of its GPU."""
    token: bytes
    handle: bytes
    nbytes: int
    """Of its staging memory."""
    sees_death: bool
    """It has a pidfd of the other end."""
    heartbeat_ms: int
    """Silence that it takes for death, where it has none."""

    @classmethod
    def read(cls, value: Any) -> Hello:
        """Raises WireError: it is none."""
        wrong = WireError("it does not join as this version does")
        if not isinstance(value, dict):
            raise wrong
        fields = attrs.fields(cls)
        try:
            made = cls(**{field.name: value[field.name] for field in fields})
        except KeyError as e:
            raise wrong from e
        types = [str, bytes, bytes, int, bool, int]
        if [type(getattr(made, field.name)) for field in fields] != types:
            raise wrong
        if len(made.token) != TOKEN_BYTES or len(made.handle) != IPC_HANDLE_BYTES:
            raise wrong
        if made.nbytes <= 0 or made.heartbeat_ms <= 0:
            raise wrong
        return made


def connect(connection: Connection, tuning: Tuning, deadline: Deadline) -> CudaIpcPipe:
    """The connecting end's pipe over a connection, which it owns from here on.

    Raises:
        TimeoutError, PeerGoneError, WireError: there is no pipe, and the connection is closed.
        TransportError: memory of one end cannot be had, or mapped at the other, and why.
    """
    return _Joining(connection, tuning, deadline).pipe(speaks_first=True)


def accept(connection: Connection, tuning: Tuning, deadline: Deadline) -> CudaIpcPipe:
    """The same for the accepting end. Raises the same."""
    return _Joining(connection, tuning, deadline).pipe(speaks_first=False)


class _Joining:
    """A pipe in the making."""

    def __init__(self, connection: Connection, tuning: Tuning, deadline: Deadline) -> None:
        self._given = connection
        self._tuning = tuning
        self._deadline = deadline
        self._who = connection.describe
        self._borrower: Borrower | None = None
        self._staging: Staging | None = None
        self._mapping: Mapping | None = None

    def pipe(self, *, speaks_first: bool) -> CudaIpcPipe:
        given, device = self._given, self._tuning.device
        try:
            # Of our own: who gave us the connection may close it, and we may have to go on listening.
            self._channel = Channel(attrs.evolve(given, sock=given.sock.dup()), timeout_s=None)
        except BaseException:
            given.close()
            raise
        try:
            with device.current():
                if speaks_first:
                    ours = self._hello()
                    self._say(attrs.asdict(ours))
                    theirs = Hello.read(self._hear())
                else:
                    theirs = Hello.read(self._hear())
                    ours = self._hello()
                    self._say(attrs.asdict(ours))
                self._map(ours, theirs)
                self._say({"ready": True})
                if self._hear() != {"ready": True}:
                    raise WireError(f"{self._who} does not join as this version does")
                pipe = self._made(ours, theirs)
            given.close()
            return pipe
        except BaseException as e:
            self._give_up(e)
            given.close()
            raise

    def _hello(self) -> Hello:
        tuning = self._tuning
        device = tuning.device
        self._borrower = Borrower(self._given.peer)
        self._staging = staging = Staging(device.runtime, tuning.staging_bytes)
        return Hello(
            gpu=str(device.runtime.uuid_of(device.index)),
            token=staging.token,
            handle=staging.handle,
            nbytes=staging.nbytes,
            sees_death=self._borrower.visible,
            heartbeat_ms=max(1, min(int(tuning.heartbeat_timeout_s * 1000), 2**32 - 1)),
        )

    def _map(self, ours: Hello, theirs: Hello) -> None:
        try:
            self._mapping = Mapping(self._tuning.device.runtime, theirs.token, theirs.handle, theirs.nbytes)
        except CudaError as e:
            if self._has_hung_up():
                raise PeerGoneError(f"{self._who} has ended, and its memory with it: {e}") from e
            raise TransportError(
                f"memory of {self._who} on GPU {theirs.gpu} cannot be mapped for GPU {ours.gpu}: {e}"
            ) from e

    def _has_hung_up(self) -> bool:
        """Whether the peer is gone; its memory may be so a moment before its connection."""
        poller = select.poll()
        poller.register(self._channel, select.POLLRDHUP)
        return bool(poller.poll(_LAST_WORDS_S * 1000))

    def _made(self, ours: Hello, theirs: Hello) -> CudaIpcPipe:
        assert self._borrower is not None and self._staging is not None and self._mapping is not None
        seen = ours.sees_death and theirs.sees_death
        pipe = CudaIpcPipe(
            self._channel,
            self._staging,
            self._mapping,
            self._tuning,
            borrower=self._borrower,
            peer=self._who,
            heartbeat_s=None if seen else min(ours.heartbeat_ms, theirs.heartbeat_ms) / 1000,
        )
        pipe.start()
        return pipe

    def _give_up(self, error: BaseException) -> None:
        """Say why, unmap, and free what is ours when the other end has let go of it, beside the caller."""
        with contextlib.suppress(KvplugError):
            if isinstance(error, KvplugError) and not isinstance(error, PeerGoneError | WireError):
                self._channel.send({"failed": str(error)}, timeout=_LAST_WORDS_S)
        try:
            if self._mapping is not None:
                with self._tuning.device.current():
                    self._mapping.close()
        except CudaError as e:
            logger.warning("what %s lent was not unmapped: %s", self._who, e)
        with contextlib.suppress(KvplugError):
            self._channel.send([Kind.UNMAPPED.value], timeout=_LAST_WORDS_S)
        threading.Thread(target=self._take_back, name="kvplug-cuda-ipc-end", daemon=True).start()

    def _take_back(self) -> None:
        try:
            if self._staging is not None:
                while self._channel.recv(None) != [Kind.UNMAPPED.value]:
                    pass
        except PeerGoneError:
            if self._borrower is not None:
                self._borrower.wait_for_end()
        except KvplugError as e:
            logger.debug("%s is not heard any more: %s", self._who, e)
        self._channel.close()
        if self._borrower is not None:
            self._borrower.close()
        try:
            if self._staging is not None:
                self._tuning.device.adopt()
                self._staging.free()
        except CudaError as e:
            logger.warning("staging memory was not given back: %s", e)

    def _say(self, value: Any) -> None:
        self._channel.send(value, timeout=self._deadline.remaining())

    def _hear(self) -> Any:
        value = self._channel.recv(self._deadline.remaining())
        if isinstance(value, dict) and isinstance(value.get("failed"), str):
            raise TransportError(f"{self._who} cannot be the other end of a pipe: {value['failed']}")
        return value
