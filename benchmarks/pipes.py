"""The pipe "cpu" against what else moves a CPU tensor between two processes: gloo and ZeroMQ.

Each cell runs in two fresh processes. All candidates alternate within a round, so that a busy minute hits
them all; what counts is the ratio within a round. Every message's content is compared, outside the timed
part. ``python benchmarks/pipes.py --help``; needs kvplug, kvplug-cpu, torch and pyzmq.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvplug.testing import peers

MIB = 1024 * 1024
OURS = "kvplug cpu, Unix"
CANDIDATES = {
    # name: (which code, its argument, whether the receiver keeps the tensor or fills its own memory)
    "kvplug cpu, Unix": ("cpu", "unix", "into"),
    "gloo": ("gloo", "", "into"),
    "ZeroMQ ipc": ("zmq", "ipc", "into"),
    "kvplug cpu, TCP": ("cpu", "tcp", "into"),
    "kvplug cpu, Unix, owned": ("cpu", "unix", "owned"),
    "ZeroMQ ipc, owned": ("zmq", "ipc", "owned"),
}
PING_BYTES = 64


class Cpu:
    """The pipe "cpu" of kvplug."""

    def __init__(self, first: bool, folder: str, socket: str) -> None:
        from kvplug import Credentials, PipeContext
        from kvplug_cpu.endpoint import CpuEndpoint
        from kvplug_cpu.options import CpuOptions

        options = CpuOptions(socket=socket)  # type: ignore[arg-type]
        end = CpuEndpoint(PipeContext(options=options, credentials=Credentials()))
        if first:
            with end.listen() as listener:
                write_at_once(Path(folder, "contact"), listener.contact)
                self.pipe = listener.accept(60)
        else:
            self.pipe = end.connect(read_when_there(Path(folder, "contact")))

    def send(self, tensor: Any) -> None:
        self.pipe.send_tensor(tensor)

    def receive(self, out: Any) -> Any:
        return self.pipe.recv_tensor(out)

    def close(self) -> None:
        self.pipe.close()


class Gloo:
    """torch.distributed's send and recv. It always receives into memory that is there."""

    def __init__(self, first: bool, folder: str, _: str) -> None:
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0 if first else 1, world_size=2
        )
        self.dist, self.other = dist, 1 if first else 0

    def send(self, tensor: Any) -> None:
        self.dist.send(tensor, self.other)

    def receive(self, out: Any) -> Any:
        self.dist.recv(out, self.other)
        return out

    def close(self) -> None:
        self.dist.destroy_process_group()


class Zmq:
    """A PAIR socket without copies where ZeroMQ can; "into" copies once from its frame."""

    def __init__(self, first: bool, folder: str, _: str) -> None:
        import zmq

        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PAIR)
        address = f"ipc://{folder}/zmq"
        self.socket.bind(address) if first else self.socket.connect(address)

    def send(self, tensor: Any) -> None:
        self.socket.send(tensor.view(-1).numpy(), copy=False)

    def receive(self, out: Any) -> Any:
        import torch

        frame = self.socket.recv(copy=False)
        got = torch.frombuffer(frame.buffer, dtype=torch.float16)
        return got if out is None else out.view(-1).copy_(got)

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


KINDS: dict[str, Callable[[bool, str, str], Any]] = {"cpu": Cpu, "gloo": Gloo, "zmq": Zmq}


