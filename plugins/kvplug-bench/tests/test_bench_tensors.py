"""``kvplug bench`` in real processes: small sizes, what fails, what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplug_bench.candidate import MEMCPY, Candidate, baseline
from kvplug_bench.rounds import Figures, Outcome, Plan, measure_once, run_rounds
from kvplug_testing.peers import nothing_left

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

KIB = 1 << 10
LONGEST_S = 280.0
PLAN = Plan(sizes=(64, 64 * KIB), rounds=1, idle_s=0.1)

LINKS = """
import os, socket, sys, time
from kvplug_bench.links import Link, UnavailableError

class Socket(Link):
    def __init__(self, rendezvous, how="well"):
        if how == "unavailable" and not rendezvous.is_first:
            raise UnavailableError("it is night")
        if how == "lacking":
            import a_module_that_is_not_there
        self.how, path = how, f"{rendezvous.folder}/socket"
        self.sock = socket.socket(socket.AF_UNIX)
        if rendezvous.is_first:
            self.sock.bind(path)
            self.sock.listen()
            rendezvous.send(path)
            self.sock = self.sock.accept()[0]
        else:
            self.sock.connect(rendezvous.recv())

    def send(self, tensor):
        if self.how == "dying" and tensor.nbytes > 64:
            print("the cat came", file=sys.stderr, flush=True)
            os.kill(os.getpid(), 9)
        self.sock.sendall(tensor.numpy())

    def receive(self, out):
        left = memoryview(out.numpy()).cast("B")
        while left:
            got = self.sock.recv_into(left)
            if not got:
                raise EOFError("the other end is gone")
            left = left[got:]
        if self.how == "changing":
            out[-1] += 1

    def receive_new(self, like):
        out = like.new_zeros(like.shape)
        self.receive(out)
        return out

    def close(self):
        self.sock.close()
"""


@pytest.fixture
def links(tmp_path: Path) -> Any:
    (tmp_path / "own_links.py").write_text(LINKS)

    def make(how: str) -> Candidate:
        env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)}
        return Candidate(name=how, kind="pipe", link="own_links:Socket", arguments={"how": how}, env=env)

    return make


def by_op(figures: list[Figures]) -> dict[tuple[str, int], Figures]:
    return {(each.op, each.nbytes): each for each in figures}


def test_a_pipe_is_measured_in_every_op(links: Any) -> None:
    with nothing_left():
        found = by_op(measure_once(links("well"), PLAN))
    sizes = [(op, nbytes) for op in ("into", "alone", "owned") for nbytes in (64, 64 * KIB)]
    assert list(found) == [*sizes, ("latency", 64), ("wake", 64)]
    for key in sizes:
        assert found[key].gb_per_s and found[key].cpu_s_per_gb
        assert found[key].latency_us_p50 is None
    latency, woken = found["latency", 64], found["wake", 64]
    assert latency.latency_us_p50 and latency.latency_us_p99
    assert latency.latency_us_p50 <= latency.latency_us_p99
    assert woken.latency_us_p50
    assert woken.idle_cpu_percent is not None


def test_a_copy_is_made_by_one_process() -> None:
    found = measure_once(MEMCPY, PLAN)
    sizes = [(op, nbytes) for op in ("into", "alone") for nbytes in (64, 64 * KIB)]
    assert [(each.op, each.nbytes) for each in found] == sizes
    assert all(each.gb_per_s for each in found)


@pytest.mark.parametrize("name", ["gloo", "zmq"])
@pytest.mark.parametrize("kind", ["pipe", "queue"])
def test_a_baseline_is_measured_or_says_what_it_lacks(name: str, kind: str) -> None:
    (candidate,) = baseline(name, {kind})
    (outcome,) = run_rounds([candidate], Plan(sizes=(64 * KIB,), rounds=1, readers=2, idle_s=0))
    if outcome.skipped_because:
        assert outcome.skipped_because in ("zmq is not installed", "this torch is built without gloo")
        return
    ops = [each.op for each in outcome.rounds[0]]
    assert ops == (["into", "alone", "owned", "latency"] if kind == "pipe" else ["kept", "latency"])


@pytest.mark.parametrize(
    ("how", "reason"),
    [("unavailable", "it is night"), ("lacking", "a_module_that_is_not_there is not installed")],
)
def test_what_cannot_work_here_says_why_and_is_no_failure(links: Any, how: str, reason: str) -> None:
    with nothing_left():
        (outcome,) = run_rounds([links(how)], PLAN)
    assert (outcome.skipped_because, outcome.failed, outcome.rounds) == (reason, False, [])


def failed(candidate: Candidate) -> Outcome:
    with nothing_left():
        (outcome,) = run_rounds([candidate], PLAN)
    assert outcome.failed
    assert outcome.skipped_because.startswith("failed: ")
    return outcome


def test_a_process_that_dies_is_told_with_its_last_words(links: Any) -> None:
    outcome = failed(links("dying"))
    assert "killed by SIGKILL" in outcome.last_output
    assert outcome.skipped_because == "failed: the cat came"


def test_content_that_is_changed_on_its_way_is_a_failure(links: Any) -> None:
    assert "the content of 64 bytes was changed on its way" in failed(links("changing")).skipped_because


def test_a_link_that_is_misspelt_says_so() -> None:
    nearly = Candidate(name="gloo", kind="pipe", link="kvplug_bench.gloo:Glue")
    (outcome,) = run_rounds([nearly], PLAN)
    assert outcome.skipped_because.endswith("has no attribute 'Glue'")


# -- the program -----------------------------------------------------------------------------------


def bench(site: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Each of its processes imports torch, which takes long where others are at work."""
    done: subprocess.CompletedProcess[str] = site.kvplug("bench", *arguments, timeout_s=LONGEST_S)
    return done


