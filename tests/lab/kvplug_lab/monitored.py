"""Engines with and without faults, watched by a real Prometheus with the rules of docs/examples/monitoring.

``python -m kvplug_lab.monitored FOLDER IMAGE`` draws the panels of the folder's dashboard from such a run.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import prometheus_client

from kvplug import Config, KvplugError, connect_pipe, listen_pipe
from kvplug.engine import Request, SchedulerConnector, Sink
from kvplug_lab.faults import FaultyPipe, Rule
from kvplug_testing import waits
from kvplug_testing.engine import MODEL, FakeEngine, request_of

NUM_GOOD: Final = 10
PROGRAM: Final = shutil.which("prometheus")
_MINUTE_S: Final = 1.0
"""A minute of the rules takes at least this long."""
_START_TIMEOUT_S: Final = 30.0


def scaled(text: str, minute_s: float) -> str:
    """Rules or an expression in which a minute is shorter, for all jobs."""
    text = text.replace("$job", ".+").replace("$instance", ".+").replace("$__rate_interval", "5m")
    units = {"m": 1000 * minute_s, "h": 60_000 * minute_s}
    return re.sub(r"\b(\d+)([mh])\b", lambda found: f"{int(int(found[1]) * units[found[2]])}ms", text)


class Prometheus:
    """A process that scrapes targets on this host."""

    def __init__(self, folder: Path, rules: str, targets: Mapping[str, int], step_s: float) -> None:
        """``targets``: the ports of the exporters by the names of their jobs. ``step_s``: between two scrapes
        of each, and two evaluations of the rules."""
        (folder / "rules.yml").write_text(rules, encoding="utf-8")
        step = f"{int(step_s * 1000)}ms"
        jobs = [
            {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
            for name, port in targets.items()
        ]
        config = {
            "global": {"scrape_interval": step, "scrape_timeout": step, "evaluation_interval": step},
            "rule_files": ["rules.yml"],
            "scrape_configs": jobs,
        }
        (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                str(PROGRAM),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self._address}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        try:
            waits.until(self._is_ready, _START_TIMEOUT_S, what="Prometheus")
        except BaseException:
            self.close()
            raise

    def _is_ready(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=5):
            return True
        return False

    def request(self, path: str, **given: object) -> Any:
        """The data of an answer of its API."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(given)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return json.load(answer)["data"]

    def firing(self) -> set[tuple[str, str]]:
        """Each alert that has fired, with its job."""
        query = 'count by (alertname, job) (max_over_time(ALERTS{alertstate="firing"}[1h]))'
        found = self.request("query", query=query)["result"]
        return {(each["metric"]["alertname"], each["metric"]["job"]) for each in found}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()


# -- what is watched -----------------------------------------------------------------------------------


