"""The lookup buffer: KV entries found by (extra, token prefix).

The names follow the ``kv_lookup_buffer`` that engines have, without its defects: tolerant comparison of ids,
linear scans, and waits without end. ``Tensor`` is ``torch.Tensor``; this module does not import torch.
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
    """An entry's header and its five parts, in the order in which they are sent."""

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
        """Plain values that the producer attached, such as hashes and the producer's dtype."""

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
    """The last hidden states, of shape [num_tokens, hidden_size] or any other that the producer chooses."""


class LookupBuffer(abc.ABC):
    """KV entries found by their tokens.

    Law. An entry's key is (extra, tokens under roi). ``extra`` must be equal; token ids are compared
    exactly, as integers. An entry matches a query if one token sequence is a non-empty prefix of the
    other; the oldest match wins. A miss never returns another entry's data. The cost of a search grows with
    the length of the prompt, not with the number of entries.

    ``input_tokens=None`` asks for the oldest entry with an equal ``extra``.

    Callers. Connectors. Any number of threads may call any methods at once. A buffer has one end that holds
    the entries, and any number of ends that reach it over pipes. Both kinds are LookupBuffers and obey the
    same law.
    """

    class Sink(Protocol):
        """Takes an entry layer by layer instead of whole, for callers that scatter each layer on arrival."""

        def begin(self, header: Entry.Header) -> None:
            """Prepare for an entry, before its first layer. Raise to refuse it; it stays in the buffer."""

        def layer(self, index: int, key: Tensor | None, value: Tensor | None) -> None:
            """Take one whole layer: tensors of shape [num_tokens, num_kv_heads, head_size].

            The tensors are valid only during the call. Raise to end the transfer; the entry stays.
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

        Waits while ``buffer_size`` leaves no room.

        Raises:
            UnsupportedError: this is a reaching end, but the implementation stores only at the holding end.
            TimeoutError: there was no room in time; nothing was stored.
            CapacityError: the entry is larger than ``buffer_size``. Raised at once.
            ValueError: the shapes do not fit together, or the roi selects no token.
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
            TimeoutError: no matching entry was inserted in time.
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
        """Read the entry that shares the longest prefix with the query, without removing it.

        The entry is leased while it is read, so it cannot be dropped or evicted meanwhile. If there is a
        ``sink``, it receives the layers one by one, and the result's ``key`` and ``value`` are ``None``.

        Raises:
            EntryGoneError: no entry shares at least ``min_tokens`` tokens. Raised without waiting.
            TimeoutError: the transfer did not end in time.
        """

    @abc.abstractmethod
    def match(self, input_tokens: Tokens, roi: Roi | None = None, *, extra: bytes = b"") -> int:
        """Return the length of the longest prefix that the query shares with any entry.

        Counts tokens under the roi. Returns 0 if no entry matches, without waiting for one.
        """

    @property
    @abc.abstractmethod
    def is_lost(self) -> bool:
        """Whether every further call raises, because this end was closed or its peer is gone.

        Never waits. The owner of a lost reaching end must close it and make another.
        """

    @abc.abstractmethod
    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Close gracefully: a reaching end informs the store; the store lets transfers finish.

        Idempotent; waiting calls raise ``ClosedError``. The pipes that were passed in are closed too.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Close at once. Idempotent, never blocks."""


class LookupEndpoint(abc.ABC):
    """What a lookup buffer's factory returns."""

    class Store(LookupBuffer):
        """The end that holds the entries."""

        @abc.abstractmethod
        def attach(self, signal: Pipe, data: Pipe) -> None:
            """Serve one reaching end over its own two pipes, until it closes or dies, or this end closes.

            ``signal`` carries requests and CPU tensors; ``data`` carries the entry's tensors. ``data`` may be
            a device's pipe, where a blocked receive would block every thread, so requests never wait there.
            """

    @attrs.frozen(kw_only=True)
    class Context:
        """For the factory of a lookup buffer, which returns a ``LookupEndpoint``."""

        options: Any
        """An instance of the spec's options class, or ``None``."""
        buffer_size: int
        """The most bytes of tensors that the buffer may hold."""
        device: str = "cpu"
        """The device on which received tensors are placed."""
        timeout_s: float = 30.0
        """The default timeout of a call, in seconds."""
        max_message_bytes: int | None = None
        """The largest entry for which a reaching end allocates memory; ``None``: only the available memory of
        the process or device limits it."""

    @abc.abstractmethod
    def hold(self) -> LookupEndpoint.Store:
        """Make a new, empty store in this process."""

    @abc.abstractmethod
    def reach(self, signal: Pipe, data: Pipe) -> LookupBuffer:
        """Make an end that reaches a store. The other ends of these pipes must be attached to that store."""
