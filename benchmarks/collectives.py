"""Collectives of the communicators "cpu" and "shm" beside those of torch.distributed with gloo.

What deadlines, the comparison of what the ranks are about to do, and the watch on each other cost. Fresh
processes, the candidates alternating in each round, content compared outside of the timed part. Each is used
in the way that is best for it: gloo gathers into existing memory, kvplug returns a new tensor. A sender does
not wait for the receivers of gloo's broadcasts, so that those of a burst overlap.
``python benchmarks/collectives.py --help``; needs kvplug, torch, kvplug-cpu and kvplug-shm.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from contextlib import ExitStack
from typing import Any

import harness
import torch

from kvplug_bench.stopwatch import BURSTS, Stopwatch, in_burst
from kvplug_testing import peers

SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
DEMO = {"1 token": 576 * 4, "48 tokens": 48 * 576 * 4, "256 tokens": 256 * 576 * 4}
"""What the workers of `kvplug demo --tensor-parallel 3` add up: tokens of SmolLM2, 576 float32 each."""
OPS = ("all_reduce", "all_gather", "broadcast")
LIFE_S = 300.0
TIMEOUT_S = 60.0
GLOO, CANDIDATES = "gloo", ("gloo", "cpu", "shm")


class Plain:
    """One rank of torch.distributed, as it comes. ``tensor`` is one rank's input, ``whole`` the inputs of all
    ranks.
    """

    def __init__(self, rank: int, world_size: int, meet_at: str) -> None:
        import torch.distributed as dist

        self.dist = dist
        dist.init_process_group("gloo", init_method=f"file://{meet_at}", rank=rank, world_size=world_size)

    def all_reduce(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        self.dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        self.dist.all_gather_into_tensor(whole, tensor)
        return whole

    def broadcast(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        self.dist.broadcast(tensor, 0)
        return tensor

    def close(self) -> None:
        self.dist.barrier()
        self.dist.destroy_process_group()


class Kvplug:
    """The same of a communicator of kvplug."""

    def __init__(self, parent: peers.Parent, name: str, rank: int, world_size: int) -> None:
        import kvplug

        listener = kvplug.StatelessGroup.listen("unix:") if rank == 0 else None
        if listener is not None:
            parent.send(listener.contact)
        self.group = kvplug.StatelessGroup.create(
            listener or parent.recv(), rank=rank, world_size=world_size, timeout=TIMEOUT_S
        )
        self.made = kvplug.build_communicator(kvplug.Config(communicator=name), self.group)

    def all_reduce(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return self.made.all_reduce(tensor, timeout=TIMEOUT_S)

    def all_gather(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return self.made.all_gather(tensor, 0, timeout=TIMEOUT_S)

    def broadcast(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return self.made.broadcast(tensor, 0, timeout=TIMEOUT_S)

    def close(self) -> None:
        self.group.barrier()
        self.made.destroy()
        self.group.close()


def run_rank(
    parent: peers.Parent, name: str, op: str, nbytes: int, rank: int, world_size: int, meet_at: str
) -> dict[str, Any]:
    torch.set_num_threads(1)
    end = Plain(rank, world_size, meet_at) if name == GLOO else Kvplug(parent, name, rank, world_size)
    call = getattr(end, op)
    count = nbytes // 4
    whole = torch.zeros(world_size * count)
    _check(op, call(_part(rank, count), whole), count, world_size)
    tensor, small, watch = torch.zeros(count), torch.zeros(1), Stopwatch()
    times = in_burst(nbytes)
    for _ in range(BURSTS):
        end.all_reduce(small, whole)
        watch.start()
        for _ in range(times):
            call(tensor, whole)
        end.all_reduce(small, whole)  # a rank that only gives may be done before the others
        watch.stop()
    end.close()
    return {**watch.plain(), "times": times}


def _part(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) % 1000 + rank


def _check(op: str, got: torch.Tensor, count: int, world_size: int) -> None:
    parts = [_part(rank, count) for rank in range(world_size)]
    match op:
        case "all_reduce":
            wanted = torch.stack(parts).sum(0)
        case "all_gather":
            wanted = torch.cat(parts)
        case _:
            wanted = parts[0]
    if not torch.equal(got, wanted):
        raise AssertionError(f"{op} of {count} elements gave something else")


def one_cell(name: str, op: str, nbytes: int, world_size: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        env = {"GLOO_SOCKET_IFNAME": "lo"}
        given = (name, op, nbytes)
        children = [
            stack.enter_context(
                peers.start(run_rank, *given, rank, world_size, f"{folder}/meet", timeout_s=LIFE_S, env=env)
            )
            for rank in range(world_size)
        ]
        if name != GLOO:
            contact = children[0].recv(LIFE_S)
            for child in children[1:]:
                child.send(contact)
        ends = [child.result(LIFE_S) for child in children]
    times = ends[0]["times"]
    return {
        "us": statistics.median(ends[0]["seconds"]) / times * 1e6,
        "cpu_us": sum(end["cpu_s"] for end in ends) / (times * len(ends[0]["seconds"])) * 1e6,
    }


def main() -> None:
    sizes = SIZES | DEMO
    parser = harness.parser(__doc__, 3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--op", nargs="+", choices=OPS, default=["all_reduce"])
    parser.add_argument("--size", nargs="+", choices=sizes, default=list(SIZES))
    given = parser.parse_args()
    rows = []
    for op, size in itertools.product(given.op, given.size):
        print(op, size, file=sys.stderr)
        found = harness.rounds(
            CANDIDATES,
            given.rounds,
            lambda name: one_cell(name, op, sizes[size], given.ranks),  # noqa: B023
        )
        for name, each in found.items():
            share = harness.ratio(each["us"], found[GLOO]["us"])
            us, cpu_us = map(statistics.median, each.values())
            rows.append([op, size, name, f"{us:,.0f}", f"{share:.2f}", f"{cpu_us:,.0f}"])
    head = ["", "size", "", "µs", "of gloo's time", "CPU µs, all ranks"]
    harness.write(given, harness.table(head, rows))


if __name__ == "__main__":
    main()
