"""The health of a program over HTTP, for the probes of Kubernetes, containers and load balancers.

``GET /live``: 200, or 503 if only a restart helps. ``GET /ready``: 200 if a program that connects now would
be served, else 503. The body is a JSON object with the reasons.

All clients are served by one thread with asyncio, so silent and slow ones cost no thread; with http.server
each would need its own. A second thread runs the check, which may wait for a lock. The answers come anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

import attrs

from kvplug.config.addresses import Address
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.log import LogEvent
from kvplug.net.threads import BackgroundThread
from kvplug.net.trust.addresses import BoundSocket

_log = logging.getLogger(__name__)

_MAX_CLIENTS: Final = 64
"""The most connections at once. A further one ends the oldest. As many may wait to be accepted."""
_MAX_REQUEST_BYTES: Final = 8192
_REQUEST_S: Final = 5.0
"""How long one connection may take, from the first byte to the last."""
_CHECK_S: Final = 0.5
"""How long an answer waits for the check. A probe often has one second."""
_STUCK_S: Final = 60.0
"""How long a check may take before only a restart helps."""
_CLOSE_S: Final = 2.0


@attrs.frozen(kw_only=True)
class Health:
    """The result of a check. No reasons: all is well."""

    not_live: tuple[str, ...] = ()
    """Why only a restart helps."""
    not_ready: tuple[str, ...] = ()
    """Why a program that connects now would not be served, in addition to the reasons in ``not_live``."""
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    """Plain values that are shown too. Anyone who can connect can read them."""


class HealthServer:
    """Answers ``GET /live`` and ``GET /ready`` at a TCP address until it is closed."""

    def __init__(self, address: Address) -> None:
        """Until :meth:`watch` is called, the program is not ready.

        Raises:
            ConfigError, AddressInUseError, TransportError, ResourceExhaustedError: it cannot listen there.
        """
        self._check: Callable[[], Health] = lambda: Health(not_ready=("it is starting",))
        self._asked: queue.SimpleQueue[asyncio.Future[Health] | None] = queue.SimpleQueue()
        self._checking: asyncio.Future[Health] | None = None
        self._began = 0.0
        self._clients: dict[asyncio.Task[Any], None] = {}  # oldest first
        self._stopped = asyncio.Event()
        with NamedExhaustion(f"listening for health probes at {address}"):
            self._bound = BoundSocket.listen(address)
            self._loop = asyncio.new_event_loop()
            self._loop.set_exception_handler(lambda _, context: _log.debug("health probes: %s", context))
            self._threads = [
                BackgroundThread(self._run, name="kvplug-health", stop=self._stop),
                BackgroundThread(self._run_checks, name="kvplug-health-check", stop=self._stop),
            ]
            for thread in self._threads:
                thread.start()
        address = self._bound.address
        LogEvent.LISTENING.log(_log, f"listening for health probes at {address}", address=address)

    def watch(self, check: Callable[[], Health]) -> None:
        """Answer from now on what ``check`` returns. It is called in one thread, and may wait."""
        self._check = check

    def close(self) -> None:
        """Stop listening, and hang up on all clients. Idempotent."""
        self._stop()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _stop(self) -> None:
        self._asked.put(None)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stopped.set)

    # -- the thread of the check -----------------------------------------------------------------

    def _run_checks(self) -> None:
        while (asked := self._asked.get()) is not None:
            try:
                found = self._check()
            except Exception as e:
                _log.warning("the check of this program's health failed", exc_info=True)
                found = Health(not_ready=(f"its check failed: {type(e).__name__}",))
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(asked.set_result, found)

    # -- the thread of the clients ---------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._serve_client, sock=self._bound.sock, limit=_MAX_REQUEST_BYTES, backlog=_MAX_CLIENTS
        )
        await self._stopped.wait()
        server.close()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await asyncio.sleep(0)  # the loop closes the sockets

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._clients) >= _MAX_CLIENTS:
            oldest = next(iter(self._clients))
            del self._clients[oldest]  # more may connect before it has ended
            oldest.cancel()
        self._clients[task] = None
        try:
            async with asyncio.timeout(_REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._response(head))
                await writer.drain()
        except (asyncio.CancelledError, EOFError, asyncio.LimitOverrunError, TimeoutError, OSError):
            pass  # this server ends the connection, or the client has
        finally:
            self._clients.pop(task, None)
            writer.close()

    async def _response(self, head: bytes) -> bytes:
        method, _, rest = head.decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if path not in ("/live", "/ready"):
            return _response(HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, "Allow: GET, HEAD\r\n")
        health = await self._health()
        reasons = health.not_live + (health.not_ready if path == "/ready" else ())
        body = json.dumps({"ok": not reasons, "reasons": reasons, **health.facts}) + "\n"
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return _response(status, "Content-Type: application/json\r\n", body, has_body=method == "GET")

    async def _health(self) -> Health:
        """Return the result of a check; clients that ask at the same time share it."""
        if self._checking is None or self._checking.done():
            self._checking, self._began = self._loop.create_future(), time.monotonic()
            self._asked.put(self._checking)
        try:
            return await asyncio.wait_for(asyncio.shield(self._checking), _CHECK_S)
        except TimeoutError:
            waited = time.monotonic() - self._began
            why = (f"the store has not answered for {waited:.0f} s",)
            return Health(not_live=why) if waited > _STUCK_S else Health(not_ready=why)


def _response(status: HTTPStatus, headers: str = "", body: str = "", *, has_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n{headers}Cache-Control: no-store\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return (head + (body if has_body else "")).encode("ascii")
