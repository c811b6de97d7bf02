"""The identity of an engine's pages: the root of their chains, and the series of each worker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvplug import ConfigError
from kvplug.engine import ChainMemo, KVCacheConfig, LayoutError, ModelInfo, Parallelism
from kvplug.net.wire import from_plain, to_plain
from kvplug.transport import PageFormat, Series, WireError
from kvplug_lookup.connector.groups import Groups

_VERSION = 1
"""Version of the namespace and the shard. Pages of another version are misses."""


def model_facts(model: ModelInfo) -> dict[str, Any]:
    """Everything besides the tokens that determines their KV: all fields of the model but its name."""
    facts = attrs.asdict(model)
    del facts["name"]
    return facts


def namespace_of(model: ModelInfo) -> bytes:
    """The namespace of the chains of a model's tokens."""
    return json.dumps([_VERSION, model_facts(model)], sort_keys=True).encode()


@attrs.frozen
class Shard:
    """The part of a model whose KV one worker holds."""

    format: PageFormat
    first_layer: int
    end_layer: int
    tensor_rank: int
    tensor_size: int

    def series(self, seal: bytes, salt: bytes = b"") -> Series:
        """The series of this worker's pages in a store with this seal.

        ``salt``: separates the pages from those with another salt.
        """
        place = json.dumps(
            [_VERSION, self.first_layer, self.end_layer, self.tensor_rank, self.tensor_size]
        ).encode()
        return Series(self.format, place + salt, seal)

    def differences(self, theirs: Shard) -> list[str]:
        """The fields that differ, one string each; empty if the pages are interchangeable."""
        found = list(self.format.differences(theirs.format))
        for name in ("first_layer", "end_layer", "tensor_rank", "tensor_size"):
            ours, other = getattr(self, name), getattr(theirs, name)
            if ours != other:
                found.append(f"{name}: ours {ours}, theirs {other}")
        return found


def shard_of(
    cache: KVCacheConfig, model: ModelInfo, parallelism: Parallelism, page_tokens: int | None
) -> Shard:
    """The shard of this worker.

    Raises:
        ConfigError: pages of this size would divide a kernel's blocks, or lose some of them.
        UnsupportedError: the cache's groups have different block layouts.
    """
    groups = Groups(cache)
    try:
        tokens = groups.layout.page_tokens(page_tokens)
        groups.check_page(tokens)
    except LayoutError as e:
        raise ConfigError(f"options.lookup.page_tokens: {e}") from e
    return Shard(
        groups.layout.page_format(model.dtype, len(groups.layer_names), tokens),
        parallelism.first_layer,
        model.num_layers if parallelism.end_layer is None else parallelism.end_layer,
        parallelism.tensor_rank,
        parallelism.tensor_size,
    )


class PromptChains:
    """The chains of one request's pages. Each is computed once, when its tokens are known."""

    def __init__(self, namespace: bytes, extra: bytes, page_tokens: int, memo: ChainMemo) -> None:
        self.root = ChainMemo.root(namespace, extra)
        self._memo = memo
        self._page_tokens = page_tokens
        self._chains: list[bytes] = []

    def upto(self, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """The chains of all whole pages among the first ``num_tokens``, or more. Do not modify the list."""
        wanted = num_tokens // self._page_tokens
        if wanted > len(self._chains):
            end, tokens = wanted * self._page_tokens, token_ids
            if len(token_ids) - end >= self._page_tokens:  # it holds at least one more page
                tokens = token_ids[:end]
            self._chains = self._memo.chains_of(self.root, tokens, self._page_tokens, self._chains)
        return self._chains

    def parent_of(self, page: int) -> bytes:
        """The chain of the page before ``page``. Earlier chains must be known."""
        return self._chains[page - 1] if page else self.root


def hello_of(shard: Shard, model: ModelInfo, store: str, seal: bytes) -> dict[str, Any]:
    """The first message of a worker to peers that follow or use its store."""
    return {"shard": to_plain(shard), "model": model_facts(model), "store": store, "seal": seal}


@attrs.frozen
class StoreHello:
    """A worker's description of its store."""

    shard: Shard
    model: Mapping[str, Any]
    store: str
    """The store's name, which selects the client in another process."""
    seal: bytes

    @classmethod
    def from_plain(cls, plain: Any) -> StoreHello:
        """Read a result of :func:`hello_of`.

        Raises:
            WireError: it is malformed, or reports an error.
        """
        if isinstance(plain, Mapping) and "error" in plain:
            raise WireError(f"the peer does not serve pages: {plain['error']!r:.200}")
        return from_plain(plain, cls, "hello of a store")

    def differences(self, model: ModelInfo) -> list[str]:
        """The model facts that differ, one string each; empty if the pages are interchangeable."""
        ours = model_facts(model)
        return [
            f"model.{name}: ours {ours.get(name)!r}, theirs {self.model.get(name)!r:.200}"
            for name in sorted(ours.keys() | self.model.keys())
            if ours.get(name) != self.model.get(name)
        ]

    def series(self) -> Series:
        """The series of the pages in that store."""
        return self.shard.series(self.seal)