class Job:
    """A prefill and a decode engine, and the exporter of their metrics."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        registry = prometheus_client.CollectorRegistry()
        counter = functools.partial(prometheus_client.Counter, registry=registry)
        histogram = functools.partial(prometheus_client.Histogram, registry=registry)
        self._sinks = SchedulerConnector.build_prom_metrics(
            ["engine"], {0: ["prefill"], 1: ["decode"]}, counter, histogram
        )
        self._server, self._thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
        self.port: int = self._server.server_port
        self.is_faulty = False
        self._numbers = itertools.count()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(20)

    def emit(self, snapshot: Mapping[str, Any] | None, *, is_decode: bool) -> None:
        sink: Sink = self._sinks[is_decode]
        if snapshot is not None:
            sink.emit(snapshot, {})

    def report(self, engine: FakeEngine, *, is_decode: bool = True) -> None:
        """Export what an engine has counted, as vLLM does after each step."""
        self.emit(engine.scheduler.get_stats(), is_decode=is_decode)
        self.emit(engine.figures(), is_decode=is_decode)

    def engine(self, role: str, *, model: Any = None, connect: str = "", **given: Any) -> FakeEngine:
        """``given``: keys of the config; the lookup connector's options are ``lookup``."""
        lookup = {"load_policy": "always", "wait_timeout_s": 0.2, **given.pop("lookup", {})}
        options = {"host": {"size": 1 << 20, "segment_bytes": 1 << 18}, **given.pop("options", {})}
        config = {
            "connector": "lookup",
            "connect_timeout_s": 10,
            "timeout_s": 5,
            "role": role,
            **given,
            "options": {**options, "lookup": lookup},
        }
        build: dict[str, Any] = (
            {"connect": connect} if connect else {"listen": "unix:"} if "peers" not in given else {}
        )
        return FakeEngine(Config.from_dict(config), model=model, **build)

    @contextmanager
    def pair(self, **given: Any) -> Iterator[tuple[FakeEngine, FakeEngine]]:
        with (
            self.engine("producer", lookup={"wait_timeout_s": 60}) as prefill,
            self.engine("consumer", connect=prefill.worker.contact, **given) as decode,
        ):
            yield prefill, decode

    def alone(self, **given: Any) -> FakeEngine:
        """An engine that keeps pages in a folder, and loads them from there."""
        fs = {"path": str(self.folder), **given}
        return self.engine(
            "both", stores=["fs"], peers=[], host=f"unix:@kvplug-{id(self)}", options={"fs": fs}
        )

    def request(self, number: int) -> Request:
        return request_of(f"request {next(self._numbers)}", range(1000 * number, 1000 * number + 100))

    def save(self, engine: FakeEngine, number: int, *, is_decode: bool = True) -> None:
        """Compute a prompt, and keep its pages."""
        blocks = engine.prefill(self.request(number))
        engine.free_blocks.extend(blocks)
        self.report(engine, is_decode=is_decode)

    def load(self, engine: FakeEngine, number: int, before: Callable[[], object] | None = None) -> None:
        """Load a prompt. ``before`` is called between the promise and the load."""
        request = self.request(number)
        found, _ = engine.matched(request)
        if before is not None:
            before()
        blocks = engine.allocate(len(request.token_ids))
        engine.scheduler.update_state_after_alloc(request, (blocks,), found)
        engine.step([(request, blocks, found, len(request.token_ids) - found)])
        engine.finish(request, blocks)
        engine.settle()
        engine.free_blocks.extend(blocks)
        self.report(engine)


Rounds = Iterator[None]
"""The work of a job. It is resumed for each round."""


def good(job: Job) -> Rounds:
    """All is found, but for a prompt now and then; the store evicts old prompts."""
    with job.pair() as (prefill, decode):
        decode.scheduler.wait_until_ready(20)
        for number in itertools.count():
            job.save(prefill, number, is_decode=False)
            if number:
                job.load(decode, number - 1)
            if number % 5 == 4:
                job.load(decode, number + 1000)
            yield


def collapsing(job: Job) -> Rounds:
    """Prefill saves no more, and decode goes on asking."""
    with job.pair() as (prefill, decode):
        decode.scheduler.wait_until_ready(20)
        for number in itertools.count():
            if not job.is_faulty:
                job.save(prefill, number, is_decode=False)
            if number:
                job.load(decode, number + 1000 if job.is_faulty else number - 1)
            yield


def corrupt(job: Job) -> Rounds:
    """Another program writes to the files of pages."""
    return _harmed(job, _spoil)


def vanishing(job: Job) -> Rounds:
    """Another program removes pages that were promised."""
    return _harmed(job, Path.unlink)


def _harmed(job: Job, harm: Callable[[Path], object]) -> Rounds:
    def harm_all() -> None:
        for path in job.folder.rglob("*") if job.is_faulty else ():
            if path.is_file() and path.stat().st_size > 4096:
                harm(path)

    with job.alone() as engine:
        for number in itertools.count():
            job.save(engine, number)
            job.load(engine, number, harm_all)
            yield


