"""How one proven connection becomes a pipe.

Each end says which memory it has and how it watches the other, maps the other's memory, and says that it
has. The accepting end allocates its memory only when the connecting one has spoken.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import select
from typing import Any, Final

import attrs

from kvplug import KvplugError, PeerGoneError, ResourceExhaustedError, TransportError
from kvplug.transport import (
    BackgroundThread,
    Channel,
    Connection,
    Deadline,
    NamedExhaustion,
    Watch,
    WireError,
    peer_text,
)
from kvplug_cuda_ipc.cudart.abi import IPC_HANDLE_BYTES
from kvplug_cuda_ipc.cudart.errors import CudaError
from kvplug_cuda_ipc.memory import TOKEN_BYTES, Mapping, Staging
from kvplug_cuda_ipc.peer_process import PeerProcess
from kvplug_cuda_ipc.pipe.frames import FrameKind, encode
from kvplug_cuda_ipc.pipe.pipe import CudaIpcPipe, CudaIpcPipeSettings

logger = logging.getLogger(__name__)

PURPOSE: Final = "pipe-cuda-ipc"
_READY: Final = {"ready": True}
_UNMAPPED: Final = encode(FrameKind.UNMAPPED)
_MAX_GPU: Final = 64
"""Characters of a GPU's UUID, and more."""
_SHORTEST_SILENCE_S: Final = 0.05
"""The least silence that counts as death, whatever the peer asks for: each heartbeat wakes both ends."""
_FAILURE_S: Final = 0.5
"""Seconds that the peer may take to read why there is no pipe, or to hang up after its memory is gone."""


@attrs.frozen(kw_only=True)
class Hello:
    """What each end says first."""

    gpu: str
    """The UUID of its GPU."""
    token: bytes
    handle: bytes
    nbytes: int
    """Of its staging memory."""
    terms: Watch.Terms

    def encode(self) -> dict[str, Any]:
        """As a value of a channel."""
        return {
            "gpu": self.gpu,
            "token": self.token,
            "handle": self.handle,
            "nbytes": self.nbytes,
            "sees_death": self.terms.sees_death,
            "heartbeat_ms": self.terms.heartbeat_ms,
        }

    @classmethod
    def decode(cls, value: Any) -> Hello:
        """Raises WireError: it is none."""
        match value:
            case {
                "gpu": str(gpu),
                "token": bytes(token),
                "handle": bytes(handle),
                "nbytes": int(nbytes),
                "sees_death": bool(sees_death),
                "heartbeat_ms": int(heartbeat_ms),
            } if (
                len(token) == TOKEN_BYTES
                and len(handle) == IPC_HANDLE_BYTES
                and min(nbytes, heartbeat_ms) > 0
            ):
                terms = Watch.Terms(sees_death, heartbeat_ms)
                gpu = peer_text(gpu, _MAX_GPU)
                return cls(gpu=gpu, token=token, handle=handle, nbytes=nbytes, terms=terms)
        raise WireError("it does not join as this version does")


def make_pipe(
    connection: Connection, settings: CudaIpcPipeSettings, deadline: Deadline, *, accepted: bool
) -> CudaIpcPipe:
    """The pipe over a connection, which it owns from here on. ``accepted``: this is the listening end.

    Raises:
        TimeoutError, PeerGoneError, WireError: there is no pipe, and the connection is closed.
        TransportError: memory of one end cannot be allocated, or mapped at the other, and why.
        ResourceExhaustedError: one of the two processes has no free descriptor, thread or memory for it.
    """
    return _Join(connection, settings, deadline).run(accepted=accepted)


