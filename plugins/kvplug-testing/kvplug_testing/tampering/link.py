"""A link whose messages are changed before they are received: a store lies, or an end that reaches it."""

from __future__ import annotations

import random
from typing import Any, Final

from kvplug import KvplugError
from kvplug.net.wire import encode
from kvplug.transport import DEFAULT_TIMEOUT, Deadline, Pipe, StoreLink, Timeout
from kvplug_testing.tampering.falsehood import Falsehood, Falsifier
from kvplug_testing.tampering.lies import lie
from kvplug_testing.tampering.pipe import TamperingPipe

CHANNEL: Final = "channel"
PIPE: Final = "pipe"


class TamperingChannel:
    """A channel around another one. Only one thread receives, as a channel demands."""

    def __init__(self, channel: Any, falsehood: Falsehood | None = None) -> None:
        self._channel = channel
        self.falsifier = Falsifier(channel, channel.recv, falsehood, _changed, channel.close)

    def recv(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        self.falsifier.await_message(Deadline.after(timeout, 60.0))
        return self.falsifier.ready.popleft()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


def _changed(message: Any, rng: random.Random) -> tuple[Any, str]:
    while True:
        false, words = lie(message, rng)
        try:
            encode(false)
        except KvplugError:
            continue  # a peer cannot say that
        return false, words


class TamperingLink:
    """A link around another one: what comes over its channel, or over its first pipe, may be changed.

    Args:
        where: :data:`CHANNEL` or :data:`PIPE`.
    """

    def __init__(self, link: StoreLink, where: str = "", falsehood: Falsehood | None = None) -> None:
        self._link = link
        self._of_the_pipe = falsehood if where == PIPE else None
        self._channel = TamperingChannel(link.channel, falsehood if where == CHANNEL else None)
        self._pipe: TamperingPipe | None = None

    @property
    def channel(self) -> Any:
        return self._channel

    def open_pipe(self, label: str, *, device: str = "cpu", timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        pipe = self._link.open_pipe(label, device=device, timeout=timeout)
        if self._pipe is not None:
            return pipe
        self._pipe = TamperingPipe(pipe, self._of_the_pipe)
        return self._pipe

    def close(self) -> None:
        self._link.close()

    @property
    def num_received(self) -> dict[str, int]:
        """How many messages have come, over each."""
        in_pipe = self._pipe.num_received if self._pipe is not None else 0
        return {CHANNEL: self._channel.falsifier.num_received, PIPE: in_pipe}

    @property
    def said(self) -> str:
        """What was changed, in words."""
        return self._channel.falsifier.said or (self._pipe.said if self._pipe is not None else "")