def test_a_device_that_is_not_here_is_a_row_that_says_so(site: Any) -> None:
    arguments = ["--transport", "pipe:memory", "--baseline", "memcpy", "--device", "cuda:99", "--rounds", "1"]
    done = bench(site, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row["skipped_because"] for row in json.loads(done.stdout)}
    assert rows["memory"] == "moves cpu tensors, and cuda ones are needed"
    assert "device 'cuda:99' cannot be used on this machine" in rows["memcpy"]


def test_rows_for_programs_have_every_figure_and_nothing_else(site: Any) -> None:
    pytest.importorskip("kvplug_cpu", reason="kvplug-cpu is not installed")
    arguments = ["--transport", "cpu,pipe:memory", "--baseline", "memcpy", "--sizes", "64KiB"]
    done = bench(site, *arguments, "--rounds", "1", "--idle", "100ms", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    assert {tuple(row) for row in rows} == {
        (
            *("name", "kind", "op", "bytes", "gb_per_s", "latency_us_p50", "latency_us_p99"),
            *("cpu_s_per_gb", "idle_cpu_percent", "skipped_because"),
        )
    }
    measured = [(row["name"], row["op"], row["bytes"]) for row in rows if not row["skipped_because"]]
    assert measured == [
        ("cpu", "into", 64 * KIB),
        ("cpu", "alone", 64 * KIB),
        ("cpu", "owned", 64 * KIB),
        ("cpu", "latency", 64),
        ("cpu", "wake", 64),
        ("memcpy", "into", 64 * KIB),
        ("memcpy", "alone", 64 * KIB),
    ]
    skipped = {(row["name"], row["kind"]): row["skipped_because"] for row in rows if row["skipped_because"]}
    assert skipped == {("memory", "pipe"): "its two ends can be connected within one process only"}


def test_a_pipe_around_another_is_measured_with_what_it_adds(site: Any) -> None:
    pytest.importorskip("kvplug_cpu", reason="kvplug-cpu is not installed")
    arguments = ["--transport", "pipe:around", "--baseline", "", "--sizes", "64KiB", "--idle", "0", "--json"]
    options = ["options.around.inner=cpu", "options.around.mark=x"]
    done = bench(site, *arguments, "--rounds", "1", *options)
    assert done.returncode == 0, done.stderr
    assert [row["op"] for row in json.loads(done.stdout)] == ["into", "alone", "owned", "latency"]


def test_a_queue_is_measured_with_its_readers(site: Any) -> None:
    pytest.importorskip("kvplug_shm", reason="kvplug-shm is not installed")
    arguments = ["--transport", "queue:shm", "--baseline", "", "--sizes", "4KiB,64KiB", "--rounds", "1"]
    arguments += ["--readers", "2", "--chunk-bytes", "4KiB", "--chunks", "4", "--idle", "50ms", "--json"]
    done = bench(site, *arguments)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["op"], row["bytes"], row["skipped_because"]) for row in rows] == [
        ("kept", 4 * KIB, ""),
        ("kept", 64 * KIB, ""),
        ("looked", 4 * KIB, ""),
        ("latency", 4 * KIB, ""),
        ("wake", 4 * KIB, ""),
        ("looked", 64 * KIB, "larger than one of its chunks, 4 KiB"),
    ]
    assert rows[3]["latency_us_p50"] > 0
    assert rows[3]["idle_cpu_percent"] is not None


