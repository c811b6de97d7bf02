"""Entries with unique content in every part, and a comparison with returned entries."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import attrs

from kvplug.net.wire import copy_into, empty_like_meta, memory_of, meta_of
from kvplug.transport import Entry
from kvplug_testing.comparison import difference
from kvplug_testing.contract.pipe.content import tensor_of

SIZED = 32 << 10
"""Bytes of a :func:`sized` entry, without its keys, values, tokens, roi and the buffer's own data."""
_OVERHEAD = 3 << 10

_tags = itertools.count(1)


@attrs.frozen(kw_only=True, eq=False)
class Put:
    """An inserted entry, which must be returned unchanged."""

    tokens: Sequence[int]
    roi: Sequence[bool] | None = None
    key: Any = None
    value: Any = None
    hidden: Any = None
    extra: bytes = b""
    metadata: dict[str, Any] = attrs.field(factory=dict)

    @property
    def mask(self) -> list[bool]:
        return [True] * len(self.tokens) if self.roi is None else [bool(each) for each in self.roi]

    @property
    def counts(self) -> tuple[int, ...]:
        """The tokens under the roi."""
        return tuple(itertools.compress(self.tokens, self.mask))

    @property
    def layers(self) -> list[tuple[int, Any, Any]]:
        """Each layer's number, key and value."""
        layered = self.value if self.key is None else self.key
        count = 0 if layered is None else layered.shape[0]
        keys, values = ([None] * count if part is None else [*part] for part in (self.key, self.value))
        return [*zip(range(count), keys, values, strict=True)]


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return len([*same])


def entry(
    tokens: Sequence[int],
    *,
    roi: Sequence[bool] | None = None,
    extra: bytes = b"",
    layers: int = 2,
    dtype: str = "float32",
    hidden: int = 6,
    without: Sequence[str] = (),
) -> Put:
    """A unique entry: no two entries share a tensor's content.

    Args:
        hidden: elements of the hidden states.
        without: names of parts that are ``None``.
    """
    tag = next(_tags)
    shape = (layers, len(tokens), 2, 4)
    parts = {"key": shape, "value": shape, "hidden": (hidden,)}
    made = {
        name: None if name in without else tensor_of(dtype, of, seed=3 * tag + number)
        for number, (name, of) in enumerate(parts.items())
    }
    return Put(tokens=tokens, roi=roi, extra=extra, metadata={"tag": tag, "of": [b"it", None]}, **made)


def sized(tokens: Sequence[int], **given: Any) -> Put:
    """An entry of about :data:`SIZED` bytes, for :func:`capacity_for`. At most 8 tokens."""
    return entry(tokens, hidden=SIZED // 4, **given)


def capacity_for(count: int) -> int:
    """A capacity for ``count`` sized entries and not one more. At most 8."""
    return count * (SIZED + _OVERHEAD)


def unlike(put: Put, got: Entry, *, without: Sequence[str] = ()) -> str:
    """A description of how a returned entry differs from the inserted one; empty if it is equal.

    Args:
        without: names of parts that a sink received, and that must be ``None``.
    """
    import torch

    header, parts = got.header, ("key", "value", "hidden")
    tokens, roi = torch.tensor([int(token) for token in put.tokens]), torch.tensor(put.mask)
    wanted = {
        "tokens": [tokens, roi],
        "header": [tokens, roi, len(put.layers), put.metadata],
        **{name: None if name in without else getattr(put, name) for name in parts},
    }
    came = {
        "tokens": [got.tokens, got.roi],
        "header": [header.tokens, header.roi, header.num_layers, header.metadata],
        **{name: getattr(got, name) for name in parts},
    }
    return difference(wanted, came)


class SinkError(Exception):
    """The error that a test's sink raises."""


class Sink:
    """Keeps a copy of each layer. It can wait or raise at ``"begin"`` or at a layer."""

    def __init__(self, wait_at: Any = None, raise_at: Any = None) -> None:
        self.headers: list[Entry.Header] = []
        self.layers: list[tuple[int, Any, Any]] = []
        self.waits, self.go_on = threading.Event(), threading.Event()
        self._wait_at, self._raise_at = wait_at, raise_at

    def begin(self, header: Entry.Header) -> None:
        self.headers.append(header)
        self._at("begin")

    def layer(self, index: int, key: Any, value: Any) -> None:
        self._at(index)
        self.layers.append((index, _copy(key), _copy(value)))

    def _at(self, place: Any) -> None:
        if place == self._wait_at:
            self.waits.set()
            self.go_on.wait(60)
        if place == self._raise_at:
            raise SinkError(f"the sink of the test fails ({place})")

    def unlike(self, put: Put) -> str:
        """A description of how the layers differ from the inserted ones; empty if they are equal."""
        return difference(put.layers, self.layers)


def answered(
    tokens: Sequence[int] | None, entry: Entry, *, min_tokens: int = 0, sink: Sink | None = None
) -> Entry:
    """An entry, which must have the form of one that answers a call with these tokens.

    Args:
        min_tokens: of ``select``; 0: one is a prefix of the other, as for ``drop_select``.
    """
    header, came, roi = entry.header, entry.header.tokens, entry.header.roi
    assert entry.tokens.equal(came) and entry.roi.equal(roi), "tokens and roi are not those of the header"
    assert isinstance(header.metadata, dict), f"the metadata is {header.metadata!r}"
    form = [str(came.dtype), str(roi.dtype), came.ndim, [*roi.shape]]
    assert form == ["torch.int64", "torch.bool", 1, [*came.shape]], f"tokens and roi have the form {form}"
    key = came[roi].tolist()
    common = len(key) if tokens is None else shared(tokens, key)
    wanted = min_tokens or (1 if tokens is None else max(1, min(len(tokens), len(key))))
    assert common >= wanted, f"a call for {tokens} got an entry of {key[:20]}"
    layers, numbers = [(entry.key, entry.value)], [*range(header.num_layers)]
    if sink is not None:
        assert [index for index, *_ in sink.layers] == numbers, (
            f"the sink was given {len(sink.layers)} layers"
        )
        layers = [(key, value) for _, key, value in sink.layers]
    shape = [len(came)] if sink is not None else [len(numbers), len(came)]
    wrong = [part.shape for pair in layers for part in pair if part is not None]
    wrong = [each for each in wrong if [*each[: len(shape)]] != shape]
    assert not wrong, f"{len(came)} tokens in {len(numbers)} layers came as {wrong}"
    return entry


def _copy(tensor: Any) -> Any:
    """Not ``clone``, which does not know every dtype."""
    if tensor is None:
        return None
    copy = empty_like_meta(meta_of(tensor))
    copy_into(copy, memory_of(tensor))
    return copy
