"""A proxy for vLLM servers: a prefill server computes each prompt, and a decode server answers.

    python docs/examples/vllm_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

For demonstrations and tests. It needs aiohttp, which vLLM installs. Requests go to the servers in turn. A
prefill that fails or takes longer than ``--prefill-timeout-s`` is skipped: the decode server computes the
prompt. The ``kv_transfer_params`` of prefill's answer are passed on to decode. A client that hangs up ends
its request at the server, too. Every program that reaches the proxy can use the servers.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import web

PATHS = ("/v1/completions", "/v1/chat/completions")
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""``kv_transfer_params`` of a prefill request, as vLLM's NIXL connector expects them."""
PASSED_ON = ("Authorization", "Content-Type", "X-Request-Id", "X-data-parallel-rank")

_log = logging.getLogger("vllm_proxy")


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request for prefill: it generates one token, and keeps the KV for another server."""
    asked = {name: body[name] for name in body if name not in ("stream_options", "min_tokens")}
    ones = {name: 1 for name in ("max_completion_tokens", "n") if name in asked}
    params = {**(asked.get("kv_transfer_params") or {}), **REMOTE_DECODE}
    return asked | ones | {"max_tokens": 1, "stream": False, "kv_transfer_params": params}


class Proxy:
    def __init__(self, prefill: Sequence[str], decode: Sequence[str], prefill_timeout_s: float) -> None:
        self._pairs = itertools.cycle(itertools.product(prefill, decode))
        self._prefill_timeout = aiohttp.ClientTimeout(total=prefill_timeout_s)
        self._session: aiohttp.ClientSession

    def application(self) -> web.Application:
        application = web.Application(client_max_size=32 << 20)
        application.cleanup_ctx.append(self._connected)
        application.router.add_get("/health", self._on_health)
        for path in PATHS:
            application.router.add_post(path, self._on_request)
        return application

    async def _connected(self, _: web.Application) -> AsyncIterator[None]:
        # A server may close a connection that is kept just when the next request is sent.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=3.0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            yield

    async def _on_health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _on_request(self, request: web.Request) -> web.StreamResponse:
        try:
            body = dict(await request.json())
        except (ValueError, TypeError) as e:
            raise web.HTTPBadRequest(text=f"the body is not a JSON object: {e}") from e
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        headers.setdefault("X-Request-Id", str(uuid.uuid4()))
        prefill, decode = next(self._pairs)
        params = await self._prefill(prefill + request.path, prefill_body(body), headers)
        if params:
            body["kv_transfer_params"] = params
        try:
            async with self._session.post(decode + request.path, json=body, headers=headers) as answer:
                return await self._pass_on(request, answer)
        except aiohttp.ClientConnectorError as e:
            raise web.HTTPBadGateway(text=f"decode server {decode}: {e}") from e

    async def _prefill(self, url: str, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        try:
            async with self._session.post(
                url, json=body, headers=headers, timeout=self._prefill_timeout
            ) as answer:
                answer.raise_for_status()
                return (await answer.json()).get("kv_transfer_params") or {}
        except (aiohttp.ClientError, OSError, ValueError) as e:  # OSError: also TimeoutError
            _log.warning("no prefill at %s, decode computes the prompt: %s", url, str(e) or type(e).__name__)
            return {}

    async def _pass_on(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status)
        response.headers["Content-Type"] = answer.headers.get("Content-Type", "application/json")
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL", help="prefill servers")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="decode servers")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="default %(default)s")
    parser.add_argument("--prefill-timeout-s", type=float, default=30.0, metavar="SECONDS")
    given = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    proxy = Proxy(given.prefill, given.decode, given.prefill_timeout_s)
    web.run_app(proxy.application(), host=given.host, port=given.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
