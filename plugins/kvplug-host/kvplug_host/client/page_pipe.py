"""The pipe to the store in another process: it receives the pages of gets, and sends those of puts."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kvplug import ClosedError, KvplugError, PeerGoneError
from kvplug.net.wire import memory_of_writable
from kvplug.transport import BackgroundThread, Deadline, JobTask, MissReason, Pipe, Transfer, WireError
from kvplug_host import protocol
from kvplug_host.client.piped_get import PipedGet
from kvplug_host.client.put_memory import PutMemory
from kvplug_host.client.requests import Requests
from kvplug_host.link_end import failing

_log = logging.getLogger(__name__)

_STAGES: Final = 4
"""Pieces of puts that are sent at the same time."""


class PagePipe:
    """Owns the pipe. A thread that receives begins with the first get."""

    def __init__(
        self,
        pipe: Pipe,
        requests: Requests,
        *,
        stop: Callable[[], object],
        failed: Callable[[str | None], None],
    ) -> None:
        """
        Args:
            stop: ends this end, without waiting, when the program leaves.
            failed: the link has to end, and why; ``None``: the peer is gone.
        """
        self.pipe = pipe
        self._requests = requests
        self._stop = stop
        self._failed = failed
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        """Held while a tag and its piece are sent."""
        self._stages: deque[tuple[Any, Transfer]] = deque()
        self._lent: PutMemory | None = None
        self._gets: dict[int, PipedGet] = {}
        """Those of which pieces may come."""
        self._thread: threading.Thread | None = None

    # -- gets ----------------------------------------------------------------------------------

    def request(self, get: PipedGet) -> None:
        """Request the pages of a get, which ends if that is not possible."""
        if not self._listens():
            get.end(MissReason.STORE_GONE)
            return
        request = get.request
        self._gets[request.id] = get
        if get.is_over or not self._requests.listen(request, get.found):
            self._gets.pop(request.id, None)
            get.end(self._requests.over or MissReason.STORE_GONE)

    def _listens(self) -> bool:
        with self._lock:
            if self._thread is None:
                thread = BackgroundThread(self._receive_all, name="kvplug-host-pages", stop=self._stop)
                try:
                    thread.start()
                except RuntimeError as e:
                    _log.warning("the store 'host' needs another thread: %s", e)
                    return False
                self._thread = thread
        return True

    def _receive_all(self) -> None:
        with failing(self._failed, "receiving its pages failed"):
            while True:
                number, piece, count, _ = protocol.receive_tag(self.pipe)
                get = self._gets.get(number)
                if get is None:
                    if self._requests.over is not None:
                        return
                    raise WireError(f"a piece came of the request {number}, which is not under way")
                if count:
                    get.arrived(self.pipe, piece, count)
                else:
                    self._gets.pop(number, None)
                    get.all_sent()

    # -- puts ----------------------------------------------------------------------------------

    def lend(self, memory: PutMemory) -> None:
        """Put pages into this memory from now on, which the store has mapped."""

        def was_read(answer: protocol.Results) -> None:
            memory.give_back(answer.codes)

        self._lent = memory
        self._requests.listen(protocol.Lend(id=self._requests.new_number()), was_read)

    def send_rows(
        self, request: int, first: int, rows: int, row_bytes: int, fill: Callable[[memoryview], None]
    ) -> None:
        """Send rows, in lent memory or over the pipe, from memory that is used again."""
        try:
            if self._lend_rows(request, first, rows, row_bytes, fill):
                return
            with self._sending:
                flat = self._stage(rows * row_bytes)
            stage = flat[: rows * row_bytes].view(1, rows, row_bytes)
            fill(memory_of_writable(stage))  # while another thread sends
            with self._sending:
                self.pipe.send_tensor(protocol.tag(request, first, rows), timeout=None)
                self._stages.append((stage, self.pipe.send_tensor(stage, timeout=None)))
        except KvplugError as e:
            self._failed(None if isinstance(e, PeerGoneError | ClosedError) else str(e))

    def _lend_rows(
        self, request: int, first: int, rows: int, row_bytes: int, fill: Callable[[memoryview], None]
    ) -> bool:
        """Fill a region of lent memory with rows, and name it to the store. Returns whether it can be
        used."""
        memory = self._lent
        taken = memory.take(rows * row_bytes) if memory is not None else None
        if memory is None or taken is None:
            return False
        region, view = taken
        try:
            fill(view)
        except BaseException:
            memory.give_back([region])
            raise
        with self._sending:
            self.pipe.send_tensor(protocol.tag(request, first, rows, region), timeout=None)
        return True

    def _stage(self, nbytes: int) -> Any:
        """Memory that is not being sent."""
        import torch

        if self._stages and (len(self._stages) >= _STAGES or self._stages[0][1].done()):
            stage, transfer = self._stages.popleft()
            transfer.wait()
            flat = stage.view(-1)
            if flat.numel() >= nbytes:
                return flat
        return torch.empty(nbytes, dtype=torch.uint8)

    # -- the end -------------------------------------------------------------------------------

    def end(self) -> list[JobTask]:
        """Abort the pipe. Returns the gets of which pieces were to come."""
        gets: list[JobTask] = list(self._gets.values())
        self._gets.clear()
        self.pipe.abort()
        return gets

    def join(self, deadline: Deadline) -> None:
        """After :meth:`end`: wait for the thread, and release the memory."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(deadline.remaining())
        self._stages.clear()
