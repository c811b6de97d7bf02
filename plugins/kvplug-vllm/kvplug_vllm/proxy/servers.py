"""The servers behind the proxy: which are up, and what each has under way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterator
from typing import Literal, TypeVar

import attrs

_T = TypeVar("_T")
_log = logging.getLogger("kvplug_vllm.proxy")


class ServerFailedError(Exception):
    """A server did not answer a request: it is down, broke the connection, or was silent for too long."""


@attrs.define(eq=False)
class Server:
    """A server behind the proxy, and what is known of it."""

    role: Literal["prefill", "decode"]
    url: str
    problem: str = "not checked yet"
    """Why it gets no requests; empty: it is up."""
    outstanding: int = 0
    requests: int = 0
    failures: int = 0
    chosen_last: int = 0
    down: asyncio.Event = attrs.field(factory=asyncio.Event)

    def __str__(self) -> str:
        return f"{self.role} server {self.url}"

    @property
    def is_up(self) -> bool:
        return not self.problem

    def take_out(self, problem: str) -> None:
        if self.problem != problem:
            _log.warning("%s gets no requests: %s", self, problem)
        self.problem = problem
        self.down.set()

    def take_in(self) -> None:
        if self.problem:
            _log.info("%s gets requests", self)
        self.problem = ""
        self.down.clear()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """One request: counted, also while it lasts. A failure that is the server's takes it out."""
        self.outstanding += 1
        self.requests += 1
        try:
            yield
        except ServerFailedError:
            self.failures += 1
            raise
        finally:
            self.outstanding -= 1

    async def unless_down(self, answer: Awaitable[_T], grace_s: float) -> _T:
        """The answer. One that has not come ``grace_s`` after the server was found down is given up.

        Raises:
            ServerFailedError: that, or the connection failed.
        """
        import aiohttp

        task = asyncio.ensure_future(answer)
        down = asyncio.ensure_future(self.down.wait())
        try:
            await asyncio.wait((task, down), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait((task,), timeout=grace_s)
            if not task.done():
                raise ServerFailedError(f"{self} is down ({self.problem or 'for a while'})")
            return task.result()
        except aiohttp.ClientConnectorError as e:
            self.take_out(text_of(e))
            raise ServerFailedError(f"{self}: {text_of(e)}") from e
        except (aiohttp.ClientError, OSError, ValueError) as e:  # OSError: also TimeoutError
            raise ServerFailedError(f"{self}: {text_of(e)}") from e
        finally:
            down.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,), timeout=grace_s)


def text_of(error: BaseException) -> str:
    return str(error) or type(error).__name__
