"""The floor of the time to the first token: KV that is in the engine's own blocks already.

An engine computes a prompt and frees its blocks, whose KV stays there. The same prompt is then added again,
and :class:`OwnBlocksScheduler` says that its first tokens are loaded: the engine takes the same blocks in the
same order, since it has no others, and computes the rest. With a transfer it takes as long at least, and the
bytes are copied once at least."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvplug.engine import BlockIds, Plain, Request, RequestEnd, SchedulerConnector, WorkerConnector

if TYPE_CHECKING:
    from torch import Tensor

    from kvplug.engine import SchedulerOutput

_COPIES = 5


class OwnBlocksScheduler(SchedulerConnector):
    """Promises tokens that are in the blocks already."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """How many of the next request's."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.num_tokens, False

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        pass

    def build_connector_meta(self, output: SchedulerOutput) -> Plain:
        return None

    def request_finished(
        self, request: Request, block_ids: BlockIds, end: RequestEnd
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def shutdown(self) -> None:
        pass


class OwnBlocksWorker(WorkerConnector):
    """Moves nothing."""

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        pass

    def start_load_kv(self) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_request_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        return frozenset(), frozenset()

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        return frozenset()

    def shutdown(self) -> None:
        pass


def copy_seconds(nbytes: int) -> float:
    """Seconds of one copy of so many bytes in this process, by one thread into memory that is there: the
    median of a few."""
    import torch

    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    taken = []
    for _ in range(_COPIES):
        began = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
