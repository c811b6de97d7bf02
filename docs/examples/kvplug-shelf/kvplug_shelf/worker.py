"""The worker side: it reads files into blocks, and writes blocks into files.

Nothing here raises because a file could not be read or written: that is a load error, after which the engine
computes the blocks itself, or a prompt that is not saved. Both are counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvplug import KvplugError
from kvplug.engine import (
    ConnectorContext,
    EntryGoneError,
    LayoutError,
    Plain,
    WorkerConnector,
    gather,
    reason_of,
    scatter,
)
from kvplug_shelf.folder import read, write

if TYPE_CHECKING:
    from torch import Tensor


class ShelfWorker(WorkerConnector):
    def __init__(self, context: ConnectorContext) -> None:
        super().__init__()
        self._context, self._rank = context, context.parallelism.worker_rank
        (group,) = context.cache.groups
        self._layout, self._layer_names = group.layout, group.layer_names
        self._caches: list[Tensor] = []
        self._meta: Mapping[str, Any] = {}
        self._saves: list[Mapping[str, Any]] = []
        self._suspect: dict[int, int] = {}
        """Blocks whose load failed, each with its step, until the scheduler side has the report."""
        self._failed_blocks: set[int] = set()
        self._failed: list[str] = []
        self._unsaved: list[str] = []

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        missing = [name for name in self._layer_names if name not in kv_caches]
        if missing:
            raise LayoutError(f"register_kv_caches got no cache of {', '.join(missing)}")
        self._caches = [kv_caches[name] for name in self._layer_names]
        for cache in self._caches:
            self._layout.check(cache)

    # -- one step ------------------------------------------------------------------------------

    def bind_connector_metadata(self, metadata: Plain) -> None:
        super().bind_connector_metadata(metadata)
        assert isinstance(metadata, Mapping)
        self._meta = metadata
        self._suspect = {block: step for block, step in self._suspect.items() if step > metadata["heard"]}
        for save in metadata["saves"]:
            # A step may have been planned before it was known that a load of the step before has failed.
            is_right = self._suspect.keys().isdisjoint(save["blocks"])
            self._saves.append(save if is_right else {**save, "blocks": ()})

    def start_load_kv(self) -> None:
        loads = self._meta.get("loads", ())
        if loads and not self._caches:
            raise LayoutError("start_load_kv came before register_kv_caches: there is no cache")
        for load in loads:
            self._load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None  # start_load_kv has loaded every layer

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor) -> None:
        return None  # a prompt is saved when its request has ended

    def wait_for_save(self) -> None:
        return None

    def get_finished(self, finished_request_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        saves, self._saves = self._saves, []
        for save in saves:
            self._save(save)
        return frozenset(save["request"] for save in saves), frozenset()

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        failed, self._failed_blocks = frozenset(self._failed_blocks), set()
        return failed

    def build_worker_metadata(self) -> Plain:
        said = {"step": self._meta["step"], "failed": self._failed, "unsaved": self._unsaved}
        self._failed, self._unsaved = [], []
        return said if said["failed"] or said["unsaved"] else None

    def get_stats(self) -> Mapping[str, Any] | None:
        return self._context.stats.take()

    def shutdown(self) -> None:
        self._context.close()

    # -- files ---------------------------------------------------------------------------------

    def _file(self, of: Mapping[str, Any]) -> Path:
        return Path(f"{of['entry']}.{self._rank}")

    def _load(self, load: Mapping[str, Any]) -> None:
        began, nbytes, start, end = time.perf_counter(), 0, load["start"], load["end"]
        try:
            for cache, (key, value) in zip(self._caches, read(self._file(load)), strict=True):
                parts = [part if part is None else part[start:end].to(cache.device) for part in (key, value)]
                scatter(cache, self._layout, load["blocks"], start, *parts)
                nbytes += sum(part.nbytes for part in parts if part is not None)
        except KvplugError as e:
            blocks = load["blocks"][start // self._layout.block_size :]
            self._failed_blocks.update(blocks)
            self._suspect |= dict.fromkeys(blocks, self._meta["step"])
            self._failed.append(load["request"])
            self._context.stats.fail("load", reason_of(e))
        else:
            self._context.stats.record("load", nbytes, time.perf_counter() - began, tokens=end - start)

    def _save(self, save: Mapping[str, Any]) -> None:
        began, nbytes, num_tokens = time.perf_counter(), 0, save["num_tokens"]
        if not save["blocks"]:
            self._unsaved.append(save["request"])
            return
        layers = [gather(cache, self._layout, save["blocks"], 0, num_tokens) for cache in self._caches]
        here = [(key.cpu(), value if value is None else value.cpu()) for key, value in layers]
        nbytes = sum(part.nbytes for layer in here for part in layer if part is not None)
        try:
            write(self._file(save), here)  # keys and values of each layer: [tokens, heads, head size]
        except EntryGoneError:
            self._unsaved.append(save["request"])  # forgotten meanwhile, as was wanted
        except KvplugError as e:
            self._unsaved.append(save["request"])
            self._context.stats.fail("save", reason_of(e))
        else:
            self._context.stats.record("save", nbytes, time.perf_counter() - began, tokens=num_tokens)
