"""The proxy's requests: prefill, decode, and what it says about itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from kvplug_vllm.proxy.servers import Server, ServerFailedError, text_of

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession, ClientTimeout
    from aiohttp.web import Application, Request, StreamResponse

_log = logging.getLogger("kvplug_vllm.proxy")

PATHS = ("/v1/completions", "/v1/chat/completions")
REMOTE_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""``kv_transfer_params`` of a prefill request: the fields that the proxies of vLLM's examples send."""

_Fields = Mapping[str, msgspec.Raw]
"""Names and values of a JSON object; the values are still JSON."""
_NULL = msgspec.Raw(b"null")
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens")
_OF_ONE_HOP = frozenset(
    [
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ]
)
"""Headers that are not passed on. A body is sent on with its own length, or in chunks."""


@attrs.frozen
class Settings:
    """What the command line says. All times in seconds, sizes in bytes."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    prefill_timeout_s: float = 30.0
    """For the whole prefill of a request, at one server or, if that one fails, the next ones."""
    silence_timeout_s: float = 600.0
    """How long a decode server may send nothing, and a client take nothing."""
    connect_timeout_s: float = 3.0
    health_interval_s: float = 2.0
    health_timeout_s: float = 5.0
    max_body: int = 32 << 20
    """Of a client's request, and of a prefill server's answer."""


@attrs.define
class _Passed:
    """The part of an answer that a client has."""

    num_bytes: int = 0
    is_whole: bool = False

    def add(self, chunk: bytes, length: int | None) -> None:
        self.num_bytes += len(chunk)
        # Many clients hang up after the last event of a stream, before its last chunk.
        self.is_whole = self.num_bytes == length or chunk.endswith(b"data: [DONE]\n\n")


class Proxy:
    """The state of a proxy that runs in one event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.prefill = [Server("prefill", url) for url in settings.prefill]
        self.decode = [Server("decode", url) for url in settings.decode]
        self.counts: Counter[str] = Counter()
        """Requests by what became of them: served, failed, aborted by the client, refused."""
        self.skipped: Counter[str] = Counter()
        """Prefills that did not happen, by reason."""
        self._turns = itertools.count(1)
        self._session: ClientSession

    def application(self) -> Application:
        from aiohttp import web

        app = web.Application(client_max_size=self.settings.max_body)
        app.cleanup_ctx.append(self._connected)
        app.router.add_get("/health", self._on_health)
        app.router.add_get("/status", self._on_status)
        app.router.add_get("/v1/models", self._on_models)
        for path in PATHS:
            app.router.add_post(path, self._on_request)
        return app

    # -- health ---------------------------------------------------------------------------------

    async def _connected(self, _: Application) -> AsyncIterator[None]:
        """The connections and the checks, for as long as the application runs."""
        import aiohttp

        # A connection that is kept may be closed by the server just when the next request is sent.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as self._session:
            servers = [*self.prefill, *self.decode]
            await asyncio.gather(*map(self._check, servers))  # so that the first request finds them
            checks = [asyncio.create_task(self._check_always(server)) for server in servers]
            yield
            for check in checks:
                check.cancel()
            await asyncio.gather(*checks, return_exceptions=True)

    async def _check_always(self, server: Server) -> None:
        while True:
            await asyncio.sleep(self.settings.health_interval_s)
            await self._check(server)

    async def _check(self, server: Server) -> None:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=self.settings.health_timeout_s)
        url = f"{server.url}/health"
        try:
            async with self._session.get(url, timeout=timeout, allow_redirects=False) as answer:
                if answer.status == 200:
                    server.take_in()
                else:
                    server.take_out(f"/health answered {answer.status}")
        except TimeoutError:
            server.take_out(f"/health did not answer in {self.settings.health_timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as e:
            server.take_out(text_of(e))

    def _next(self, servers: Sequence[Server], tried: Sequence[Server] = ()) -> Server | None:
        """The server with the fewest requests under way; among equals the one that has waited longest."""
        left = [server for server in servers if server.is_up and server not in tried]
        chosen = min(left, key=lambda server: (server.outstanding, server.chosen_last), default=None)
        if chosen is not None:
            chosen.chosen_last = next(self._turns)
        return chosen

    # -- requests -------------------------------------------------------------------------------

    async def _on_request(self, request: Request) -> StreamResponse:
        from aiohttp import web

        try:
            raw = await asyncio.wait_for(request.read(), self.settings.silence_timeout_s)
        except web.HTTPRequestEntityTooLarge:
            self.counts["refused"] += 1
            return _error(413, f"the body is larger than {self.settings.max_body} bytes (--max-body-mib)")
        except TimeoutError:
            self.counts["refused"] += 1
            return _error(408, f"the body has not come in {self.settings.silence_timeout_s:g} s")
        try:
            body = _fields_of(raw)
        except msgspec.ValidationError as e:
            self.counts["refused"] += 1
            return _error(400, f"the body is JSON, but no object: {e}")
        except (ValueError, RecursionError) as e:
            self.counts["refused"] += 1
            return _error(400, f"the body is not JSON: {e}")
        headers = _passed_on(request.headers, "content-encoding")  # it is decoded here
        if "X-Request-Id" not in request.headers:
            headers["X-Request-Id"] = str(uuid.uuid4())
        passed = _Passed()
        try:
            params = await self._prefill(request.path, body, headers)
            if params:
                raw = msgspec.json.encode({**body, "kv_transfer_params": params})
            return await self._decode(request, raw, headers, passed)
        except asyncio.CancelledError:
            # The client has hung up: with the whole answer, or before.
            self.counts["served" if passed.is_whole else "aborted"] += 1
            raise

    async def _prefill(self, path: str, body: _Fields, headers: Mapping[str, str]) -> _Fields:
        """The ``kv_transfer_params`` of a prefill server's answer; empty if it has none, or none answered."""
        raw = msgspec.json.encode(prefill_body(body))
        tried: list[Server] = []
        reason, problem = "no server is up", ""
        until = time.monotonic() + self.settings.prefill_timeout_s
        while (server := self._next(self.prefill, tried)) is not None:
            tried.append(server)
            try:
                with server.request():
                    answer = self._ask(server, path, raw, headers)
                    async with asyncio.timeout(until - time.monotonic()):
                        status, said = await server.unless_down(answer, 0.0)
            except TimeoutError:
                server.failures += 1
                reason, problem = "slow", f"{server}: no answer in {self.settings.prefill_timeout_s:g} s"
                break
            except ServerFailedError as e:
                reason, problem = "failed", str(e)
                continue
            if status == 200:
                return _object_of(_object_of(said).get("kv_transfer_params", _NULL))
            reason, problem = f"status {status}", f"{server} answered {status}"
            break
        self.skipped[reason] += 1
        _log.warning("no prefill, decode computes the prompt: %s", problem or reason)
        return {}

    async def _ask(
        self, server: Server, path: str, raw: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """The status of a prefill server's answer, and its body."""
        # It is read here, so it must not be compressed.
        headers = _passed_on(headers, "accept-encoding") | {"Accept-Encoding": "identity"}
        timeout = self._timeout(self.settings.prefill_timeout_s)
        async with self._session.post(
            server.url + path, data=BytesIO(raw), headers=headers, timeout=timeout, allow_redirects=False
        ) as answer:
            said = bytearray()
            async for chunk in answer.content.iter_any():
                said += chunk
                if len(said) > self.settings.max_body:
                    raise ServerFailedError(
                        f"{server}: the answer is larger than {self.settings.max_body} bytes"
                    )
            return answer.status, bytes(said)

    async def _decode(
        self, request: Request, raw: bytes, headers: Mapping[str, str], passed: _Passed
    ) -> StreamResponse:
        """A decode server's answer, passed on. The next one is asked if a server has not begun to answer."""
        tried: list[Server] = []
        problem = "no decode server is up"
        while (server := self._next(self.decode, tried)) is not None:
            tried.append(server)
            timeout = self._timeout(self.settings.silence_timeout_s)
            with contextlib.suppress(ServerFailedError), server.request():
                sending = self._session.request(
                    request.method,
                    server.url + request.path,
                    data=BytesIO(raw) if raw else None,
                    headers=headers,
                    timeout=timeout,
                    allow_redirects=False,
                )
                try:
                    answer = await server.unless_down(sending, self.settings.health_timeout_s)
                except ServerFailedError as e:
                    problem = str(e)
                    _log.warning("%s; the next decode server is asked", e)
                    raise
                async with answer:
                    return await self._pass_on(request, server, answer, passed)
        self.counts["failed"] += 1
        return _error(502 if tried else 503, problem)

    async def _pass_on(
        self, request: Request, server: Server, answer: ClientResponse, passed: _Passed
    ) -> StreamResponse:
        from aiohttp import web

        response = web.StreamResponse(status=answer.status, headers=_passed_on(answer.headers))
        response.content_length = answer.content_length
        await response.prepare(request)
        try:
            while chunk := await server.unless_down(answer.content.readany(), self.settings.health_timeout_s):
                async with asyncio.timeout(self.settings.silence_timeout_s):
                    await response.write(chunk)
                passed.add(chunk, answer.content_length)
            async with asyncio.timeout(self.settings.silence_timeout_s):
                await response.write_eof()
            self.counts["served"] += 1
        except ServerFailedError as e:  # the client has a part of the answer: no other server can go on
            _log.warning("the answer breaks off: %s", e)
            server.failures += 1
            self.counts["failed"] += 1
            if answer.content_type == "text/event-stream":
                with contextlib.suppress(ConnectionError, TimeoutError):
                    async with asyncio.timeout(self.settings.connect_timeout_s):
                        await response.write(b"data: " + _error_body(502, str(e)) + b"\n\n")
            _hang_up(request)
        except (ConnectionError, TimeoutError):  # the client is gone, or takes nothing
            self.counts["aborted"] += 1
            _hang_up(request)
        return response

    def _timeout(self, silence_s: float) -> ClientTimeout:
        import aiohttp

        return aiohttp.ClientTimeout(
            total=None, sock_connect=self.settings.connect_timeout_s, sock_read=silence_s
        )

    # -- about itself ---------------------------------------------------------------------------

    async def _on_health(self, _: Request) -> StreamResponse:
        from aiohttp import web

        if any(server.is_up for server in self.decode):
            return web.json_response({"status": "ok"})
        return _error(503, "no decode server is up")

    async def _on_status(self, _: Request) -> StreamResponse:
        from aiohttp import web

        shown = ("url", "is_up", "problem", "outstanding", "requests", "failures")
        about = {
            role: [{name: getattr(server, name) for name in shown} for server in servers]
            for role, servers in (("prefill", self.prefill), ("decode", self.decode))
        }
        counts = {name: self.counts[name] for name in ("served", "failed", "aborted", "refused")}
        return web.json_response({"requests": counts, "prefills_skipped": self.skipped, **about})

    async def _on_models(self, request: Request) -> StreamResponse:
        return await self._decode(request, b"", _passed_on(request.headers), _Passed())


def _fields_of(raw: bytes | msgspec.Raw) -> _Fields:
    """The fields of a JSON object. Their values are checked, and not made: 30 MB may have ten million.

    Raises:
        msgspec.ValidationError: it is other JSON.
        ValueError, RecursionError: it is not JSON, or nested too deeply.
    """
    return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])