def _spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def full(job: Job) -> Rounds:
    """The folder's size is less than a page."""
    yield from _until_faulty(job)
    with job.alone(size=4096) as engine:
        for number in itertools.count():
            job.save(engine, number)
            yield


def refused(job: Job) -> Rounds:
    """Decode has another model."""
    yield from _until_faulty(job)
    with job.pair(model=attrs.evolve(MODEL, window=4096)) as (_, decode):
        while True:
            with suppress(KvplugError):
                decode.scheduler.wait_until_ready(0.1)
            job.report(decode)
            yield


def unreachable(job: Job) -> Rounds:
    """Prefill ends when decode is about to load."""
    with job.pair() as (prefill, decode):
        decode.scheduler.wait_until_ready(20)
        for number in itertools.count():
            job.save(prefill, number, is_decode=False)
            if number:
                job.load(decode, number - 1, prefill.worker.shutdown if job.is_faulty else None)
            if job.is_faulty:
                break
            yield
        while True:
            job.report(decode)
            yield


def expiring(job: Job) -> Rounds:
    """Prefill announces KV and does not compute it."""
    with job.pair() as (prefill, decode):
        decode.scheduler.wait_until_ready(20)
        for number in itertools.count():
            job.save(prefill, number, is_decode=False)
            if number:
                job.load(decode, number - 1)
            yield
            if job.is_faulty:
                break
        late = job.request(5000)
        planned = prefill.plan([(late, prefill.admit(late), 0, 100)])
        prefill.worker.bind_connector_metadata(planned.metadata)
        while True:
            job.load(decode, 5000)
            yield


def lost(job: Job) -> Rounds:
    """Nothing listens at the address of the directory of engines."""
    yield from _until_faulty(job)
    with job.engine("both", peers=["etcd://127.0.0.1:9"], host=f"unix:@kvplug-{id(job)}") as engine:
        while True:
            job.report(engine)
            yield


def slow(job: Job) -> Rounds:
    """A pipe carries a thousandth of what its transport claims."""
    import torch

    def wrapped(pipe: Any) -> Any:
        return FaultyPipe(pipe, [Rule.parsed(f"slow bytes_per_s={4 << 20}")])

    yield from _until_faulty(job)
    config = Config.from_dict({"transport": "cpu", "timeout_s": 60, "connect_timeout_s": 20})
    message = torch.zeros(1 << 20, dtype=torch.uint8)
    with listen_pipe(config, "unix:") as server:
        joining = waits.Call(lambda: connect_pipe(config, server.contact, wrap_pipe=wrapped))
        with server.accept() as other, joining.result(20) as pipe:
            waits.Call(lambda: [other.recv_tensor(timeout=60) for _ in range(40)])
            waits.Call(lambda: [pipe.send_tensor(message).wait(60) for _ in range(40)])
            while True:
                job.emit(pipe.recorder.stats.take(), is_decode=False)
                yield


def _until_faulty(job: Job) -> Rounds:
    while not job.is_faulty:
        yield


FAULTS: Final[Mapping[Callable[[Job], Rounds], frozenset[str]]] = {
    corrupt: frozenset({"KvplugCorruptData", "KvplugLoadsFailing"}),
    vanishing: frozenset({"KvplugEvictedBeforeRead", "KvplugLoadsFailing"}),
    unreachable: frozenset({"KvplugPeerUnreachable"}),
    refused: frozenset({"KvplugHandshakesRefused"}),
    slow: frozenset({"KvplugSlowPath"}),
    collapsing: frozenset({"KvplugHitRateCollapsed"}),
    full: frozenset({"KvplugStoreFull"}),
    expiring: frozenset({"KvplugWaitsExpire"}),
    lost: frozenset({"KvplugDirectoryFailing"}),
}
"""The alerts that must fire for each fault."""


