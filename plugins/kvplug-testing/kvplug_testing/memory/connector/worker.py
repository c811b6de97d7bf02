"""The worker side of the connector "memory"."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvplug import ClosedError, IntegrityError, KvplugError, TimeoutError
from kvplug.engine import (
    ConnectorContext,
    EntryGoneError,
    LayoutError,
    Plain,
    StalledError,
    WorkerConnector,
    gather,
    reason_of,
    scatter,
)
from kvplug.kit import Reason
from kvplug.net.wire import memory_of
from kvplug.transport import digest
from kvplug_testing.memory.connector.table import EntryTable, PromptEntry, kv_format_of

if TYPE_CHECKING:
    from torch import Tensor


class MemoryWorker(WorkerConnector):
    """Moves KV; see the drawing in :mod:`kvplug_testing.memory.connector`."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__()
        self._context = context
        group = context.cache.groups[0]
        self._layout, self._layer_names = group.layout, group.layer_names
        self._contact = context.config.control_address()
        self._caches: tuple[Tensor, ...] = ()
        self._plan: Mapping[str, Any] = {}
        self._loading: list[Mapping[str, Any]] = []
        """Background loads that earlier steps have begun."""
        self._saving: list[Mapping[str, Any]] = []
        self._begun: tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]] = ([], [])
        """Loads and saves of this step."""
        self._suspect: dict[int, int] = {}
        """Blocks that must not be saved, each with the step in which its load failed or may have failed."""
        self._failed_blocks: set[int] = set()
        self._has_failed = False
        self._closed = False
        self._table: EntryTable | None = None
        if context.config.require_role().produces:
            self._table = EntryTable(
                self._contact,
                engine_id=context.config.engine_id,
                kv_format=kv_format_of(context),
                max_bytes=context.config.buffer_size,
            )

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        missing = [name for name in self._layer_names if name not in kv_caches]
        if missing:
            raise LayoutError(f"register_kv_caches got no cache for {', '.join(missing)}")
        for name in self._layer_names:
            self._layout.check(kv_caches[name])
        self._caches = tuple(kv_caches[name] for name in self._layer_names)

    # -- one step ------------------------------------------------------------------------------

    def handle_preemptions(self, request_ids: frozenset[str]) -> None:
        for load in [load for load in self._loading if load["request"] in request_ids]:
            self._loading.remove(load)
            self._begun[0].append({**load, "tokens": ()})  # named as received, but nothing is written

    def bind_connector_metadata(self, metadata: Plain) -> None:
        super().bind_connector_metadata(metadata)
        assert isinstance(metadata, Mapping)
        self._plan = metadata
        heard = metadata["heard"]
        self._suspect = {block: step for block, step in self._suspect.items() if step > heard}
        self._suspect |= dict.fromkeys(metadata["doubted"], metadata["step"])
        for save in metadata["saves"]:
            is_spoilt = not self._suspect.keys().isdisjoint(save["blocks"])
            self._begun[1].append({**save, "tokens": ()} if is_spoilt else save)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._plan = {}

    def start_load_kv(self) -> None:
        loads = self._plan.get("loads", ())
        if loads and not self._caches:
            raise LayoutError("start_load_kv was called, and register_kv_caches was not: there is no cache")
        for load in loads:
            begun = {**load, "begun": time.monotonic()}
            if load["in_background"]:
                self._begun[0].append(begun)
                continue
            while not self._load(begun):
                time.sleep(0.001)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None  # start_load_kv has loaded every layer

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor) -> None:
        return None  # KV is saved when its request ends

    def wait_for_save(self) -> None:
        return None

    def get_finished(self, finished_request_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        loads, self._loading = self._loading, []
        saves, self._saving = self._saving, []
        waiting: list[Mapping[str, Any]] = []
        received: set[str] = set()
        for load in loads:
            if self._load(load):
                received.add(load["request"])
            else:
                waiting.append(load)
        for save in saves:
            self._save(save)
        (self._loading, self._saving), self._begun = self._begun, ([], [])
        self._loading += waiting
        return frozenset(save["request"] for save in saves), frozenset(received)

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        failed, self._failed_blocks = frozenset(self._failed_blocks), set()
        return failed

    def build_worker_metadata(self) -> Plain:
        has_failed, self._has_failed = self._has_failed, False
        return {"step": self._plan["step"]} if has_failed or self._plan["doubted"] else None

    def get_stats(self) -> Mapping[str, Any] | None:
        return self._context.stats.take()

    def shutdown(self) -> None:
        self._closed = True
        if self._table is not None:
            self._table.close()
        self._context.close()

    # -- copies --------------------------------------------------------------------------------

    def _load(self, load: Mapping[str, Any]) -> bool:
        """Copy an entry into a request's blocks. On any error, report the blocks. Returns whether the load
        has ended; if not, nothing of the entry comes.
        """
        began, nbytes = time.perf_counter(), 0
        start, end = load["start"], len(load["tokens"])
        try:
            if not load["tokens"]:
                raise ClosedError("its request was preempted")
            entry = EntryTable.at(self._contact).find(load["extra"], tuple(load["tokens"]))
            if entry is None:
                if self._closed:
                    raise ClosedError("the connector was shut down")
                if time.monotonic() - load["begun"] < self._context.options.stall_timeout_s:
                    return False
                raise StalledError(f"nothing of the prompt of request {load['request']} comes")
            self._verify(entry)
            for cache, (key, value) in zip(self._caches, entry.layers, strict=True):
                part = key[start:end], None if value is None else value[start:end]
                scatter(cache, self._layout, load["blocks"], start, *part)
                nbytes += part[0].nbytes + (0 if part[1] is None else part[1].nbytes)
        except KvplugError as e:
            self._fail(load, e)
        else:
            took = time.perf_counter() - began
            self._context.stats.record("load", nbytes, took, tokens=end - start)
        return True

    def _fail(self, load: Mapping[str, Any], error: KvplugError) -> None:
        self._context.stats.fail("load", reason_of(error))
        blocks = load["blocks"][load["start"] // self._layout.block_size :]
        self._failed_blocks.update(blocks)
        self._suspect |= dict.fromkeys(blocks, self._plan["step"])
        self._has_failed = True

    def _save(self, save: Mapping[str, Any]) -> None:
        """Copy the blocks of an ended request. Afterwards it is named as sent, and its blocks are free."""
        table, tokens = self._table, tuple(save["tokens"])
        assert table is not None
        is_stored = False
        if tokens:
            began = time.perf_counter()
            entry = self._entry((save["extra"], tokens), save["blocks"])
            try:
                table.put(entry, save["era"])
            except EntryGoneError:
                pass  # a reset has removed it
            except TimeoutError:
                self._context.stats.fail("save", Reason.NO_ROOM)
            except KvplugError as e:
                self._context.stats.fail("save", reason_of(e))
            else:
                is_stored = True
                took = time.perf_counter() - began
                self._context.stats.record("save", entry.nbytes, took, tokens=len(tokens))
        table.settle(save["ticket"], is_stored=is_stored)

    def _entry(self, key: tuple[bytes, tuple[int, ...]], blocks: tuple[int, ...]) -> PromptEntry:
        layers = tuple(gather(cache, self._layout, blocks, 0, len(key[1])) for cache in self._caches)
        return PromptEntry(key=key, layers=layers, digests=self._digests(layers))

    def _digests(self, layers: tuple[tuple[Tensor, Tensor | None], ...]) -> tuple[bytes, ...]:
        if not self._context.checksums:
            return ()
        name = self._context.checksums[0]
        return tuple(
            digest(name, *(memory_of(part) for part in layer if part is not None)) for layer in layers
        )

    def _verify(self, entry: PromptEntry) -> None:
        if entry.digests and self._digests(entry.layers) not in (entry.digests, ()):
            raise IntegrityError("the entry does not hash to what its producer stated: it is not used")
