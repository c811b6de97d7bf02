"""Any kvplug store as a secondary tier of vLLM's offloading: ``"secondary_tiers": [{"type": "KvplugTier",
"module_path": "kvplug_vllm.tier", ...}]``.

vLLM copies chunks of its KV cache into host memory (the primary tier) and from there into secondary tiers. It
calls a tier in its scheduler, where no call may wait. So the lookups of one step are sent together at its
end, and a later step gets their results.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import vllm
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvplug import Config, ConfigError, Registry, TimeoutError, build_page_cache
from kvplug.engine import FlatPage, ModelInfo
from kvplug.transport import Deadline, Job, Presence
from kvplug_vllm.logs import join_vllm
from kvplug_vllm.releases.tiers import check_tiers, hit_source_of

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

check_tiers()

ENGINE: Final = "vllm-tier"
_LEASE_S: Final = 60.0
"""The minimum time that a found page is not evicted, if the store has leases."""
_LATE_S: Final = 5.0
"""The time after its deadline that a job may still copy."""


def namespace_of(spec: OffloadingSpec, own: str) -> bytes:
    """What a chunk's bytes depend on besides vLLM's key, as in the file names of vLLM's own tier.

    It includes vLLM's release, since another one may order the inside of blocks differently. ``own``: the
    operator's addition.
    """
    mapper = FileMapper.from_offloading_spec(
        root_dir="",
        offloading_spec=spec,
        blocks_per_file=spec.blocks_per_chunk,
        parallel_agnostic=True,
    )
    known = {
        **mapper.get_run_config(),
        "rank": mapper.rank,
        "kv_cache_layout": spec.config.kv_cache_layout,
        "vllm": vllm.__version__,
        "namespace": own,
    }
    return json.dumps(known, sort_keys=True, separators=(",", ":")).encode()


def _member(kind: Any, key: str, value: Any) -> Any:
    """The member of the enumeration with this value."""
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(each.value) for each in kind)
        raise ConfigError(
            f"{key}: {value!r} was given; allowed is {allowed}", source="secondary_tiers"
        ) from None


class KvplugTier(SecondaryTierManager):
    """Keeps the chunks of vLLM's primary tier in a kvplug store.

    vLLM calls it from one thread at a time: its scheduler's, and since 0.33 also others, under vLLM's lock.
    Only :meth:`drain_jobs` and :meth:`shutdown` wait. After a job is reported as finished, the store no
    longer accesses its part of the primary tier. A failure of the store is a miss or a failed job.

    Raises (the constructor):
        kvplug.ConfigError: the configuration is wrong; lists every fault.
        kvplug.KvplugError: any other error of ``kvplug.build_page_cache``.

    Importing the module raises ``kvplug.UnsupportedError`` if vLLM's tiers have another interface.
    """

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        namespace: str = "",
        medium: str = Medium.STORAGE.value,
        locality: str | None = None,
        **config: Any,
    ) -> None:
        """
        Args:
            offloading_spec, primary_kv_view, tier_type, backpressure_detector: from vLLM. The view is [chunk,
                byte].
            namespace: what chunks depend on besides vLLM's keys, such as the model's revision. Without it,
                and without ``weights`` in ``config``, neither another engine nor this one after a restart
                finds them, since vLLM does not tell a tier which weights it loaded.
            medium: "CPU" or "STORAGE", by which vLLM counts hits and requests choose tiers.
            locality: "LOCAL" or "REMOTE", by which requests choose tiers.
            config: kvplug's own configuration.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if not isinstance(namespace, str):
            raise ConfigError(
                f"namespace: {namespace!r} was given; allowed is text", source="secondary_tiers"
            )
        parsed = Config.from_dict(config, "secondary_tiers")
        self.medium = _member(Medium, "medium", medium)
        if (source := hit_source_of(self.medium)) is not None:
            self.cache_hit_source = source
        self.locality = None if locality is None else _member(Locality, "locality", locality)
        registry = Registry.from_env()
        join_vllm(registry)
        self._timeout_s = parsed.timeout_s
        if not (namespace or parsed.weights):
            namespace = ModelInfo.unknown_weights(offloading_spec.config.model.name, os.urandom(16).hex())
        self.cache = build_page_cache(
            parsed, engine=ENGINE, namespace=namespace_of(offloading_spec, namespace), registry=registry
        )
        """The store of the chunks."""
        self.lookups = Lookups(self.cache.lookup, self.cache.release, max(_LEASE_S, 2 * parsed.timeout_s))
        self._bytes = primary_kv_view.cast("B")
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._num_live = 0
        self._finished: deque[tuple[JobResult, tuple[OffloadKey, ...]]] = deque()
        """Results, with the keys that are misses from now on."""

    # -- lookup --------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self.lookups.ask(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.lookups.forget(req_context.req_id)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.cache.touch(list(keys))

    # -- transfers -----------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self.cache.put)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self.cache.get)

    def _submit(self, transfer: TransferJob, submit: Callable[[Sequence[FlatPage]], Job[Any]]) -> None:
        keys, size, began = list(transfer.keys), self._block_size_bytes, time.monotonic()
        pages = [
            FlatPage(key=key, view=self._bytes[int(chunk) * size : (int(chunk) + 1) * size])
            for key, chunk in zip(keys, transfer.chunk_ids, strict=True)
        ]

        def ended(job: Job[Any]) -> None:
            results = job.results() or []
            moved = [key for key, reason in zip(keys, results, strict=True) if reason is None]
            missed = tuple(key for key, reason in zip(keys, results, strict=True) if reason is not None)
            is_load = transfer.is_promotion
            result = JobResult(
                job_id=transfer.job_id,
                success=not missed,
                successful_keys=tuple(moved) if is_load and missed and moved else None,
                transfer_time=time.monotonic() - began,
                transfer_bytes=len(moved) * size,
            )
            with self._lock:
                self._finished.append((result, missed if is_load else ()))
                self._num_live -= 1
                self._idle.notify_all()

        with self._lock:
            self._num_live += 1
        submit(pages).add_done_callback(ended)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while self._finished:
            result, missed = self._finished.popleft()
            self.lookups.miss(missed)  # otherwise vLLM would find and load them again, in vain
            results.append(result)
        return results

    def drain_jobs(self) -> None:
        """Wait for every job; each ends by its deadline.

        Raises:
            kvplug.TimeoutError: a copy hangs, long after its deadline: the primary tier must not be used.
        """
        deadline = Deadline.after(self._timeout_s + _LATE_S)
        with self._lock:
            while self._num_live:
                if not self._idle.wait(deadline.remaining()) and deadline.expired:
                    raise TimeoutError(f"{self._num_live} jobs of {self.cache!r} do not end")

    def shutdown(self) -> None:
        """Release all resources. Idempotent.

        Raises:
            kvplug.TimeoutError: a copy hangs: the primary tier must not be freed.
        """
        if not self.cache.close():
            raise TimeoutError(f"a copy of {self.cache!r} from or into the primary tier does not end")
        self._bytes.release()


