"""The worker side: gathers blocks into entries of a lookup buffer, and scatters entries into blocks.

A failed read or insert raises nothing. After a failed read the engine computes the blocks itself; after a
failed insert the prompt is not saved. Both are counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvplug import HandshakeError, IntegrityError, KvplugError
from kvplug.engine import ConnectorContext, KVLayout, LayoutError, PeerLink, Plain, WorkerConnector, reason_of
from kvplug.net.wire.token_ids import unpack_tokens
from kvplug.transport import DEFAULT_TIMEOUT, Deadline, Entry, LookupBuffer, Timeout
from kvplug_lookup.simple.entries import Entries, digest_of
from kvplug_lookup.simple.peer import PeerBuffer, group_of

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


class SimpleWorker(WorkerConnector):
    """Holds this rank's buffer if its engine saves; else reaches the buffer of the peer's worker."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__()
        self._context = context
        group = group_of(context)
        self._layout, self._layer_names = group.layout, group.layer_names
        self._caches: list[Tensor] = []
        self._meta: Mapping[str, Any] = {}
        self._saves: list[Mapping[str, Any]] = []
        self._suspect: dict[int, int] = {}
        """Blocks whose load failed, each with its step, until the scheduler side has received the report."""
        self._failed_blocks: set[int] = set()
        self._failed: list[str] = []
        self._is_refused = False
        self._loading: tuple[str, float] | None = None
        """The request whose load is under way, and when it began."""
        self._entries = Entries(context) if context.config.require_role().produces else None
        self._source: Entries | PeerBuffer = self._entries or PeerBuffer(context)
        """The source of this rank's loads."""

    @property
    def contact(self) -> str:
        """The contact for peers; empty if the engine only loads."""
        return "" if self._entries is None else self._entries.contact

    @property
    def link(self) -> PeerLink | None:
        """The latest link to the peer's worker; ``None`` if there was none."""
        return self._source.link if isinstance(self._source, PeerBuffer) else None

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        missing = [name for name in self._layer_names if name not in kv_caches]
        if missing:
            raise LayoutError(f"register_kv_caches got no cache for {', '.join(missing)}")
        self._caches = [kv_caches[name] for name in self._layer_names]
        for cache in self._caches:
            self._layout.check(cache)

    # -- one step ------------------------------------------------------------------------------

    def bind_connector_metadata(self, metadata: Plain) -> None:
        super().bind_connector_metadata(metadata)
        assert isinstance(metadata, Mapping)
        self._meta = metadata
        if metadata["is_reset"] and self._entries is not None:
            self._entries.forget()
        self._suspect = {
            block: step for block, step in self._suspect.items() if step > metadata["last_report"]
        }
        for save in metadata["saves"]:
            # This step may have been planned before the scheduler side knew of a failed load.
            is_right = self._suspect.keys().isdisjoint(save["blocks"])
            self._saves.append(save if is_right else {**save, "blocks": ()})

    def start_load_kv(self) -> None:
        loads = self._meta.get("loads", ())
        if loads and not self._caches:
            raise LayoutError("there is no cache to load into: call register_kv_caches first")
        deadline = Deadline.after(self._context.options.load_timeout_s)
        try:
            for load in loads:
                self._loading = load["request"], time.perf_counter()
                self._load(load, deadline)
        finally:
            self._loading = None

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None  # start_load_kv has loaded every layer

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor) -> None:
        return None  # a prompt is saved when its request has ended

    def wait_for_save(self) -> None:
        return None

    def get_finished(self, finished_request_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        saves, self._saves = self._saves, []
        for save in saves:
            if save["blocks"] and self._entries is not None:
                self._save(save, self._entries)
        return frozenset(save["request"] for save in saves), frozenset()

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        failed, self._failed_blocks = frozenset(self._failed_blocks), set()
        return failed

    def build_worker_metadata(self) -> Plain:
        failed, self._failed = self._failed, []
        report = {"step": self._meta["step"], "failed": failed, "is_refused": self._is_refused}
        return report if failed else None

    def get_stats(self) -> Mapping[str, Any] | None:
        return self._context.stats.take()

    def get_status(self) -> Mapping[str, Plain]:
        loading = self._loading  # one at a time
        if loading is None:
            return {"loads": []}
        request_id, began = loading
        load = {"request_id": request_id, "source": "peer", "seconds": time.perf_counter() - began}
        return {"loads": [load]}

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._source.reached(Deadline.after(timeout, self._context.config.connect_timeout_s), retry=True)

    def shutdown(self) -> None:
        self._context.peers.close()
        self._source.close()
        self._context.close()

    # -- entries -------------------------------------------------------------------------------

    def _load(self, load: Mapping[str, Any], deadline: Deadline) -> None:
        began, tokens, first = time.perf_counter(), unpack_tokens(load["tokens"]), load["start"]
        num_tokens = len(tokens)
        sink = Blocks(self._caches, self._layout, load["blocks"], first, num_tokens)
        try:
            buffer, sink.checksum = self._source.reached(deadline)
            buffer.select(
                tokens, extra=load["extra"], min_tokens=num_tokens, sink=sink, timeout=deadline.remaining()
            )
        except KvplugError as e:
            _log.warning(
                "request %.100r: could not load %d tokens: %s", load["request"], num_tokens - first, e
            )
            blocks = load["blocks"][first // self._layout.block_size :]
            self._failed_blocks.update(blocks)
            self._suspect |= dict.fromkeys(blocks, self._meta["step"])
            self._failed.append(load["request"])
            self._is_refused = isinstance(e, HandshakeError)
            self._context.stats.fail("load", reason_of(e))
            self._note("load", load, began, str(reason_of(e)))
        else:
            took = time.perf_counter() - began
            self._context.stats.record("load", sink.nbytes, took, tokens=num_tokens - first)
            self._note("load", load, began)

    def _note(self, op: str, plan: Mapping[str, Any], began: float, reason: str = "") -> None:
        """Record the span of a load or save."""
        parent = plan["traceparent"]
        self._context.spans.record(op, plan["request"], began, parent=parent, reason=reason)

    def _save(self, save: Mapping[str, Any], entries: Entries) -> None:
        began, tokens, extra = time.perf_counter(), unpack_tokens(save["tokens"]), save["extra"]
        try:
            if entries.holds(tokens, extra):
                return
            layers = [self._layout.gather(cache, save["blocks"], 0, len(tokens)) for cache in self._caches]
            entries.add(tokens, extra, layers)
        except KvplugError as e:
            _log.warning("request %.100r: could not save the prompt: %s", save["request"], e)
            self._context.stats.fail("save", reason_of(e))
            self._note("save", save, began, str(reason_of(e)))
        else:
            nbytes = sum(part.nbytes for layer in layers for part in layer if part is not None)
            took = time.perf_counter() - began
            self._context.stats.record("save", nbytes, took, tokens=len(tokens))
            self._note("save", save, began)


@attrs.define
class Blocks(LookupBuffer.Sink):
    """Verifies each layer of an entry, then scatters it into a request's blocks."""

    caches: Sequence[Tensor]
    layout: KVLayout
    block_ids: Sequence[int]
    start: int
    end: int
    checksum: str | None = None
    """The hash algorithm of the entry; ``None``: integrity is off."""
    nbytes: int = 0
    """Bytes of KV that were scattered."""
    digests: Sequence[bytes] = ()

    def begin(self, header: Entry.Header) -> None:
        digests = header.metadata.get("digests")
        self.digests = digests if isinstance(digests, list) else ()
        if header.num_layers != len(self.caches) or len(self.digests) != len(self.caches):
            raise IntegrityError(
                f"entry {header.entry_id} has {header.num_layers} layers and {len(self.digests)} digests, but"
                f" the cache has {len(self.caches)} layers"
            )

    def layer(self, index: int, key: Tensor | None, value: Tensor | None) -> None:
        if key is None:
            raise IntegrityError(f"layer {index} of an entry has no key and is not used")
        if digest_of(self.checksum, (key, value)) != (self.digests[index] if self.checksum else b""):
            raise IntegrityError(f"layer {index} of an entry does not match its digest and is not used")
        parts = [part if part is None else part[self.start : self.end] for part in (key, value)]
        self.layout.scatter(self.caches[index], self.block_ids, self.start, *parts)
        self.nbytes += sum(part.nbytes for part in parts if part is not None)
