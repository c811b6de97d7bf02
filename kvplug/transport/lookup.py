"""The lookup buffer: KV entries found by (extra, token prefix).

The name and the verbs are those of the family's ``kv_lookup_buffer``; the defects (tolerant
comparison of ids, linear scans, waits without end) are not. ``Tensor`` is ``torch.Tensor``; this
module does not import torch.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import attrs

from kvplug.net.deadline import DEFAULT_TIMEOUT, Timeout

if TYPE_CHECKING:
    from torch import Tensor

    from kvplug.transport.pipe import Pipe

    Tokens: TypeAlias = Sequence[int] | Tensor | Any
    """Token ids: a sequence of ints, a 1-d integer tensor or a 1-d integer numpy array."""
    Roi: TypeAlias = Sequence[bool] | Tensor | Any
    """A boolean mask of the same length as the tokens."""


@attrs.frozen(kw_only=True, eq=False)
class Entry:
    """The five parts of an entry, in the order in which they travel, and its header."""

    @attrs.frozen(kw_only=True, eq=False)
    class Header:
        """The part of an entry that is known before its tensors arrive."""

        entry_id: int
        """Unique in its buffer, ascending with age."""
        tokens: Tensor
        """int64, shape [num_tokens]: as inserted, not masked."""
        roi: Tensor
        """bool, shape [num_tokens]."""
        num_layers: int
        """First dimension of key and value; 0 when both are ``None``."""
        metadata: dict[str, Any]
        """Plain values the producer attached (say, hashes and the producer's dtype)."""

    header: Entry.Header
    """What is known before the tensors arrive."""
    tokens: Tensor
    """int64, shape [num_tokens]: as inserted, not masked."""
    roi: Tensor
    """bool, shape [num_tokens]: the tokens that the key is made of."""
    key: Tensor | None
    """shape [num_layers, num_tokens, num_kv_heads, head_size]; any dtype."""
    value: Tensor | None
    """Like ``key``; ``None`` where a model has one latent tensor per token."""
    hidden: Tensor | None
    """The last hidden states, shape [num_tokens, hidden_size] or as the producer likes."""


class LookupBuffer(abc.ABC):
    """KV entries found by what their tokens are.

    Law. An entry's key is (extra, tokens under roi). ``extra`` must be equal; token ids are compared
    exactly, as integers. An entry matches a query if one token sequence is a non-empty prefix of the
    other; the oldest match wins. A miss is a miss, never another's data. Finding costs in the length
    of the prompt, not in the number of entries.

    ``input_tokens=None`` asks for any entry: the oldest one with an equal ``extra``.

    Callers. Connectors. Every method may be called from any thread, and several at once. A buffer has
    two ends: the one that holds the entries, and any number of ends that reach it over pipes; both
    are LookupBuffers, and the law is the same at both.
    """

    class Sink(Protocol):
        """Takes an entry layer by layer instead of whole, for callers that scatter it at once."""

        def begin(self, header: Entry.Header) -> None:
            """Called before the first layer. Raising refuses the entry, which stays in the buffer."""

        def layer(self, index: int, key: Tensor | None, value: Tensor | None) -> None:
            """One layer has arrived whole: shapes [num_tokens, num_kv_heads, head_size].

            The tensors are only valid during the call. Raising ends the transfer; the entry stays.
            """

    @abc.abstractmethod
    def insert(
        self,
        input_tokens: Tokens,
        roi: Roi | None,
        key: Tensor | None,
        value: Tensor | None,
        hidden: Tensor | None,
        *,
        extra: bytes = b"",
        metadata: dict[str, Any] | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> int:
        """Store a copy of an entry and return its id. ``roi=None`` means every token.

        Waits while the budget has no room.

        Raises:
            UnsupportedError: this is a reaching end, and the implementation stores at the holding end only.
            TimeoutError: no room in time; nothing was stored.
            CapacityError: the entry is larger than the whole budget; at once.
            ValueError: shapes that do not belong together; no token under the roi.
        """

    @abc.abstractmethod
    def drop_select(
        self,
        input_tokens: Tokens | None,
        roi: Roi | None = None,
        *,
        extra: bytes = b"",
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Entry:
        """Take the oldest matching entry out of the buffer; wait for one until ``timeout``.

        Only one caller receives it. If that caller dies before the transfer is complete, the entry is
        available again.

        Raises:
            TimeoutError: no matching entry came.
        """

    @abc.abstractmethod
    def select(
        self,
        input_tokens: Tokens,
        roi: Roi | None = None,
        *,
        extra: bytes = b"",
        min_tokens: int = 1,
        sink: LookupBuffer.Sink | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Entry:
        """Read the entry that shares the longest prefix with the query, and leave it where it is.

        The entry is leased while it is read: it cannot be dropped or evicted under the reader. With a
        ``sink`` the layers go there one by one and the result's ``key`` and ``value`` are ``None``.

        Raises:
            EntryGoneError: nothing shares at least ``min_tokens`` tokens; at once, without waiting.
            TimeoutError: the transfer did not end in time.
        """

    @abc.abstractmethod
    def match(self, input_tokens: Tokens, roi: Roi | None = None, *, extra: bytes = b"") -> int:
        """Length of the longest common prefix with any entry that is held, whatever follows it.

        Counts tokens under the roi. Does not wait for an entry; 0 where there is none.
        """

    @property
    @abc.abstractmethod
    def is_lost(self) -> bool:
        """Whether every call from now on raises: it was closed here, or its other end is gone.

        Never waits. The owner of a lost reaching end closes it and makes another.
        """

    @abc.abstractmethod
    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """End politely: a reaching end informs the store; the store lets transfers finish.

        Idempotent; calls that wait raise ``ClosedError``. The pipes that were passed in are closed too.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """End at once. Idempotent, never blocks."""


class LookupEndpoint(abc.ABC):
    """What a lookup buffer's factory returns."""

    class Store(LookupBuffer):
        """The end that holds the entries."""

        @abc.abstractmethod
        def attach(self, signal: Pipe, data: Pipe) -> None:
            """Serve one reaching end over its own two pipes, until it closes, dies or this end closes.

            ``signal`` carries requests and CPU tensors, ``data`` the entry's tensors (it may be a device's
            pipe, on which a blocked receive would block every thread: so requests never wait there).
            """

    @attrs.frozen(kw_only=True)
    class Context:
        """For the factory of a lookup buffer, which returns a ``LookupEndpoint``."""

        options: Any
        """An instance of the spec's options class, or ``None``."""
        buffer_size: int
        """Bytes of tensors it may hold."""
        device: str = "cpu"
        """Where the tensors of entries are put that are received."""
        timeout_s: float = 30.0
        """Seconds that a call waits where it says nothing else."""
        max_message_bytes: int | None = None
        """The largest entry for which an end that reaches a store takes memory; ``None``: what the process or
        device can have."""

    @abc.abstractmethod
    def hold(self) -> LookupEndpoint.Store:
        """A new, empty store in this process."""

    @abc.abstractmethod
    def reach(self, signal: Pipe, data: Pipe) -> LookupBuffer:
        """An end that reaches a store, to which the other ends of these pipes are attached."""
