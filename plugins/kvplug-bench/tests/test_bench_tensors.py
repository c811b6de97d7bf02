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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplug_bench.candidate import MEMCPY, Candidate, baseline
from kvplug_bench.rounds import Figures, Plan, measure_once, run_rounds
from kvplug_testing.peers import nothing_left
from kvplug_testing.waits import until

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
def links(tmp_path: Path):
    (tmp_path / "own_links.py").write_text(LINKS)

    def make(how: str) -> Candidate:
        env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)}
        return Candidate(name=how, kind="pipe", link="own_links:Socket", arguments={"how": how}, env=env)

    return make


def by_op(figures: list[Figures]) -> dict[tuple[str, int], Figures]:
    return {(each.op, each.nbytes): each for each in figures}


def test_a_pipe_is_measured_in_every_op(links):
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


def test_a_copy_is_made_by_one_process():
    found = measure_once(MEMCPY, PLAN)
    sizes = [(op, nbytes) for op in ("into", "alone") for nbytes in (64, 64 * KIB)]
    assert [(each.op, each.nbytes) for each in found] == sizes
    assert all(each.gb_per_s for each in found)


@pytest.mark.parametrize("name", ["gloo", "zmq"])
@pytest.mark.parametrize("kind", ["pipe", "queue"])
def test_a_baseline_is_measured_or_says_what_it_lacks(name, kind):
    (candidate,) = baseline(name, {kind})
    (outcome,) = run_rounds([candidate], Plan(sizes=(64 * KIB,), rounds=1, readers=2, idle_s=0))
    if outcome.skipped_because:
        assert outcome.skipped_because in ("zmq is not installed", "this torch is built without gloo")
        return
    ops = [each.op for each in outcome.rounds[0]]
    assert ops == (["into", "alone", "owned", "latency"] if kind == "pipe" else ["kept", "latency"])


@pytest.mark.parametrize(
    ("how", "has_failed", "why"),
    [
        ("unavailable", False, "it is night"),
        ("dying", True, "failed: the cat came"),
        ("changing", True, "the content of 64 bytes was changed on its way"),
    ],
)
def test_what_cannot_work_here_or_fails_has_its_reason(links, how, has_failed, why):
    with nothing_left():
        (outcome,) = run_rounds([links(how)], PLAN)
    assert (outcome.failed, outcome.rounds) == (has_failed, [])
    assert outcome.skipped_because.startswith("failed: ") == has_failed
    assert why in outcome.skipped_because
    assert ("killed by SIGKILL" in outcome.last_output) == (how == "dying")


# -- the program -----------------------------------------------------------------------------------


def rows(site: Any, arguments: str) -> list[dict[str, Any]]:
    """Each of its processes imports torch, which takes long where others are at work."""
    arguments += " --rounds 1 --json"
    done = site.kvplug("bench", *arguments.split(), timeout_s=LONGEST_S)
    assert (done.returncode, done.stderr) == (0, "")
    return list(json.loads(done.stdout))


def test_rows_for_programs_have_every_figure_and_nothing_else(site):
    pytest.importorskip("kvplug_cpu", reason="kvplug-cpu is not installed")
    found = rows(site, "--transport cpu,pipe:memory --baseline memcpy --sizes 64KiB --idle 100ms")
    keys = "name kind op bytes gb_per_s latency_us_p50 latency_us_p99 cpu_s_per_gb idle_cpu_percent"
    assert {" ".join(row) for row in found} == {f"{keys} skipped_because"}
    assert [" ".join(map(str, list(row.values())[:4])) for row in found if not row["skipped_because"]] == [
        *(f"cpu pipe {op} {64 * KIB}" for op in ("into", "alone", "owned")),
        "cpu pipe latency 64",
        "cpu pipe wake 64",
        *(f"memcpy copy {op} {64 * KIB}" for op in ("into", "alone")),
    ]
    skipped = {(row["name"], row["kind"]): row["skipped_because"] for row in found if row["skipped_because"]}
    assert skipped == {("memory", "pipe"): "its two ends can only be connected within one process"}


def test_a_queue_is_measured_with_its_readers(site):
    pytest.importorskip("kvplug_shm", reason="kvplug-shm is not installed")
    arguments = "--sizes 4KiB,64KiB --readers 2 --chunk-bytes 4KiB --chunks 4 --idle 50ms"
    found = rows(site, f"--transport queue:shm {arguments} --baseline memcpy")
    assert [(row["op"], row["bytes"], row["skipped_because"]) for row in found if row["name"] == "shm"] == [
        ("kept", 4 * KIB, ""),
        ("kept", 64 * KIB, ""),
        ("looked", 4 * KIB, ""),
        ("latency", 4 * KIB, ""),
        ("wake", 4 * KIB, ""),
        ("looked", 64 * KIB, "larger than one of its chunks, 4 KiB"),
    ]
    assert found[4]["latency_us_p50"] > 0
    assert found[4]["idle_cpu_percent"] is not None


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
def test_whatever_ends_it_no_process_is_left(started, ending, code):
    child, seen = started
    until(lambda: b"gloo" in seen and len(session(child.pid)) >= 3, LONGEST_S)
    child.send_signal(ending)
    assert child.wait(LONGEST_S) == code
    until(lambda: not session(child.pid), LONGEST_S)
    assert b"round 1: gloo" in seen