@attrs.define(eq=False)
class _Answer:
    """The lookup of one key."""

    found: bool | None = None
    """``None``: not known yet."""
    is_asked: bool = False
    num_leases: int = 0
    requests: set[str] = attrs.field(factory=set)
    """The live requests that asked for the key."""


class Lookups:
    """Lookups of pages, sent together at the end of a step.

    An answer and its lease on the page are kept while a request that asked for the page is live. A request
    that begins after a miss asks again. Not thread-safe.
    """

    def __init__(
        self,
        lookup: Callable[..., Job[Presence]],
        release: Callable[[Sequence[bytes]], None],
        lease_s: float,
    ) -> None:
        """``lookup``, ``release``: methods of a page cache."""
        self._lookup = lookup
        self._release = release
        self._lease_s = lease_s
        self._answers: dict[OffloadKey, _Answer] = {}
        self._keys_of: dict[str, set[OffloadKey]] = {}
        self._new: list[OffloadKey] = []
        self._arrived: queue.SimpleQueue[list[tuple[OffloadKey, _Answer, bool]]] = queue.SimpleQueue()

    def __len__(self) -> int:
        """The number of keys with an answer."""
        return len(self._answers)

    def ask(self, key: OffloadKey, request: str) -> bool | None:
        """Whether the store has the page; ``None``: not known yet."""
        self._take()
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = _Answer()
            self._new.append(key)
        elif answer.found is False and request not in answer.requests:
            answer.found, answer.is_asked = None, False  # it may have been stored since
            self._new.append(key)
        answer.requests.add(request)
        self._keys_of.setdefault(request, set()).add(key)
        return answer.found

    def flush(self) -> None:
        """Ask the store for all keys that are new in this step."""
        self._take()
        asked = []
        for key in self._new:
            answer = self._answers.get(key)
            if answer is not None and not answer.is_asked and answer.found is None:
                answer.is_asked = True
                asked.append((key, answer))
        self._new = []
        if not asked:
            return

        def ended(job: Job[Presence]) -> None:
            found = job.results() or []
            self._arrived.put(
                [(*each, held is Presence.HELD) for each, held in zip(asked, found, strict=True)]
            )

        self._lookup([key for key, _ in asked], lease_s=self._lease_s).add_done_callback(ended)

    def miss(self, keys: Iterable[OffloadKey]) -> None:
        """Record pages that were found but could not be loaded."""
        for key in keys:
            answer = self._answers.get(key)
            if answer is not None:
                answer.found = False
                self._end_leases(key, answer)

    def forget(self, request: str) -> None:
        """Remove a finished request."""
        for key in self._keys_of.pop(request, ()):
            answer = self._answers[key]
            answer.requests.discard(request)
            self._drop_unused(key, answer)

    def _take(self) -> None:
        """Record the answers that have arrived."""
        while True:
            try:
                arrived = self._arrived.get_nowait()
            except queue.Empty:
                return
            for key, answer, found in arrived:
                answer.num_leases += found
                if answer.found is None:
                    answer.found = found
                if not answer.found:  # it became a miss meanwhile
                    self._end_leases(key, answer)
                self._drop_unused(key, answer)

    def _drop_unused(self, key: OffloadKey, answer: _Answer) -> None:
        """Forget an answer that no request needs, unless its lookup is running, which may return a lease."""
        if not answer.requests and (answer.found is not None or not answer.is_asked):
            self._end_leases(key, answer)
            if self._answers.get(key) is answer:
                del self._answers[key]

    def _end_leases(self, key: OffloadKey, answer: _Answer) -> None:
        if answer.num_leases:
            self._release([key] * answer.num_leases)
            answer.num_leases = 0
