"""Blocks of a paged KV cache: gathered, sent, scattered into the peer's, beside a copy of as many bytes.

The blocks of all layers are one message, or each layer's are one; block ids are shuffled, other ones at each
end. The layouts are those of KVLayout: in BHTKD, vLLM's, keys and values of a head lie side by side. Fresh
processes, all candidates alternating in each round, content compared outside of the timed part.
``python benchmarks/blocks.py --help``; needs kvplug, torch, and the pipes that it is to measure.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import harness

from kvplug.engine import KVLayout
from kvplug_bench.content import SMALLEST, content
from kvplug_bench.links import Rendezvous
from kvplug_bench.stopwatch import BURSTS, Stopwatch
from kvplug_testing import peers

MODELS = {
    # layers, heads, head size
    "30 x 3 x 64": (30, 3, 64),
    "32 x 8 x 128": (32, 8, 128),
}
LAYOUTS = ("BKTHD", "BHTKD")
TOKENS = 1024
SPARE = 2
"""A cache has so many times the blocks that are sent."""
LIFE_S = 300.0
MEMCPY = "memcpy"
BY_LAYER = ", layer by layer"


class Cache:
    """One end's, and which blocks of it are sent or filled."""

    def __init__(self, model: str, block_size: int, axes: str, end: int) -> None:
        self.layers, heads, head_size = MODELS[model]
        self.blocks = TOKENS // block_size
        sizes = {"B": SPARE * self.blocks, "T": block_size, "H": heads, "D": head_size}
        self.layout = KVLayout(axes, sizes)
        self.layer_bytes = TOKENS * 2 * heads * head_size * 2
        """Of those blocks, in one layer."""
        self.ids = random.Random(f"{model} {block_size} {end}").sample(range(sizes["B"]), self.blocks)

    @property
    def nbytes(self) -> int:
        return self.layers * self.layer_bytes

    def layer(self, number: int) -> Any:
        """Content that is another one in each layer."""
        words = content(SPARE * self.layer_bytes).view(-1)
        return words.roll(2 * number).view(self.layout.shape)

    def messages(self, layers: Sequence[Any], *, by_layer: bool) -> list[Any]:
        """The views of each message."""
        views = self.layout.page_views(layers)
        return list(views) if by_layer else [views]


def run_sender(
    parent: peers.Parent, name: str, model: str, block_size: int, axes: str, by_layer: bool
) -> dict[str, Any]:
    link = _link(parent, name, 0)
    cache = Cache(model, block_size, axes, 0)
    layers = [cache.layer(number) for number in range(cache.layers)]
    messages = cache.messages(layers, by_layer=by_layer)
    answer, watch = content(SMALLEST), Stopwatch()
    for _ in range(BURSTS):
        link.receive(answer)
        watch.start()
        for each in messages:
            link.pipe.send_blocks(each, cache.ids, timeout=None)
        link.receive(answer)
        watch.stop()
    link.close()
    return watch.plain()


def run_receiver(
    parent: peers.Parent, name: str, model: str, block_size: int, axes: str, by_layer: bool
) -> dict[str, Any]:
    import torch

    link = _link(parent, name, 1)
    theirs, cache = (Cache(model, block_size, axes, end) for end in (0, 1))
    layers = [torch.zeros(cache.layout.shape, dtype=torch.float16) for _ in range(cache.layers)]
    messages = cache.messages(layers, by_layer=by_layer)
    ping, watch = content(SMALLEST), Stopwatch()
    for _ in range(BURSTS):
        for layer in layers:
            layer.zero_()
        watch.start()
        link.send(ping)
        for each in messages:
            link.pipe.recv_blocks(each, cache.ids, timeout=None)
        link.send(ping)
        watch.stop()
        for number, layer in enumerate(layers):
            got, expected = layer[cache.ids], theirs.layer(number)[theirs.ids]
            if not torch.equal(got.view(torch.int16), expected.view(torch.int16)):
                raise AssertionError(f"{name} changed the blocks of layer {number}")
    link.close()
    return watch.plain()