@pytest.fixture
def own_pipe(site: Any) -> Any:
    """A pipe whose ends say something and die."""
    source = (
        "from kvplug.transport import TransportSpec, hookimpl\nKVPLUG_API = (1, 0)\n"
        "@hookimpl\ndef kvplug_transports():\n"
        "    return [TransportSpec(kind='pipe', name='cat', factory='kvplug_cat.pipe:cat')]\n"
    )
    code = (
        "import os, sys\ndef cat(context):\n    print('meow', file=sys.stderr, flush=True)\n    os._exit(3)\n"
    )
    site.add("cat", source, files={"pipe.py": code})
    return site


def test_a_failure_is_told_and_the_others_are_shown(own_pipe: Any) -> None:
    arguments = ["--transport", "cat", "--baseline", "memcpy", "--sizes", "64KiB", "--rounds", "1"]
    done = bench(own_pipe, *arguments)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].split()[:4] == ["NAME", "KIND", "OP", "SIZE"]
    assert any(line.startswith("cat") and line.endswith("skipped: failed: meow") for line in lines)
    assert any(line.startswith("memcpy") for line in lines)
    assert "1 rounds, medians. " in lines[-1]
    assert done.stderr.startswith("kvplug: pipe cat failed; the last output of its process:\n")
    assert "exit code 3" in done.stderr


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], bytearray]]:
    """A run that takes long, in a session of its own, and what the terminal shows that is its stderr."""
    reader, writer = pty.openpty()
    seen = bytearray()

    def look() -> None:  # all the time: a process that writes to an unread terminal waits
        with contextlib.suppress(OSError):
            while data := os.read(reader, 65536):
                seen.extend(data)

    arguments = ["bench", "--transport", "memory", "--baseline", "gloo", "--rounds", "99", "--idle", "60s"]
    child = subprocess.Popen(
        [sys.executable, "-m", "kvplug.cli", *arguments],
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=writer,
        start_new_session=True,
        # A shell without job control starts its background jobs with SIGINT ignored, and so these tests.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    os.close(writer)
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    yield child, seen
    child.kill()
    child.communicate()
    looking.join(30)
    os.close(reader)


def session(leader: int) -> set[int]:
    """Every process that a run has started, and the run itself."""
    found = set()
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(each.name)) == leader:
                found.add(int(each.name))
        except ProcessLookupError:
            continue
    return found


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_whatever_ends_it_no_process_is_left(
    started: tuple[subprocess.Popen[bytes], bytearray], ending: signal.Signals, code: int
) -> None:
    child, seen = started
    limit = time.monotonic() + LONGEST_S
    while b"gloo" not in seen:
        assert time.monotonic() < limit
        time.sleep(0.05)
    while len(session(child.pid)) < 3:
        assert time.monotonic() < limit
        time.sleep(0.05)
    child.send_signal(ending)
    assert child.wait(limit - time.monotonic()) == code
    while left := session(child.pid):
        assert time.monotonic() < limit, left
        time.sleep(0.05)
    assert b"round 1: gloo" in seen
