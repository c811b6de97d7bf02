"""How one proven connection becomes a pipe.

Each end describes its memory, maps the other's, and confirms it. The accepting end allocates its memory only
after the first message of the connecting end.
"""

from __future__ import annotations

import logging
import queue
import select
from typing import Final

import attrs
from attrs.validators import ge, max_len, min_len

from kvplug import KvplugError, PeerGoneError, TransportError
from kvplug.transport import BackgroundThread, Connection, Deadline, OfferPipe, peer_text
from kvplug_cuda_ipc.cudart.abi import IPC_HANDLE_BYTES
from kvplug_cuda_ipc.cudart.errors import CudaError
from kvplug_cuda_ipc.memory import TOKEN_BYTES, Mapping, Staging
from kvplug_cuda_ipc.pipe.pipe import UNMAPPED, CudaIpcPipe, CudaIpcPipeSettings, wait_until_unmapped

logger = logging.getLogger(__name__)

PURPOSE: Final = "pipe-cuda-ipc"
_MAX_GPU: Final = 64
"""Characters of a GPU's UUID, and more."""
_HANG_UP_S: Final = 0.5
"""Seconds that the peer may take to hang up after its memory is gone."""


def _gpu(text: str) -> str:
    return peer_text(text, _MAX_GPU)


@attrs.frozen(kw_only=True)
class Hello:
    """The memory of one end."""

    gpu: str = attrs.field(converter=_gpu)
    """The UUID of its GPU."""
    token: bytes = attrs.field(validator=[min_len(TOKEN_BYTES), max_len(TOKEN_BYTES)])
    handle: bytes = attrs.field(validator=[min_len(IPC_HANDLE_BYTES), max_len(IPC_HANDLE_BYTES)])
    nbytes: int = attrs.field(validator=ge(1))
    """Of its staging memory."""


def make_pipe(
    connection: Connection, settings: CudaIpcPipeSettings, deadline: Deadline, *, accepted: bool
) -> CudaIpcPipe:
    """Return the pipe over a connection, which is taken over. ``accepted``: this is the listening end.

    Raises:
        TimeoutError, PeerGoneError, WireError: there is no pipe, and the connection is closed.
        TransportError: memory of one end cannot be allocated, or mapped at the other, and why.
        ResourceExhaustedError: one of the two processes has no free descriptor, thread or memory for it.
    """
    with OfferPipe.Join.over(connection, settings.heartbeat_timeout_s, deadline) as join:
        return _Joining(join, settings).pipe(accepted=accepted)


class _Joining:
    """A pipe in the making, and the thread that frees this end's memory if the pipe is not made.

    The thread is started first, since the process may have no more threads later.
    """

    def __init__(self, join: OfferPipe.Join, settings: CudaIpcPipeSettings) -> None:
        self._join = join
        self._settings = settings
        self._device = settings.device
        self._staging: Staging | None = None
        self._mapping: Mapping | None = None
        self._must_end = queue.SimpleQueue[bool]()
        """Gets one value: whether the pipe was not made, so that this object frees what it allocated."""
        BackgroundThread(self._take_back, name="kvplug-cuda-ipc-end", stop=self._stop_taking_back).start()
        join.give_up = self._give_up

    def pipe(self, *, accepted: bool) -> CudaIpcPipe:
        """Exchange and map both ends' memory."""
        with self._device.current():
            theirs = self._join.exchange(Hello, self._hello, accepted=accepted)
            mapping = self._map(theirs)
            self._join.confirm()
            assert self._staging is not None
            made = CudaIpcPipe(self._join, self._staging, mapping, self._settings)
        self._must_end.put(False)
        return made

    def _hello(self) -> Hello:
        runtime = self._device.runtime
        self._staging = staging = Staging(runtime, self._settings.staging_bytes)
        self._gpu = str(runtime.uuid_of(self._device.index))
        return Hello(gpu=self._gpu, token=staging.token, handle=staging.handle, nbytes=staging.nbytes)

    def _map(self, theirs: Hello) -> Mapping:
        peer = self._join.peer
        try:
            self._mapping = Mapping(self._device.runtime, theirs.token, theirs.handle, theirs.nbytes)
        except CudaError as e:
            poller = select.poll()
            poller.register(self._join.channel, select.POLLRDHUP)
            if poller.poll(_HANG_UP_S * 1000):  # its memory may be gone a moment before its connection
                raise PeerGoneError(f"{peer} has ended, and its memory with it: {e}") from e
            raise TransportError(
                f"memory of {peer} on GPU {theirs.gpu} cannot be mapped for GPU {self._gpu}: {e}"
            ) from e
        return self._mapping

    def _give_up(self) -> None:
        """Unmap the peer's memory; the thread frees this end's once the peer has unmapped it."""
        try:
            if self._mapping is not None:
                with self._device.current():
                    self._mapping.close()
            self._join.channel.send(UNMAPPED, timeout=0)
        except CudaError as e:
            logger.warning("memory of %s was not unmapped: %s", self._join.peer, e)
        except KvplugError as e:
            logger.debug("cannot report to %s that its memory is unmapped: %s", self._join.peer, e)
        self._must_end.put(True)

    def _stop_taking_back(self) -> None:
        """Called when the program leaves."""
        self._must_end.put(False)
        self._join.channel.close()

    def _take_back(self) -> None:
        if not self._must_end.get():
            return
        if self._staging is not None:
            wait_until_unmapped(self._join.channel, self._join.pidfd)
        self._join.close()
        try:
            if self._staging is not None:
                self._device.adopt()
                self._staging.free()
        except CudaError as e:
            logger.warning("staging memory was not freed: %s", e)