def write_at_once(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def read_when_there(path: Path) -> str:
    while not path.exists():
        time.sleep(0.002)
    return path.read_text()


def content(nbytes: int) -> Any:
    """float16 in which every four bytes are different, so that nothing can be swapped unseen."""
    import torch

    # One thread: OpenMP's idle workers spin for a while, and would take the cores from whom we measure.
    torch.set_num_threads(1)
    return torch.arange(nbytes // 4, dtype=torch.int32).view(torch.float16)


def same(a: Any, b: Any) -> bool:
    import torch

    return torch.equal(a.view(-1).view(torch.int32), b.view(torch.int32))


def sender(parent: peers.Parent, name: str, folder: str, sizes: list[int], repeats: int) -> dict[str, Any]:
    """Per size: the seconds from the call until the receiver's answer is here, and CPU seconds."""
    import torch

    kind, argument, _ = CANDIDATES[name]
    link = KINDS[kind](True, folder, argument)
    ping = torch.zeros(PING_BYTES // 2, dtype=torch.float16)
    answer = torch.empty_like(ping)
    results: dict[str, Any] = {}
    for nbytes in sizes:
        source, seconds, cpu = content(nbytes), [], []
        for _ in range(repeats + 2):
            link.receive(answer)  # the receiver is ready
            c0, t0 = time.process_time(), time.perf_counter()
            link.send(source)
            link.receive(answer)
            seconds.append(time.perf_counter() - t0)
            cpu.append(time.process_time() - c0)
        results[str(nbytes)] = {"seconds": seconds[2:], "cpu_s": sum(cpu[2:])}
    trips = []
    for _ in range(1500):
        t0 = time.perf_counter()
        link.send(ping)
        link.receive(answer)
        trips.append(time.perf_counter() - t0)
    results["latency_us"] = statistics.median(trips[300:]) / 2 * 1e6
    link.close()
    return results


def receiver(parent: peers.Parent, name: str, folder: str, sizes: list[int], repeats: int) -> dict[str, Any]:
    """Answers each message, then compares it. The CPU seconds are those from ready to answered."""
    import torch

    kind, argument, keep = CANDIDATES[name]
    link = KINDS[kind](False, folder, argument)
    ping = torch.zeros(PING_BYTES // 2, dtype=torch.float16)
    results: dict[str, Any] = {}
    for nbytes in sizes:
        expected, cpu = content(nbytes), []
        out = torch.zeros_like(expected) if keep == "into" else None
        for _ in range(repeats + 2):
            if out is not None:
                out.zero_()
            c0 = time.process_time()
            link.send(ping)
            got = link.receive(out)
            link.send(ping)
            cpu.append(time.process_time() - c0)
            if not same(got, expected):
                raise AssertionError(f"{name} changed the content of {nbytes} bytes")
            del got
        results[str(nbytes)] = {"cpu_s": sum(cpu[2:])}
    answer = torch.empty_like(ping)
    for _ in range(1500):
        link.receive(answer)
        link.send(ping)
    link.close()
    return results


def one_cell(name: str, sizes: list[int], repeats: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="kvplug-bench-") as folder,
        peers.start(sender, name, folder, sizes, repeats, timeout_s=60) as one,
        peers.start(receiver, name, folder, sizes, repeats, timeout_s=60) as other,
    ):
        sent, received = one.result(60), other.result(60)
    cell: dict[str, Any] = {"latency_us": sent["latency_us"]}
    for nbytes in sizes:
        seconds = sent[str(nbytes)]["seconds"]
        cell[f"gb_per_s_{nbytes // MIB}"] = nbytes / statistics.median(seconds) / 1e9
        cpu = sent[str(nbytes)]["cpu_s"] + received[str(nbytes)]["cpu_s"]
        cell[f"cpu_s_per_gb_{nbytes // MIB}"] = cpu / (nbytes * len(seconds) / 1e9)
    return cell


def run(
    rounds: int, sizes: list[int], repeats: int, names: list[str], limit_s: float
) -> list[dict[str, Any]]:
    """One dict per round: name to cell. Stops at ``limit_s``, after whole rounds."""
    began, done = time.monotonic(), []
    for number in range(rounds):
        took = (time.monotonic() - began) / max(1, number)
        if number and time.monotonic() - began + took > limit_s:
            break
        order = names[number % len(names) :] + names[: number % len(names)]
        done.append({name: one_cell(name, sizes, repeats) for name in order})
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return done


def summary(rounds: list[dict[str, Any]], names: list[str], sizes: list[int]) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        row: dict[str, Any] = {"name": name, "kind": CANDIDATES[name][2]}
        for key in rounds[0][name]:
            row[key] = statistics.median(r[name][key] for r in rounds)
        for nbytes in sizes:
            key = f"gb_per_s_{nbytes // MIB}"
            ratios = [r[OURS][key] / r[name][key] for r in rounds] if OURS in names else []
            row[f"ours_over_{nbytes // MIB}"] = statistics.median(ratios) if ratios else None
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], sizes: list[int]) -> Iterator[str]:
    mib = [nbytes // MIB for nbytes in sizes]
    heads = ["", "kind", *(f"{m} MiB, GB/s" for m in mib), *(f"{OURS} is faster by, {m} MiB" for m in mib)]
    heads += ["latency 64 B, µs", *(f"CPU s/GB, {m} MiB" for m in mib)]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + " --- |" * len(heads)
    for row in rows:
        cells = [row["name"], row["kind"], *(f"{row[f'gb_per_s_{m}']:.1f}" for m in mib)]
        for m in mib:
            ratio = row[f"ours_over_{m}"]
            cells.append("" if ratio is None or row["name"] == OURS else f"{ratio:.2f}x")
        cells += [f"{row['latency_us']:.0f}", *(f"{row[f'cpu_s_per_gb_{m}']:.2f}" for m in mib)]
        yield "| " + " | ".join(cells) + " |"


def machine() -> dict[str, Any]:
    import torch
    import zmq

    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyzmq": zmq.__version__,
        "libzmq": zmq.zmq_version(),
        "load_before": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=12, help="messages per size and process pair")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64], metavar="MIB")
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, default=list(CANDIDATES), metavar="NAME")
    parser.add_argument("--limit-s", type=float, default=170.0, help="no new round after this")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--markdown", type=Path, help="write the table there as well")
    options = parser.parse_args()
    sizes = [m * MIB for m in options.sizes]
    about = machine()
    rounds = run(options.rounds, sizes, options.repeats, options.only, options.limit_s)
    rows = summary(rounds, options.only, sizes)
    facts = ", ".join(f"{key} {value}" for key, value in about.items())
    text = "\n".join((*table(rows, sizes), "", f"{len(rounds)} rounds, float16. {facts}.", ""))
    if options.markdown:
        options.markdown.write_text(text)
    print(json.dumps({"machine": about, "rows": rows, "rounds": rounds}) if options.json else text)


if __name__ == "__main__":
    main()
