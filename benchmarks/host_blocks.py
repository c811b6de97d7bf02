"""Pages of the store "host" into the blocks of a paged cache and out of them, beside a bare loop in C.

    python benchmarks/host_blocks.py [--model NAME ...] [--tokens N] [--rounds N] [--markdown FILE]
    python benchmarks/host_blocks.py --saving | --queued

A sequence of 1,024 tokens lies in shuffled blocks of 16 tokens; a page has 16 tokens. "get" loads its pages
into the blocks, "put" saves them. The store is in this process, or in a program of its own whose memory is
mapped ("mapped"). The layouts are keys and values apart with the tokens' axis outside (`KBTHD`, what
transformers has) and both in one block, heads outside of tokens (`BHTKD`, vLLM's). Beside them, in turns: one
memcpy of as many bytes, and a loop in C that does the same copies, page after page, and the same checksums
(xxhash's own function), without jobs, threads, leases or headers. "Verified" has checksums on, as they are by
default. Figures are medians, shares medians of the shares within a round.

`--saving` measures what saving costs the engine's thread instead: the connector "lookup" copies all layers
of the sequence into pages of the store in this process, and hands the pages over.
The rest happens in the store's threads. `--device` measures saving from the simulated device: straight into
memory of the store, beside staging in pinned memory, where every page must be kept with the default
`staging_size`. "Store" is the processor time of the store's threads. `--files` adds gets and puts of the
store "fs", whose files are in the page cache.

`--queued` counts what a step that saves queues on a device, which is simulated: each of a number of requests
completes six pages. "Waits" are those of the engine's stream, hence of the next forward pass. In the second
table the staging memory has room for fewer pages than the step completes.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import logging
import os
import statistics
import subprocess
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import harness
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvplug
from kvplug.engine import BlockViews, CacheGroup, KVCacheConfig, KVLayout, PageBlocks, SpanLog, TransferStats
from kvplug.transport import PageBuffers, PageRequest, Store
from kvplug.transport.store.compiled import library
from kvplug_host.pages.slot_put import SlotPut
from kvplug_lookup.connector.groups import Groups
from kvplug_lookup.connector.options import LookupConnectorOptions
from kvplug_lookup.connector.plan import SavePlan
from kvplug_lookup.connector.save import Saver, Tier
from kvplug_lookup.connector.warnings import CountedWarnings
from kvplug_testing import simulated
from kvplug_testing.engine import FakeEngine, Scheduled, request_of
from kvplug_testing.simulated import streams

PAGE_TOKENS = BLOCK_TOKENS = 16

BARE = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
typedef uint64_t (*hash_t)(const void *, size_t);

/* One page a block. */
void bare(char *rows, const int64_t *offsets, int64_t count, int64_t views, char **bases, const int64_t *ids,
          int64_t block, int64_t token, int64_t head, int64_t tokens, int64_t heads, int64_t size,
          hash_t hash, uint64_t *sums, int into)
{
    int64_t part = tokens * heads * size;
    int dense = token == heads * size && (heads == 1 || head == size);
    for (int64_t page = 0; page < count; page++) {
        char *row = rows + offsets[page];
        for (int64_t view = 0; view < views; view++, row += part) {
            char *cache = bases[view] + ids[page] * block;
            if (into && hash) *sums++ = hash(row, part);
            if (dense)
                into ? memcpy(cache, row, part) : memcpy(row, cache, part);
            else
                for (int64_t h = 0; h < heads; h++)
                    for (int64_t t = 0; t < tokens; t++) {
                        char *there = cache + h * head + t * token, *here = row + (t * heads + h) * size;
                        into ? memcpy(there, here, size) : memcpy(here, there, size);
                    }
            if (!into && hash) *sums++ = hash(row, part);
        }
    }
}
"""


@attrs.frozen
class Model:
    name: str
    layers: int
    heads: int
    size: int
    dtype: torch.dtype


MODELS = (
    Model("30 x 3 x 64, float16", 30, 3, 64, torch.float16),
    Model("30 x 3 x 64, float32", 30, 3, 64, torch.float32),
    Model("32 x 8 x 128, float16", 32, 8, 128, torch.float16),
)
LAYOUTS = ("KBTHD", "BHTKD")


