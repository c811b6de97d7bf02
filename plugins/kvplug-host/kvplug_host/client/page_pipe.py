"""The pipe between an end and the store in another process: pages of gets come, those of puts go."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kvplug import ClosedError, KvplugError, PeerGoneError
from kvplug.net.wire import memory_of_writable
from kvplug.transport import (
    BackgroundThread,
    Deadline,
    GetJob,
    JobTask,
    PageRequest,
    Pipe,
    Transfer,
    WireError,
)
from kvplug_host import protocol
from kvplug_host.client.piped_get import PipedGet
from kvplug_host.client.requests import Requests
from kvplug_host.protocol import Op

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
        failed: Callable[[BaseException | None], None],
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
        self._stages: deque[tuple[Any, Transfer | None]] = deque()
        self._gets: dict[int, PipedGet] = {}
        """Those of which pieces may come."""
        self._thread: threading.Thread | None = None

    # -- gets ----------------------------------------------------------------------------------

    def ask(self, number: int, get: PipedGet, job: GetJob, pages: PageRequest) -> bool:
        """Ask for the pages of a request. Returns whether there is a thread that receives them."""
        if not self._listens():
            return False

        def answer(message: Any) -> None:
            self._requests.forget(number)
            headers = protocol.field(message, "headers", list)
            if not all(type(each) is bytes for each in headers):
                raise WireError("a message of a store: headers are bytes")
            get.found(protocol.field(message, "found", bytes), headers)

        remaining = job.deadline.remaining()
        message = {
            "op": Op.FETCH,
            "keys": b"".join(pages.keys),
            "payload_bytes": pages.series.format.nbytes,
            "pieces": get.pieces.to_plain(),
            "timeout": protocol.MAX_FOR_S if remaining is None else remaining,
        }
        self._gets[number] = get
        if get.is_over or not self._requests.ask(number, get, message, answer, keep=True):
            self._gets.pop(number, None)
        return True

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
        import torch

        pipe = self.pipe
        stage = torch.empty(0, dtype=torch.uint8)
        try:
            while True:
                request, piece, rows, row_bytes = protocol.read_tag(pipe.recv_tensor(timeout=None))
                get = self._gets.get(request)
                if get is None:
                    if self._requests.over is not None:
                        return
                    raise WireError(f"a piece came of the request {request}, which is not under way")
                if not rows:
                    self._gets.pop(request, None)
                    get.all_sent()
                    continue
                sent = get.rows_of(piece, rows, row_bytes)
                if stage.numel() < rows * row_bytes:
                    stage = torch.empty(rows * row_bytes, dtype=torch.uint8)
                used = stage[: rows * row_bytes].view(rows, 1, row_bytes)
                pipe.recv_tensor(used, timeout=None)
                get.arrived(piece, sent, memory_of_writable(used), row_bytes)
        except (PeerGoneError, ClosedError):
            self._failed(None)
        except KvplugError as e:
            self._failed(e)
        except Exception as e:
            _log.exception("receiving pages failed")
            self._failed(e)

    # -- puts ----------------------------------------------------------------------------------

    def send_rows(
        self, request: int, first: int, rows: int, row_bytes: int, fill: Callable[[memoryview], None]
    ) -> None:
        """Send rows over the pipe, from memory that is used again."""
        try:
            with self._sending:
                flat = self._stage(rows * row_bytes)
            stage = flat[: rows * row_bytes].view(rows, 1, row_bytes)
            fill(memory_of_writable(stage))  # while another thread sends
            with self._sending:
                self.pipe.send_tensor(protocol.tag(request, first, rows, row_bytes), timeout=None)
                transfer = self.pipe.send_tensor(stage, timeout=None)
                self._stages.append((stage, transfer))
        except (PeerGoneError, ClosedError):
            self._failed(None)
        except KvplugError as e:
            self._failed(e)

    def _stage(self, nbytes: int) -> Any:
        """Memory that is not being sent."""
        import torch

        if self._stages and (len(self._stages) >= _STAGES or self._is_sent(self._stages[0][1])):
            stage, transfer = self._stages.popleft()
            if transfer is not None:
                transfer.wait()
            flat = stage.view(-1)
            if flat.numel() >= nbytes:
                return flat
        return torch.empty(nbytes, dtype=torch.uint8)

    @staticmethod
    def _is_sent(transfer: Transfer | None) -> bool:
        return transfer is None or transfer.done()

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