def _object_of(raw: bytes | msgspec.Raw) -> _Fields:
    """The fields of a JSON object; empty for anything else."""
    try:
        return _fields_of(raw)
    except (ValueError, RecursionError):
        return {}


def prefill_body(body: _Fields) -> dict[str, Any]:
    """The request for a prefill server: one token, and its KV is for another server.

    ``kv_transfer_params`` of the client stay, where the names differ.
    """
    asked = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    ones = {name: 1 for name in ("max_completion_tokens", "n") if name in asked}
    params = {**_object_of(asked.get("kv_transfer_params", _NULL)), **REMOTE_DECODE}
    return asked | ones | {"stream": False, "max_tokens": 1, "kv_transfer_params": params}


def _passed_on(headers: Mapping[str, str], *but: str) -> dict[str, str]:
    # Headers that "Connection" names are of one hop too.
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    left_out = _OF_ONE_HOP.union(named, but)
    return {name: value for name, value in headers.items() if name.lower() not in left_out}


def _error_body(status: int, text: str) -> bytes:
    """As vLLM says it."""
    kind = "BadRequestError" if status < 500 else "ServiceUnavailableError"
    return json.dumps({"error": {"message": f"kvplug proxy: {text}", "type": kind, "code": status}}).encode()


def _error(status: int, text: str) -> StreamResponse:
    from aiohttp import web

    return web.Response(status=status, body=_error_body(status, text), content_type="application/json")


def _hang_up(request: Request) -> None:
    """Close the connection without the end of the answer, so that the client knows that it is not whole."""
    if request.transport is not None:
        request.transport.close()