def bare_loop(folder: Path) -> Any:
    source, library_ = folder / "bare.c", folder / "bare.so"
    source.write_text(BARE)
    subprocess.run(["cc", "-std=c11", "-O2", "-fPIC", "-shared", "-o", library_, source], check=True)
    function = ctypes.CDLL(str(library_)).bare
    pointer, i64 = ctypes.c_void_p, ctypes.c_int64
    two, six = [pointer] * 2, [i64] * 6
    function.argtypes = (*two, i64, i64, pointer, pointer, *six, *two, ctypes.c_int)
    function.restype = None
    return function


class Sequence:
    """One sequence in the blocks of two caches of one model, and its pages."""

    def __init__(self, model: Model, axes: str, num_tokens: int) -> None:
        self.model = model
        self.count = num_tokens // PAGE_TOKENS
        layout = KVLayout(axes, {"T": BLOCK_TOKENS, "H": model.heads, "D": model.size})
        group = CacheGroup(layer_names=tuple(map(str, range(model.layers))), layout=layout)
        self.groups = Groups(KVCacheConfig(groups=(group,), num_blocks=2 * self.count))
        self.form = layout.page_format(str(model.dtype).removeprefix("torch."), model.layers, PAGE_TOKENS)
        blocks = 2 * self.count
        shape = {"K": 2, "B": blocks, "T": BLOCK_TOKENS, "H": model.heads, "D": model.size}
        generator = torch.Generator().manual_seed(1)

        def cache() -> list[torch.Tensor]:
            return [torch.rand([shape[axis] for axis in axes]).to(model.dtype) for _ in range(model.layers)]

        self.source = layout.page_views([cache_as_engines_have_it(one, axes) for one in cache()])
        self.target = layout.page_views([cache_as_engines_have_it(one, axes) for one in cache()])
        self.blocks = torch.randperm(blocks, generator=generator)[: self.count].tolist()
        self.nbytes = self.count * self.form.nbytes

    def memory(self, views: Any) -> PageBlocks:
        return PageBlocks(self.form, views, self.blocks, 0, self.count)

    def request(self, store: Store, name: bytes, views: Any) -> PageRequest:
        return harness.request(harness.series(store, self.form), self.memory(views), name, self.count)


def cache_as_engines_have_it(tensor: torch.Tensor, axes: str) -> torch.Tensor:
    """vLLM has keys and values of a token in one axis."""
    return tensor.flatten(-2) if axes == "BHTKD" else tensor


def measure(
    model: Model, axes: str, *, verified: bool, num_tokens: int, rounds: int, files: bool
) -> tuple[dict[str, list[float]], int]:
    """Seconds of each call in each round, and the bytes that each moves."""
    with ExitStack() as stack:
        pages = Sequence(model, axes, num_tokens)
        budget = 6 * pages.nbytes + (256 << 20)
        address = f"unix:@kvplug-benchmark-blocks-{os.getpid()}"
        common = {"integrity": "xxh3_64" if verified else "off"}
        harness.served(stack, address, budget, *(f"--set={name}={value}" for name, value in common.items()))
        stores = {
            "": harness.opened(stack, {"size": budget}, **common),
            ", mapped": harness.opened(stack, {"contact": address, "map": True}, **common),
        }
        assert "mapped" in stores[", mapped"].route, stores[", mapped"].route
        if files:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplug-"))
            stores[", fs"] = harness.opened(stack, {"path": folder, "size": 4 * budget}, name="fs", **common)
        bare = Bare(bare_loop(Path(stack.enter_context(tempfile.TemporaryDirectory()))), pages, verified)
        flat, other = torch.ones(pages.nbytes, dtype=torch.uint8), torch.ones(pages.nbytes, dtype=torch.uint8)
        calls: dict[str, Callable[[], Any]] = {
            "memcpy": lambda: ctypes.memmove(other.data_ptr(), flat.data_ptr(), pages.nbytes) and None,
            "bare get": lambda: bare(into=True),
            "bare put": lambda: bare(into=False),
        }
        for name, store in stores.items():
            harness.put(store, pages.request(store, b"kept", pages.source))
            kept = pages.request(store, b"kept", pages.target)
            new = pages.request(store, b"new", pages.source)
            calls[f"get{name}"] = functools.partial(harness.get, store, kept)
            if name != ", mapped":
                calls[f"put{name}"] = functools.partial(harness.put, store, new)
        taken = harness.in_turns(calls, rounds)
        check(pages)
    return taken, pages.nbytes