class Run:
    """Ten good jobs, and one for each fault, in one Prometheus."""

    def __init__(self, rules: Path) -> None:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplug-monitored-")))
        works: dict[str, Callable[[Job], Rounds]] = {f"good-{number}": good for number in range(NUM_GOOD)}
        works |= {work.__name__: work for work in FAULTS}
        self.expected = {(alert, work.__name__) for work, alerts in FAULTS.items() for alert in alerts}
        self._jobs: dict[str, Job] = {}
        self._rounds: list[Rounds] = []
        with self._stack:
            for name in works:
                job = self._jobs[name] = Job(folder / name)
                self._stack.callback(job.close)
            for name, work in works.items():
                self._rounds.append(rounds := work(self._jobs[name]))
                self._stack.callback(rounds.close)  # type: ignore[attr-defined]
            for _ in range(2):
                begun = time.monotonic()
                self._round()
            self.minute_s = max(_MINUTE_S, time.monotonic() - begun)
            """How long a minute of the rules takes: longer on a busy host, where a round of the jobs does."""
            self.prometheus = Prometheus(
                folder,
                scaled(rules.read_text(encoding="utf-8"), self.minute_s),
                {name: job.port for name, job in self._jobs.items()},
                self.minute_s / 2,
            )
            self._stack.callback(self.prometheus.close)
            self.begun_at = time.time()
            self._opened = self._stack.pop_all()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def work(self, minutes: float, *, is_done: Callable[[], bool] = lambda: False) -> None:
        """Let all jobs work for so long, or until it is done."""
        end = time.monotonic() + minutes * self.minute_s
        while time.monotonic() < end and not is_done():
            next_round = time.monotonic() + self.minute_s / 2
            self._round()
            time.sleep(max(0.0, next_round - time.monotonic()))

    def _round(self) -> None:
        for rounds in self._rounds:
            next(rounds)

    def break_all(self) -> None:
        """Let the faults begin."""
        for name, job in self._jobs.items():
            job.is_faulty = not name.startswith("good-")

    def series(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression of the dashboard, over the whole run."""
        now = time.time()
        found: list[dict[str, Any]] = self.prometheus.request(
            "query_range", query=scaled(expression, self.minute_s), start=self.begun_at, end=now, step=1
        )["result"]
        return found

    def exemplars(self, name: str) -> list[Any]:
        """The traces that observations of a metric name."""
        given = {"query": name, "start": self.begun_at, "end": time.time()}
        found: list[Any] = self.prometheus.request("query_exemplars", **given)
        return found


def panels_of(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "dashboard.json").read_text(encoding="utf-8"))[
        "panels"
    ]
    return found


def _label(target: Mapping[str, str], labels: Mapping[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda found: labels[found[1]], target["legendFormat"])


def draw(folder: Path, image: Path) -> None:
    """Draw the panels from a run with faults."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.fonttype"] = "none"
    panels = panels_of(folder)
    units = {"percentunit": "share", "reqps": "requests/s", "cps": "pages/s", "Bps": "bytes/s"}
    figure, places = plt.subplots(
        -(-len(panels) // 3), 3, sharex=True, figsize=(14, 12), layout="constrained"
    )
    with Run(folder / "alerts.yml") as run:
        run.work(20)
        broken_s = time.time() - run.begun_at
        run.break_all()
        run.work(25)
        for place, panel in zip(places.flat, panels, strict=True):
            place.set_title(panel["title"], fontsize=9, loc="left")
            place.axvline(broken_s, color="0.6", linestyle=":", linewidth=1)
            for target in panel["targets"]:
                for series in run.series(target["expr"]):
                    points = [(at - run.begun_at, float(value)) for at, value in series["values"]]
                    place.plot(
                        *zip(*points, strict=True), linewidth=1.2, label=_label(target, series["metric"])
                    )
            place.set_ylim(0, 1.4 * place.get_ylim()[1])
            unit = panel["fieldConfig"]["defaults"]["unit"]
            place.set_ylabel(units.get(unit, unit.replace("short", "")), fontsize=7)
            place.tick_params(labelsize=7)
            place.legend(fontsize=6, frameon=False, loc="upper left", ncols=3)
    figure.savefig(image)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
