"""A connector that moves nothing and does what a test orders: installed as a stranger's plugin.

Tests copy this file into a folder of its own with metadata, as the module ``kvplug_probe``, so that every
process of an engine finds it by its entry point. Orders and facts are files in the folder that its options
name: that works in whichever process of the engine a side of it lives.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvplug.engine import (
    BlockIds,
    ConnectorContext,
    ConnectorSpec,
    Plain,
    Request,
    RequestEnd,
    SchedulerConnector,
    SchedulerOutput,
    WorkerConnector,
    WorkerOutput,
)
from kvplug.net.wire import decode, encode
from kvplug.transport import hookimpl, option

if TYPE_CHECKING:
    from torch import Tensor

KVPLUG_API = (1, 0)

HANDSHAKE = {
    "text": "Grüße, 世界",
    "bytes": bytes(range(256)),
    "numbers": [0, -1, 2**62, 0.5],
    "nested": [[], [None, True, [b"\x00", {"deep": [1, {2: b"two"}]}]]],
    3: "a key that is a number",
}
"""The handshake metadata of each worker, beside its rank."""


@hookimpl
def kvplug_connectors() -> list[ConnectorSpec]:
    return [
        ConnectorSpec(
            name="probe",
            factory="kvplug_probe:ProbeScheduler",
            worker_factory="kvplug_probe:ProbeWorker",
            options="kvplug_probe:ProbeOptions",
            summary="Does what a test orders",
        )
    ]


@attrs.frozen(kw_only=True)
class ProbeOptions:
    """Options of the connector "probe"."""

    folder: str = option(help="The folder of orders and facts.")


class Folder:
    """Orders and facts: one plain value in each file, put there whole."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def put(self, name: str, value: Any = None) -> None:
        part = self.path / f"{name}.{os.getpid()}.part"
        part.write_bytes(encode(value))
        part.rename(self.path / name)

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    def read(self, name: str) -> Any:
        return decode((self.path / name).read_bytes())

    def take(self, name: str) -> Any:
        """Remove and return the value; ``None`` if there is none."""
        if not self.has(name):
            return None
        value = self.read(name)
        (self.path / name).unlink()
        return value

    @contextlib.contextmanager
    def ordered(self, name: str) -> Iterator[None]:
        """While the block runs, there is this order."""
        self.put(name)
        try:
            yield
        finally:
            self.take(name)


def config(folder: Folder) -> dict[str, Any]:
    """A kv-transfer-config for the connector "probe"."""
    options = {"probe": {"folder": str(folder.path)}}
    return {
        "kv_connector": "KvplugConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connector": "probe", "options": options},
    }


class ProbeScheduler(SchedulerConnector):
    """Keeps the blocks of every request while it is ordered to."""

    def __init__(self, context: ConnectorContext) -> None:
        self._folder = Folder(context.options.folder)
        self._folder.put("scheduler pid", os.getpid())

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Plain]) -> None:
        self._folder.put("handshake", dict(metadata))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        pass

    def build_connector_meta(self, output: SchedulerOutput) -> Plain:
        self._folder.put("step", output.step)
        return None

    def update_connector_output(self, output: WorkerOutput) -> None:
        for request_id in sorted(output.finished_sending):
            self._folder.put(f"sent {request_id}")

    def request_finished(
        self, request: Request, block_ids: BlockIds, end: RequestEnd
    ) -> tuple[bool, dict[str, Any] | None]:
        keeps = self._folder.has("keep")
        self._folder.put("finished", [request.request_id, keeps])
        return keeps, None

    def has_pending_push_work(self) -> bool:
        return self._folder.has("pending")

    def shutdown(self) -> None:
        pass


class ProbeWorker(WorkerConnector):
    """Names requests as it is ordered to."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__()
        self._folder = Folder(context.options.folder)
        self._rank = context.parallelism.worker_rank

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        pass

    def get_handshake_metadata(self) -> Plain:
        return {**HANDSHAKE, "rank": self._rank, "pid": os.getpid()}

    def start_load_kv(self) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_request_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        return frozenset(self._folder.take(f"name sent {self._rank}") or ()), frozenset()

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        return frozenset()

    def shutdown(self) -> None:
        pass
