"""Collectives of the communicator "cpu" beside those of torch.distributed with gloo.

What deadlines, the comparison of what the ranks are about to do, and the watch on each other cost. Fresh
processes, the candidates alternating in each round, content compared outside of the timed part. Each is used
in the way that is best for it: gloo gathers into existing memory, kvplug returns a new tensor. A sender does
not wait for the receivers of gloo's broadcasts, so that those of a burst overlap.
``python benchmarks/collectives.py --help``; needs kvplug, torch and kvplug-cpu.
"""

from __future__ import annotations

import abc
import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from kvplug_bench.stopwatch import BURSTS, Stopwatch, in_burst
from kvplug_testing import peers

SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
DEMO = {"1 token": 576 * 4, "48 tokens": 48 * 576 * 4, "256 tokens": 256 * 576 * 4}
"""What the workers of `kvplug demo --tensor-parallel 3` add up: tokens of SmolLM2, 576 float32 each."""
OPS = ("all_reduce", "all_gather", "broadcast")
LIFE_S = 300.0
TIMEOUT_S = 60.0
GLOO, KVPLUG = "gloo", "cpu"


class Collectives(abc.ABC):
    """One rank's end of a candidate. ``tensor`` is one rank's input, ``whole`` the inputs of all ranks."""

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor: ...

    @abc.abstractmethod
    def all_gather(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor: ...

    @abc.abstractmethod
    def broadcast(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor: ...

    @abc.abstractmethod
    def close(self) -> None: ...


class Plain(Collectives):
    """torch.distributed, as it comes."""

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


class Kvplug(Collectives):
    """The communicator "cpu"."""

    def __init__(self, parent: peers.Parent, rank: int, world_size: int) -> None:
        import kvplug

        listener = kvplug.StatelessGroup.listen("unix:") if rank == 0 else None
        if listener is not None:
            parent.send(listener.contact)
        self.group = kvplug.StatelessGroup.create(
            listener or parent.recv(), rank=rank, world_size=world_size, timeout=TIMEOUT_S
        )
        self.made = kvplug.build_communicator(kvplug.Config(communicator="cpu"), self.group)

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
    end = Plain(rank, world_size, meet_at) if name == GLOO else Kvplug(parent, rank, world_size)
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


Rounds = Sequence[dict[str, dict[str, dict[str, float]]]]


def table(rounds: Rounds, names: Sequence[str]) -> Iterator[str]:
    """A line for each collective, size and candidate; the ratios are medians of the rounds' ratios."""
    yield "| | size | | µs | of gloo's time | CPU µs, all ranks |"
    yield "|" + " --- |" * 6
    for cell in rounds[0]:
        for name in names:
            middle = {
                key: statistics.median(done[cell][name][key] for done in rounds) for key in ("us", "cpu_us")
            }
            share = statistics.median(done[cell][name]["us"] / done[cell][GLOO]["us"] for done in rounds)
            figures = [f"{middle['us']:,.0f}", f"{share:.2f}", f"{middle['cpu_us']:,.0f}"]
            yield "| " + " | ".join([*cell.split(", "), name, *figures]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--op", nargs="+", choices=OPS, default=["all_reduce"])
    parser.add_argument("--size", nargs="+", choices=SIZES | DEMO, default=list(SIZES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there as well")
    given = parser.parse_args()
    sizes = SIZES | DEMO
    names = [GLOO, KVPLUG]
    rounds = []
    for number in range(given.rounds):
        print(f"round {number + 1} of {given.rounds}", file=sys.stderr)
        first = number % len(names)
        order = names[first:] + names[:first]
        rounds.append(
            {
                f"{op}, {size}": {name: one_cell(name, op, sizes[size], given.ranks) for name in order}
                for op in given.op
                for size in given.size
            }
        )
    text = "\n".join(table(rounds, names)) + "\n"
    print(text)
    if given.markdown:
        given.markdown.write_text(text)
    if given.json:
        given.json.write_text(json.dumps(rounds, indent=2))


if __name__ == "__main__":
    main()
