"""The entries that one worker of a saving engine holds, and serves to its peers.

Each worker listens at its own address for two kinds of peers. A worker that loads opens two pipes, and
reaches the lookup buffer over them. A scheduler side moves no tensors: it sends prompts over the link itself,
and gets the number of tokens of each that the buffer holds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvplug import ClosedError, PeerGoneError, TimeoutError
from kvplug.engine import ConnectorContext, PeerLink
from kvplug.net.wire.checksum import digest
from kvplug.net.wire.tensors import memory_of
from kvplug.net.wire.token_ids import unpack_tokens
from kvplug.transport import Deadline, LookupBuffer, Pipe, WireError

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

LOAD: Final = "load entries"
MATCH: Final = "match prompts"
"""The purposes of links."""
CLOSE_S: Final = 1.0

Layer = tuple["Tensor", "Tensor | None"]
"""Key and value, each [tokens, heads, head size]; latent attention has no value."""


class Entries:
    """A lookup buffer that evicts its oldest entries when it is full, and a server for its peers."""

    def __init__(self, context: ConnectorContext) -> None:
        self._device = context.config.device
        self._checksum = next(iter(context.checksums), None)
        self._endpoint = context.open_lookup()
        self._store = self._endpoint.hold()
        """:meth:`forget` replaces it."""
        self._inserted: dict[int, tuple[Sequence[int], bytes]] = {}
        """Tokens and ``extra`` of the inserted entries by id, oldest first."""
        try:
            self.contact = context.peers.serve(self._serve).contact
        except BaseException:
            self._store.abort()
            raise

    def add(self, tokens: Sequence[int], extra: bytes, layers: Sequence[Layer]) -> None:
        """Insert the KV of a prompt.

        Raises:
            TimeoutError: there is no room, since peers are reading the entries.
            CapacityError: the KV is larger than the whole buffer.
        """
        import torch

        key = torch.stack([key for key, _ in layers])
        values = [value for _, value in layers if value is not None]
        value = torch.stack(values) if values else None
        metadata = {"digests": [digest_of(self._checksum, layer) for layer in layers]}
        parts = tokens, None, key, value, None
        for oldest in [*self._inserted.values(), None]:
            try:
                entry_id = self._store.insert(*parts, extra=extra, metadata=metadata, timeout=0)
                break
            except TimeoutError:
                if oldest is None:
                    raise
                self._drop(*oldest)
        self._inserted[entry_id] = tokens, extra
        while not self.holds(*self._inserted[first := next(iter(self._inserted))]):
            del self._inserted[first]  # the buffer may drop entries by itself

    def holds(self, tokens: Sequence[int], extra: bytes) -> bool:
        """Whether the KV of all these tokens is held."""
        return self._store.match(tokens, extra=extra) == len(tokens)

    def _drop(self, tokens: Sequence[int], extra: bytes) -> None:
        """Drop the oldest entry that matches and that no peer is reading, if there is one."""
        with suppress(TimeoutError):
            dropped = self._store.drop_select(tokens, extra=extra, timeout=0)
            self._inserted.pop(dropped.header.entry_id, None)

    def reached(self, deadline: Deadline, *, retry: bool = False) -> tuple[LookupBuffer, str | None]:
        """Return the buffer, and the hash algorithm of its entries. Does not wait, unlike a peer's buffer."""
        return self._store, self._checksum

    def forget(self) -> None:
        """Replace the buffer by an empty one, and abort the loads of peers."""
        old, self._store = self._store, self._endpoint.hold()
        self._inserted.clear()
        old.abort()

    def close(self) -> None:
        """Close the buffer; peers have a moment to finish their loads."""
        self._store.close(CLOSE_S)

    def _serve(self, link: PeerLink, deadline: Deadline) -> None:
        if link.agreement.purpose == LOAD:
            self._store.attach(*open_pipes(link, self._device, deadline))
        elif link.agreement.purpose == MATCH:
            with suppress(PeerGoneError, ClosedError):
                while True:
                    tokens, extra = _prompt_in(link.channel.recv(timeout=None))
                    link.channel.send(self._store.match(tokens, extra=extra))
        else:
            _log.warning(
                "%s has the purpose %r, which connector 'simple' does not know", link, link.agreement.purpose
            )


def open_pipes(link: PeerLink, device: str, deadline: Deadline) -> tuple[Pipe, Pipe]:
    """The signal pipe and the data pipe of a lookup buffer; both ends call it."""
    signal = link.open_pipe("signal", timeout=deadline.remaining())
    try:
        return signal, link.open_pipe("data", device=device, timeout=deadline.remaining())
    except BaseException:
        signal.abort()
        raise


def _prompt_in(message: object) -> tuple[Sequence[int], bytes]:
    """Raises WireError."""
    if isinstance(message, dict):
        tokens, extra = message.get("tokens"), message.get("extra")
        if type(tokens) is bytes and type(extra) is bytes:
            return unpack_tokens(tokens), extra
    raise WireError("a peer sent a malformed prompt")


def digest_of(checksum: str | None, layer: Layer) -> bytes:
    """The hash of a layer's key and value; empty without a checksum."""
    if checksum is None:
        return b""
    return digest(checksum, *(memory_of(part.cpu()) for part in layer if part is not None))