def run_copy(parent: peers.Parent, model: str, block_size: int) -> dict[str, Any]:
    """Layer by layer, from contiguous memory to contiguous memory.

    What a pipe's receiver does between two bursts is done here too, so that the caches hold as much.
    """
    import torch

    torch.set_num_threads(1)
    cache = Cache(model, block_size, LAYOUTS[0], 0)
    sources = [content(cache.layer_bytes) for _ in range(cache.layers)]
    copies = [torch.zeros_like(source) for source in sources]
    watch = Stopwatch()
    for _ in range(BURSTS):
        for copy in copies:
            copy.zero_()
        watch.start()
        for source, copy in zip(sources, copies):
            copy.copy_(source)
        watch.stop()
        for number, copy in enumerate(copies):
            expected = sources[number].roll(0)
            if not torch.equal(copy.view(torch.int16), expected.view(torch.int16)):
                raise AssertionError(f"memcpy changed layer {number}")
    return watch.plain()


def _link(parent: peers.Parent, name: str, rank: int) -> Any:
    import torch

    from kvplug_bench.transports import PipeLink

    torch.set_num_threads(1)
    rendezvous = Rendezvous(rank=rank, size=2, folder="", send=parent.send, recv=parent.recv)
    return PipeLink(
        rendezvous, path=None, overrides=[f"transport={name}", *json.loads(os.environ["OPTIONS"])]
    )


def one_cell(name: str, model: str, axes: str, block_size: int, options: Sequence[str]) -> dict[str, float]:
    nbytes = Cache(model, block_size, axes, 0).nbytes
    if name == MEMCPY:
        with peers.start(run_copy, model, block_size, timeout_s=LIFE_S) as child:
            ends = [child.result(LIFE_S)]
    else:
        env = {"OPTIONS": json.dumps(list(options))}
        given = (name.removesuffix(BY_LAYER), model, block_size, axes, name.endswith(BY_LAYER))
        with (
            peers.start(run_sender, *given, timeout_s=LIFE_S, env=env) as sender,
            peers.start(run_receiver, *given, timeout_s=LIFE_S, env=env) as receiver,
        ):
            receiver.send(sender.recv(LIFE_S))
            ends = [sender.result(LIFE_S), receiver.result(LIFE_S)]
    seconds = ends[0]["seconds"]
    gb = nbytes / 1e9
    return {
        "mb": nbytes / 1e6,
        "gb_per_s": gb / statistics.median(seconds),
        "cpu_s_per_gb": sum(end["cpu_s"] for end in ends) / (gb * len(seconds)),
        "faults_per_gb": sum(end["faults"] for end in ends) / (gb * len(seconds)),
    }


def main() -> None:
    parser = harness.parser(__doc__, 3)
    parser.add_argument("--transport", nargs="+", default=["shm"], metavar="NAME", help="pipes")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[*MODELS][-1:])
    parser.add_argument("--block-size", nargs="+", type=int, default=[16], metavar="TOKENS")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option of a transport"
    )
    given = parser.parse_args()
    names = [MEMCPY, *(name + how for name in given.transport for how in ("", BY_LAYER))]
    rows = []
    for cell in itertools.product(given.model, given.layout, given.block_size):
        model, axes, block_size = cell
        print(*cell, file=sys.stderr)
        found = harness.rounds(names, given.rounds, lambda name: one_cell(name, *cell, given.set))  # noqa: B023
        for name, each in found.items():
            share = harness.ratio(each["gb_per_s"], found[MEMCPY]["gb_per_s"])
            mb, speed, cpu, faults = map(statistics.median, each.values())
            cache = f"{model}, {axes}, blocks of {block_size}"
            figures = [f"{mb:.0f}", f"{speed:.1f}", f"{share:.2f}", f"{cpu:.2f}", f"{faults:.0f}"]
            rows.append([cache, name, *figures])
    head = ["cache", "", "MB", "GB/s", "of memcpy", "CPU s/GB", "page faults per GB"]
    harness.write(given, harness.table(head, rows))


if __name__ == "__main__":
    main()