def measure_saving(model: Model, axes: str, *, num_tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each part of saving on the engine's thread, in each round."""
    taken: dict[str, list[float]] = {}
    with ExitStack() as stack:
        pages = Sequence(model, axes, num_tokens)
        store = harness.opened(stack, {"size": 6 * pages.nbytes + (256 << 20)})
        series = harness.series(store, pages.form)
        options = LookupConnectorOptions(save_timeout_s=120, wait_timeout_s=120, max_unsaved=2 * pages.nbytes)
        config = SimpleNamespace(timeout_s=120)
        context = SimpleNamespace(config=config, options=options, stats=TransferStats(), spans=SpanLog())
        saver = Saver(
            context,  # type: ignore[arg-type]
            [Tier("host", store, series)],
            pages.groups,
            BlockViews(pages.source),
            CountedWarnings(logging.getLogger("benchmark")),
        )
        flat, other = torch.ones(pages.nbytes, dtype=torch.uint8), torch.ones(pages.nbytes, dtype=torch.uint8)
        addresses = other.data_ptr(), flat.data_ptr()
        tokens = torch.randint(0, 30_000, (num_tokens,), dtype=torch.int32).numpy().tobytes()

        def save(round_: int) -> tuple[float, float]:
            plan = SavePlan(
                request_id=str(round_),
                first_page=0,
                parent=bytes([round_]) * 32,
                packed_tokens=tokens,
                block_ids=(tuple(pages.blocks),),
                num_announced=pages.count,
            )
            begin, _ = harness.seconds(lambda: saver.begin(round_, [plan]))
            end, _ = harness.seconds(saver.end)
            while saver.bytes_unsaved:
                time.sleep(0.001)
            assert store.usage().num_pages == pages.count, "the pages were not saved"
            store.submit_remove(None).wait(120)
            return begin, end

        for round_ in range(rounds + 1):
            copied, _ = harness.seconds(lambda: ctypes.memmove(*addresses, pages.nbytes))
            parts = save(round_)
            if round_:
                for name, took in zip(("begin", "end"), parts, strict=True):
                    taken.setdefault(name, []).append(took)
                taken.setdefault("memcpy", []).append(copied)
    return taken


def measure_device(model: Model, *, num_tokens: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of the processor for each page in each round: of all threads, which do the device's work,
    too, of the store's and of the engine's.
    """
    simulated.enable()
    taken: dict[str, list[float]] = {}
    with ExitStack() as stack:
        count = num_tokens // PAGE_TOKENS
        layout = KVLayout("BHTKD", {"T": BLOCK_TOKENS, "H": model.heads, "D": model.size})
        form = layout.page_format(str(model.dtype).removeprefix("torch."), model.layers, PAGE_TOKENS)
        shape = count, model.heads, BLOCK_TOKENS, 2 * model.size
        caches = [torch.rand(shape).to(model.dtype).to("simulated") for _ in range(model.layers)]
        views = BlockViews(layout.page_views(caches))
        blocks = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
        store = harness.opened(stack, {"size": count * form.nbytes * 5 // 4 + (128 << 20)})
        memory = PageBlocks(form, views, blocks, 0, count)
        request = harness.request(harness.series(store, form), memory, b"saved", count)

        def save() -> float:
            with simulated.stalled():  # else the engine's thread may do the device's work
                with store.together():
                    job = store.submit_put(request, timeout=600)
                queued = time.thread_time()
            assert not any(job.wait(600)), "a page was not kept"
            assert job.wait_settled(600)
            return queued

        def staged() -> float:
            with mock.patch.object(type(store), "_reserve", return_value=None):
                return save()

        spent: list[float] = []

        def timed(put: SlotPut, step: int, do: Callable[..., None] = SlotPut.do) -> None:
            begun = time.thread_time()
            do(put, step)
            spent.append(time.thread_time() - begun)

        stack.enter_context(mock.patch.object(SlotPut, "do", timed))
        ways = {"straight": save, "staged": staged}
        for round_ in range(rounds + 2):  # in the first ones memory is touched, and pinned
            for name in [*ways][:: 1 if round_ % 2 else -1]:
                spent.clear()
                used, begun = time.process_time(), time.thread_time()
                queued = ways[name]()
                used = time.process_time() - used
                if round_ > 1:
                    of = {"": used, ", store": sum(spent), ", engine": queued - begun}
                    for what, seconds_ in of.items():
                        taken.setdefault(name + what, []).append(1e6 * seconds_ / count)
                found = PageBuffers.empty(form, count)
                assert not any(store.submit_get(attrs.evolve(request, memory=found)).wait(600))
                for at in (0, count - 1):
                    parts = [part[blocks[at]].cpu().contiguous() for layer in views for part in layer]
                    expected = b"".join(part.numpy().tobytes() for part in parts)
                    assert bytes(found.rows().row(at)) == expected, "the copies differ"
                store.submit_remove(None).wait(600)
    return taken


def check(pages: Sequence) -> None:
    """What was loaded is what was saved."""
    for theirs, ours in zip(pages.source, pages.target, strict=True):
        for one, other in zip(theirs, ours, strict=True):
            assert torch.equal(one[pages.blocks], other[pages.blocks]), "the copies differ"


class Bare:
    """The loop in C, between a buffer of rows and the caches."""

    def __init__(self, function: Any, pages: Sequence, verified: bool) -> None:
        self._function, self._pages = function, pages
        self._rows = torch.zeros(pages.nbytes, dtype=torch.uint8)
        self._offsets = array("q", range(0, pages.nbytes, pages.form.nbytes))
        self._ids = array("q", pages.blocks)
        compiled = library()
        assert compiled is not None, "kvplug was installed without compiled copies"
        self._hash = compiled.hash if verified else None
        self._sums = array("Q", bytes(8 * pages.count * 2 * pages.model.layers))
        self(into=False)

    def __call__(self, *, into: bool) -> None:
        pages, view = self._pages, self._pages.source[0][0]
        views = [part for layer in (pages.target if into else pages.source) for part in layer]
        bases = array("Q", [part.data_ptr() for part in views])
        block, token, head, _ = (stride * view.element_size() for stride in view.stride())
        self._function(
            self._rows.data_ptr(),
            self._offsets.buffer_info()[0],
            pages.count,
            len(views),
            bases.buffer_info()[0],
            self._ids.buffer_info()[0],
            *(block, token, head, BLOCK_TOKENS, pages.model.heads, pages.model.size * view.element_size()),
            self._hash,
            self._sums.buffer_info()[0],
            int(into),
        )


class Operations(TorchDispatchMode):
    """Counts copies and allocations on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def noted_waits(waiting: list[streams.Stream]) -> Iterator[None]:
    """Note the streams that are made to wait for an event."""
    wait_event = streams.Stream.wait_event

    def noted(stream: streams.Stream, event: streams.Event) -> None:
        waiting.append(stream)
        wait_event(stream, event)

    streams.Stream.wait_event = noted
    try:
        yield
    finally:
        streams.Stream.wait_event = wait_event


def saving_step(
    num_requests: int, num_layers: int, staging_size: int, *, is_straight: bool
) -> tuple[Counter[str], int, int, int]:
    """What a step queues that completes six pages of each request, how often it makes the engine's stream
    wait, and how many pages this step and two before it complete, and the store keeps. ``is_straight``:
    whether the device may write into the store's memory.
    """
    config = {"connector": "lookup", "role": "both", "stores": ["host"], "staging_size": staging_size}
    config["host"] = f"unix:@kvplug-benchmark-{os.getpid()}-{num_requests}-{num_layers}-{staging_size}"
    given = {
        "axes": "BKTHD",
        "num_layers": num_layers,
        "num_blocks": 64 * num_requests,
        "device": "simulated",
    }
    with FakeEngine(kvplug.Config.from_dict(config), **given) as engine, ExitStack() as stack:
        if not is_straight:
            store_type = type(engine.worker.first_tier.store)
            stack.enter_context(mock.patch.object(store_type, "_reserve", return_value=None))

        def step(first: int) -> tuple[Counter[str], int]:
            scheduled: list[Scheduled] = []
            for number in range(first, first + num_requests):
                request = request_of(str(number), range(100 * number, 100 * number + 100))
                scheduled.append((request, engine.admit(request), 0, 100))
            planned = engine.plan(scheduled)
            waiting: list[streams.Stream] = []
            with simulated.stalled(), Operations() as made, noted_waits(waiting):
                engine.hear(engine.execute(planned, compute=False))
            num_waits = waiting.count(streams.default_stream())
            for request, blocks, *_ in scheduled:
                engine.finish(request, blocks)
            engine.settle()
            return made.counts, num_waits

        step(0)  # the store's memory is pinned
        step(num_requests)  # and memory on the device is allocated
        counts, num_waits = step(2 * num_requests)
        while engine.worker.saver.bytes_unsaved:
            time.sleep(0.001)
        return counts, num_waits, 18 * num_requests, engine.worker.first_tier.store.usage().num_pages


def queued_tables() -> list[str]:
    rows, kept = [], []
    for num_requests, num_layers, is_straight in itertools.product((1, 4, 16), (4, 32), (False, True)):
        counts, num_waits, *_ = saving_step(num_requests, num_layers, 64 << 20, is_straight=is_straight)
        num_queued = sum(counts[name] for name in ("index_select", "index", "copy_"))
        num_new = sum(count for name, count in counts.items() if name.startswith(("empty", "new_empty")))
        how, share = "straight" if is_straight else "through staging memory", num_queued / (2 * num_layers)
        rows.append([num_requests, num_layers, how, num_queued, f"{share:.2f}", num_new, num_waits])
    for num_requests in (1, 4, 16):
        *_, num_pages, num_kept = saving_step(num_requests, 32, 1 << 20, is_straight=False)
        fit = (1 << 20) // (2 * 32 * 16 * 2 * 8 * 4)
        kept.append([num_requests, fit, num_pages, num_kept, f"{num_kept / num_pages:.2f}"])
    head = ["requests", "layers", "copied", "operations queued", "of 2 a layer", "allocations", "waits"]
    return [
        harness.table(head, rows),
        harness.table(
            ["requests", "pages that fit the staging memory", "pages completed", "kept", "share"], kept
        ),
    ]


def saving_table(models: list[Model], given: argparse.Namespace) -> str:
    rows = []
    for model, axes in itertools.product(models, LAYOUTS):
        taken = measure_saving(model, axes, num_tokens=given.tokens, rounds=given.rounds)
        each = map(sum, zip(taken["begin"], taken["end"], strict=True))
        figures = [f"{1e3 * statistics.median(taken[name]):.2f}" for name in ("memcpy", "begin", "end")]
        rows.append([model.name, axes, *figures, *harness.spread(each, taken["memcpy"])])
    head = ["cache", "layout", "memcpy, ms", "begin", "end", "all, of memcpy", "quartiles"]
    return harness.table(head, rows)


def device_table(models: list[Model], given: argparse.Namespace) -> str:
    rows = []
    for model in models:
        taken = measure_device(model, num_tokens=given.tokens, rounds=given.rounds)
        for name in ("straight", "staged"):
            own, engine, every = (
                f"{statistics.median(taken[name + what]):.0f}" for what in (", store", ", engine", "")
            )
            spread = harness.spread(taken[f"{name}, store"], taken["staged, store"])
            rows.append([model.name, name, own, *spread, engine, every])
    head = ["cache", "saved", "store, us a page", "of staged", "quartiles", "engine's thread", "all threads"]
    return harness.table(head, rows)


def copies_table(models: list[Model], given: argparse.Namespace) -> str:
    rows = []
    for model, axes, verified in itertools.product(models, LAYOUTS, (True, False)):
        taken, nbytes = measure(
            model, axes, verified=verified, num_tokens=given.tokens, rounds=given.rounds, files=given.files
        )
        for what, each in taken.items():
            if what == "memcpy" or what.startswith("bare"):
                continue
            bare = taken["bare put" if what.startswith("put") else "bare get"]
            speed, of_memcpy = harness.gb_per_s(each, nbytes), harness.ratio(taken["memcpy"], each)
            shares = [f"{of_memcpy:.2f}", *harness.spread(bare, each)]
            rows.append([model.name, axes, "verified" if verified else "off", what, speed, *shares])
    head = ["cache", "layout", "checksums", "what", "GB/s", "of memcpy", "of the bare loop", "quartiles"]
    return harness.table(head, rows)


def main() -> None:
    parser = harness.parser(__doc__, 9)
    names = [model.name for model in MODELS]
    parser.add_argument("--model", nargs="+", choices=names, default=names[-1:], help=f"default {names[-1]}")
    parser.add_argument("--tokens", type=int, default=1024, help="of the sequence (default 1,024)")
    parser.add_argument("--saving", action="store_true", help="measure saving on the engine's thread")
    parser.add_argument("--device", action="store_true", help="measure saving from the simulated device")
    parser.add_argument("--queued", action="store_true", help="count what saving queues on a device")
    parser.add_argument("--files", action="store_true", help='gets and puts of the store "fs", too')
    given = parser.parse_args()
    about = harness.machine()
    if given.queued:
        harness.write(given, *queued_tables(), f"{about}.")
        return
    table = device_table if given.device else saving_table if given.saving else copies_table
    models = [model for model in MODELS if model.name in given.model]
    harness.write(given, table(models, given), f"{about}, {given.rounds} rounds.")


if __name__ == "__main__":
    main()