class _Join:
    """A pipe in the making."""

    def __init__(self, connection: Connection, settings: CudaIpcPipeSettings, deadline: Deadline) -> None:
        self._connection = connection
        self._settings = settings
        self._device = settings.device
        self._deadline = deadline
        self._peer = connection.describe
        self._peer_process: PeerProcess | None = None
        self._staging: Staging | None = None
        self._mapping: Mapping | None = None
        self._must_end = queue.SimpleQueue[bool]()
        """Once: whether there is no pipe, so that this object has to end what it began."""

    def run(self, *, accepted: bool) -> CudaIpcPipe:
        given = self._connection
        try:
            with NamedExhaustion(f"making a pipe with {self._peer}"):
                self._channel = self._own_channel()
                try:
                    with self._device.current():
                        pipe = self._exchange(accepted=accepted)
                except BaseException as e:
                    self._give_up(e)
                    raise
        except ResourceExhaustedError as e:
            given.decline(e)
            raise
        finally:
            given.close()
        self._must_end.put(False)
        return pipe

    def _own_channel(self) -> Channel:
        """A channel with a socket of its own: when there is no pipe the given one is closed at once, while
        this one is needed until the peer has unmapped this end's memory. And the thread that waits for that,
        now: it might not be had then.
        """
        given = self._connection
        channel = Channel(attrs.evolve(given, sock=given.sock.dup()), timeout_s=None)
        try:
            BackgroundThread(self._take_back, name="kvplug-cuda-ipc-end", stop=self._stop_taking_back).start()
        except BaseException:
            channel.close()
            raise
        return channel

    def _exchange(self, *, accepted: bool) -> CudaIpcPipe:
        if accepted:
            theirs = Hello.decode(self._receive())
            ours = self._hello()
            self._send(ours.encode())
        else:
            ours = self._hello()
            self._send(ours.encode())
            theirs = Hello.decode(self._receive())
        self._map(ours, theirs)
        self._send(_READY)
        if self._receive() != _READY:
            raise WireError(f"{self._peer} does not join as this version does")
        assert self._peer_process is not None and self._staging is not None and self._mapping is not None
        return CudaIpcPipe(
            self._channel,
            self._staging,
            self._mapping,
            self._settings,
            peer_process=self._peer_process,
            peer=self._peer,
            silence_s=ours.terms.agreed(theirs.terms).silence_s(at_least_s=_SHORTEST_SILENCE_S),
        )

    def _hello(self) -> Hello:
        settings, runtime = self._settings, self._device.runtime
        self._peer_process = PeerProcess(self._connection.peer)
        self._staging = staging = Staging(runtime, settings.staging_bytes)
        return Hello(
            gpu=str(runtime.uuid_of(self._device.index)),
            token=staging.token,
            handle=staging.handle,
            nbytes=staging.nbytes,
            terms=Watch.Terms.of(settings.heartbeat_timeout_s, sees_death=self._peer_process.sees_death),
        )

    def _map(self, ours: Hello, theirs: Hello) -> None:
        try:
            self._mapping = Mapping(self._device.runtime, theirs.token, theirs.handle, theirs.nbytes)
        except CudaError as e:
            if self._has_hung_up():
                raise PeerGoneError(f"{self._peer} has ended, and its memory with it: {e}") from e
            raise TransportError(
                f"memory of {self._peer} on GPU {theirs.gpu} cannot be mapped for GPU {ours.gpu}: {e}"
            ) from e

    def _has_hung_up(self) -> bool:
        """Whether the peer is gone; its memory may be gone a moment before its connection."""
        poller = select.poll()
        poller.register(self._channel, select.POLLRDHUP)
        return bool(poller.poll(_FAILURE_S * 1000))

    def _send(self, value: Any) -> None:
        self._channel.send(value, timeout=self._deadline.remaining())

    def _receive(self) -> Any:
        value = self._channel.recv(self._deadline.remaining())
        if isinstance(value, dict) and "failed" in value:
            why = f"{self._peer} cannot be the other end of a pipe: {peer_text(value['failed'])}"
            if lacks := value.get("lacks"):
                raise ResourceExhaustedError(why, resource=peer_text(lacks))
            raise TransportError(why)
        return value

    # -- when there is no pipe ---------------------------------------------------------------------------

    def _give_up(self, error: BaseException) -> None:
        """Tell the peer why and unmap its memory; a thread frees this end's once the peer has unmapped it."""
        with contextlib.suppress(KvplugError):
            shortage = NamedExhaustion.of(error, "making a pipe")
            told = shortage or error
            if isinstance(told, KvplugError) and not isinstance(told, PeerGoneError | WireError):
                lacks = shortage.resource if shortage is not None else ""
                self._channel.send({"failed": str(told), "lacks": lacks}, timeout=_FAILURE_S)
        try:
            if self._mapping is not None:
                with self._device.current():
                    self._mapping.close()
        except CudaError as e:
            logger.warning("memory of %s was not unmapped: %s", self._peer, e)
        with contextlib.suppress(KvplugError):
            self._channel.send(_UNMAPPED, timeout=_FAILURE_S)
        self._must_end.put(True)

    def _stop_taking_back(self) -> None:
        """The program leaves."""
        self._must_end.put(False)
        self._channel.close()

    def _take_back(self) -> None:
        """If there is no pipe: wait until the peer has unmapped this end's memory, and free it."""
        if not self._must_end.get():
            return
        try:
            if self._staging is not None:
                while self._channel.recv(None) != _UNMAPPED:
                    pass
        except PeerGoneError:
            if self._peer_process is not None:
                self._peer_process.wait_for_end()
        except KvplugError as e:
            logger.debug("nothing more is received from %s: %s", self._peer, e)
        self._channel.close()
        if self._peer_process is not None:
            self._peer_process.close()
        try:
            if self._staging is not None:
                self._device.adopt()
                self._staging.free()
        except CudaError as e:
            logger.warning("staging memory was not freed: %s", e)
