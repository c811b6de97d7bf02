"""Tokens a second in vLLM with kvplug: what it costs where nothing is loaded, and what it saves where prompts
share prefixes that vLLM's own cache cannot keep.

    python benchmarks/vllm_throughput.py MODEL [--at-once 1,8,32] [--rounds 6] [--markdown FILE] [--json FILE]

Engines in processes of their own, in turns. "Nothing" sends new prompts of 100 tokens, and generates 32: to
vLLM alone, to a consumer with nothing to load, and to an engine that saves. "Shared" sends prompts whose
first half is one of a few prefixes, to engines whose cache holds few of them: vLLM alone, vLLM's
ExampleConnector over files in memory, and kvplug with its store in memory. vLLM's OffloadingConnector is
not among them, since its workers refuse a CPU. "Traced" sends new prompts to one engine that saves, which
exports its spans to a collector on this machine in one of three turns; the other two show the noise. (Two
engines that are alike differ by more than exporting costs.) In each turn it runs 64 requests, 8 at once, so
that nearly all of their spans are exported before the turn ends. Needs the environment of
docs/how-to/run-under-vllm.md, with kvplug-testing.
"""

from __future__ import annotations

import http.server
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import harness

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "plugins/kvplug-vllm/tests"))

from vllm_engines import Engine, engine, transfer_config  # noqa: E402

Rows = list[list[Any]]
ALONE = "vLLM alone"
EXPORTING = "exporting spans"
TRACED_TURNS = ("not exporting", "the same", EXPORTING)
TRACED_AT_ONCE, TRACED_REQUESTS = 8, 64
EXPORT_S = 2.5
"""After so long, the spans that were recorded before have been exported."""
PORT = 29700
PROMPT, NEW = 100, 32
NUM_PREFIXES, PREFIX = 24, 512
BLOCK = 128
"""vLLM's tokens in a block on a CPU."""
SMALL_CACHE = {"num_gpu_blocks_override": 8 * (2 * PREFIX // BLOCK + 1)}
"""Blocks for eight requests: three quarters of those that the prefixes take."""


def configs(folder: Path) -> dict[str, dict[str, dict[str, Any] | None]]:
    """The kv-transfer-configs of each experiment, by name."""
    options = {"host": {"size": 4 << 30}}
    # as an operator has it: what costs more than computing is not loaded
    usual = {"lookup": {"load_policy": "auto"}, **options}
    return {
        "nothing": {
            ALONE: None,
            "kvplug, a consumer": transfer_config("kv_consumer", PORT, stores=["host"], options=options),
            "kvplug, saving": transfer_config("kv_both", PORT + 10, options=options),
        },
        "shared": {
            ALONE: None,
            "ExampleConnector": {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": str(folder)},
            },
            "kvplug": transfer_config("kv_both", PORT + 20, options=usual),
        },
        "traced": {
            EXPORTING: transfer_config("kv_both", PORT + 30, options=options, tracing="otlp_proto_http"),
        },
    }


class Collector(http.server.BaseHTTPRequestHandler):
    """Counts the bytes of the spans that it receives."""

    num_bytes = 0

    def do_POST(self) -> None:
        Collector.num_bytes += len(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return None


@contextmanager
def collector() -> Iterator[None]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
        os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "1000"  # ms; by default five seconds
        yield
        server.shutdown()


def prompts(experiment: str, number: int, count: int, turn: str) -> list[list[int]]:
    """New ones in each round, and the same for every engine; one that has several turns has new ones in each.
    Round -1 has each prefix once."""
    chance = random.Random(f"{experiment} {number} {turn if experiment == 'traced' else ''}")
    if experiment != "shared":
        return [[chance.randrange(1000, 40_000) for _ in range(PROMPT)] for _ in range(count)]
    chosen = [chance.randrange(NUM_PREFIXES) for _ in range(count)] if number >= 0 else range(NUM_PREFIXES)
    return [prefix(each) + [chance.randrange(1000, 40_000) for _ in range(PREFIX)] for each in chosen]


def prefix(number: int) -> list[int]:
    chance = random.Random(f"prefix {number}")
    return [chance.randrange(1000, 40_000) for _ in range(PREFIX)]


def measured(
    running: dict[str, Engine], experiment: str, count: int, rounds: int
) -> dict[str, list[tuple[float, list[float], int]]]:
    """For each engine and round: tokens a second, seconds to each first token, cached tokens."""
    found: dict[str, list[tuple[float, list[float], int]]] = {name: [] for name in running}
    for number in range(-1, rounds):
        for name in harness.in_order(running, number):
            given = {"prompts": prompts(experiment, number, count, name), "max_tokens": NEW}
            if experiment == "traced":
                time.sleep(EXPORT_S)
                running[name].ask("export_spans", is_on=name == EXPORTING)
            seconds, firsts, num_cached = running[name].ask("timed", timeout=600.0, **given)
            if number >= 0:
                found[name].append((count * NEW / seconds, firsts, num_cached))
    return found


def rows(experiment: str, at_once: int, found: dict[str, list[tuple[float, list[float], int]]]) -> Rows:
    rows, first = [], next(iter(found))
    for name, taken in found.items():
        firsts = sorted(1e3 * each for _, of_round, _ in taken for each in of_round)
        speeds, alone = ([each for each, _, _ in found[which]] for which in (name, first))
        cells = (
            f"{statistics.median(speeds):.1f}",
            *harness.spread(speeds, alone),
            f"{statistics.median(firsts):.0f}",
            f"{firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))]:.0f}",
            f"{sum(each for _, _, each in taken) / len(firsts):.0f}",
        )
        rows.append([experiment, at_once, name, *cells])
        print(*rows[-1], sep=", ", file=sys.stderr)
    return rows


def main() -> None:
    parser = harness.parser(__doc__, 6)
    parser.add_argument("model", help="a name or a folder")
    parser.add_argument("--at-once", default="1,8,32", help="concurrent requests (default 1,8,32)")
    parser.add_argument("--only", choices=("nothing", "shared", "traced"), help="one of the experiments")
    given = parser.parse_args()
    found: Rows = []
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, collector():
        for experiment, transfers in configs(Path(folder)).items():
            if given.only not in (None, experiment):
                continue
            with ExitStack() as stack:
                cache = SMALL_CACHE if experiment == "shared" else {}
                running = {}
                for name, transfer in transfers.items():
                    most = TRACED_AT_ONCE if experiment == "traced" else 32
                    settings = {"max_model_len": 2048, "max_num_seqs": most, **cache}
                    running[name] = stack.enter_context(
                        engine(given.model, transfer, life_s=3600.0, **settings)
                    )
                    print(f"{experiment}, {name}: started", file=sys.stderr)
                counts = {number: number for number in map(int, given.at_once.split(","))}
                if experiment == "traced":
                    running = dict.fromkeys(TRACED_TURNS, running[EXPORTING])
                    counts = {TRACED_AT_ONCE: TRACED_REQUESTS}
                for at_once, count in counts.items():
                    found += rows(experiment, at_once, measured(running, experiment, count, given.rounds))
    head = ["prompts", "at once", "", "tokens/s", "of the first", "quartiles", "TTFT, ms: median", "99 %"]
    spans = f"{Collector.num_bytes / 1e3:.0f} KB of spans received"
    harness.write(given, harness.table([*head, "cached"], found), spans, harness.machine())


if __name__ == "__main__":
    main()
