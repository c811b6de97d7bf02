"""`kvplug top`: its lines, and the program beside real engines, in a real terminal."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvplug import Config
from kvplug.assembly.state import LinkState, PipeState, SideState, StoreState
from kvplug.assembly.watching import WatchPoint
from kvplug.cli.top import Shown, lines_of, top
from kvplug.metrics.spans import SpanLog
from kvplug_testing import waits
from kvplug_testing.engine import FakeEngine
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.peers import Parent, Peer

pytestmark = pytest.mark.timeout(90)

EVIL = "\x1b]0;owned\x07\x1b[31m\x9b\u202e\r\n\x00"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The engines of this test are the only ones of this user."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "kvplug"


def run_engine(parent: Parent, folder: str, name: str) -> None:
    os.environ["XDG_RUNTIME_DIR"] = folder
    given = {"connector": "p2p", "role": "producer", "transport": "cpu", "engine_id": name}
    with FakeEngine(Config.from_dict({**given, "host": f"unix:@kvplug-top-{os.getpid()}"})):
        parent.send("ready")
        parent.recv(timeout=None)


@pytest.fixture
def engine(fork_server: ForkServer, tmp_path: Path) -> Iterator[Callable[[str], Peer]]:
    """Starts an engine in a process of its own."""
    with contextlib.ExitStack() as stack:

        def run(name: str) -> Peer:
            peer = stack.enter_context(
                fork_server.start(f"{__file__}:run_engine", str(tmp_path), name, timeout_s=80)
            )
            assert peer.recv() == "ready"
            return peer

        yield run


def once(*arguments: str) -> Result:
    return CliRunner().invoke(top, [*arguments])


# -- the lines -----------------------------------------------------------------------------------------


def stats(matched: int, nbytes: int, **failures: dict[str, int]) -> dict[str, Any]:
    none = {"count": 0, "bytes": 0, "tokens": 0, "seconds": 0.0}
    match = {**none, "count": matched, "tokens": 96 * matched}
    return {"ops": {"match": match, "load": {**none, "bytes": nbytes}}, "failures": failures}


def test_what_has_happened_since_the_last_refresh_is_shown_beside_what_is_now() -> None:
    given: dict[str, Any] = {"connector": "lookup", "role": "consumer", "rank": "0", "engine_id": "decode"}
    worker, scheduler = Shown("process 7"), Shown("process 8")
    scheduler.answer(SideState(**given, side="scheduler", pid=8, stats=stats(100, 0, match={"expired": 3})))
    worker.answer(SideState(**given, side="worker", pid=7, stats=stats(0, 10**12)))
    (head, _, first, missed, second, *_) = lines_of([worker, scheduler])
    assert head.split()[0] == "PID"
    assert first.split() == ["scheduler", "0", "8", "0s", "100", "9.6k", "-", "-", "-", "-", "-"]
    assert missed.split() == ["missed", "expired", "3"]
    assert second.split() == ["worker", "0", "7", "0s", *"-" * 7]
    now = stats(107, 0, match={"expired": 3, "timeout": 2})
    scheduler.answer(SideState(**given, side="scheduler", pid=8, seconds=2.0, stats=now))
    status = {
        "loads": [{"request_id": f"r{n}", "source": "peer", "seconds": 1.5} for n in range(7)],
        "num_loads": 1007,
        "waiting": [{"request_id": "w", "seconds": 0.5}],
        "num_waiting": 1,
        "num_held": 4,
    }
    worker.at -= 2.0
    worker.answer(
        SideState(
            **given,
            side="worker",
            pid=7,
            seconds=7200.0,
            stats=stats(0, 10**12 + 10**10, load={"corrupt": 1, "timeout": 20}),
            status=status,
            links=(LinkState(peer="pid 3", address="a", engine_id="p" * 32, purpose="kv", seconds=61),),
            num_links=9,
            pipes=(
                PipeState(
                    transport="shm",
                    device="cpu",
                    peer="pid 3 (at x)",
                    route="memfd",
                    sent_bytes=3 << 30,
                    received_bytes=0,
                    gb_per_s=2.5,
                    claimed_gb_per_s=6.0,
                ),
            ),
            stores=(
                StoreState(name="host", medium="host", num_pages=1234, used_bytes=300, budget_bytes=400),
            ),
        )
    )
    lines = [*lines_of([worker, scheduler])]
    assert lines[2].split()[4:6] == ["7", "672"], "requests and tokens since the last refresh"
    assert lines[3].split() == ["missed", "timeout", "2"]
    row = lines[4].split()
    assert row[:4] == ["worker", "0", "7", "2h"] and row[7:] == ["0.000", "1007", "1", "4"]
    assert 0 < float(row[6]) <= 5.0, "10 GB in at least 2 s"
    shown = "\n".join(lines[5:])
    for text in (
        "link    pid 3 (engine pppppppppppp), kv, 1m",
        "link    ... and 8 more",
        "pipe    shm 2.5 GB/s (claims 6 GB/s), 3 GiB out, 0 bytes in, pid 3, memfd",
        "store   host (host) [########..] 75% of 400 bytes, 1.23k pages",
        "load    r0 from peer, 1.5 s",
        "load    ... and 1002 more",
        "waits   w, 0.5 s",
        "failed  load timeout 20, load corrupt 1",
    ):
        assert text in shown
    assert [*lines_of([worker, scheduler, scheduler])] == lines, "two workers answer for the same scheduler"
    scheduler.answer(SideState(**given, side="scheduler", pid=8, seconds=1.0, stats=stats(5, 0)))
    assert [*lines_of([scheduler])][2].split()[4] == "5", "it is another engine, with the same pid"


def test_texts_of_others_are_escaped_and_a_wrong_answer_is_not_shown() -> None:
    states: list[dict[str, Any]] = [
        {"engine_id": EVIL, "connector": EVIL, "side": EVIL, "status": {EVIL: EVIL}, "stats": {EVIL: 1}},
        {"engine_id": 7},
        {"status": {"loads": EVIL}, "stats": {"ops": {"load": 3}, "failures": [1], "not_held": {"a": "b"}}},
    ]
    with contextlib.ExitStack() as stack:
        for state in states:
            stack.enter_context(contextlib.closing(WatchPoint(lambda state=state: state, SpanLog())))
        done = once("--once")
    assert done.exit_code == 0, done.output
    assert all(c.isprintable() or c == "\n" for c in done.output)
    assert max(map(len, done.output.splitlines())) <= 80
    assert done.output.count("does not answer") == 1


# -- engines -------------------------------------------------------------------------------------------


def test_without_an_engine_it_fails_and_names_where_it_looked(folder: Path) -> None:
    done = once("--once")
    assert done.exit_code == 1 and str(folder) in done.output
    done = once("unix:@kvplug-top-nobody")
    assert done.exit_code == 1 and "no process listens at unix:@kvplug-top-nobody" in " ".join(
        done.output.split()
    )
    (found,) = json.loads(once("--json", "unix:@kvplug-top-nobody").output)
    assert found["error"]


@pytest.mark.parametrize("wrong", ["nonsense", "unix:", "10.0.0.5:0"])
def test_what_is_not_an_address_is_a_usage_error(wrong: str) -> None:
    done = once("--once", "unix:@kvplug-top-nobody", wrong)
    assert done.exit_code == 2 and f"'{wrong}' is not an address" in " ".join(done.output.split())


def test_a_stopped_engine_is_named_and_a_killed_one_is_gone(engine: Callable[[str], Peer]) -> None:
    first, second = engine("first"), engine("second")
    found = json.loads(once("--json").output)
    sides = sorted((each["engine_id"], each["side"], each["pid"]) for each in found)
    assert sides == [
        (name, side, peer.pid)
        for name, peer in (("first", first), ("second", second))
        for side in ("scheduler", "worker")
    ]
    os.kill(first.pid, signal.SIGSTOP)
    done = once()  # no terminal: once
    assert done.exit_code == 0 and done.output.count(f"process {first.pid} does not answer") == 2
    assert "engine second: p2p, producer" in done.output
    for peer in (first, second):
        os.kill(peer.pid, signal.SIGKILL)
    waits.until(lambda: once("--once").exit_code == 1, what="the end of both")
    address = f"unix:@kvplug-top-{engine('third').pid}-0"
    shown = once("--once", address).output
    assert "scheduler 0" in shown and "worker 0" in shown


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Callable[..., list[str]]]:
    """Runs a command of tmux, and returns what it prints. There is a terminal of 80 columns and 24 lines."""
    program = shutil.which("tmux") or pytest.skip("tmux is not installed: apt-get install tmux")

    def run(*arguments: str) -> list[str]:
        command = [program, "-f", os.devnull, "-S", str(tmp_path / "tmux"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.splitlines()

    run("new-session", "-d", "-x", "80", "-y", "24", "env PS1='$ ' sh")
    try:
        yield run
    finally:
        run("kill-server")


def test_in_a_terminal_engines_come_and_go_until_ctrl_c(
    tmux: Callable[..., list[str]], engine: Callable[[str], Peer]
) -> None:
    def screen() -> str:
        return "\n".join(tmux("capture-pane", "-p", "-J"))  # a wrapped line would come as one

    def until(text: str, *, shown: bool = True) -> None:
        waits.until(lambda: (text in screen()) is shown, what=f"{text!r} on the screen, or its end")

    tmux("send-keys", "echo be''fore", "Enter")
    until("before")
    tmux("send-keys", f"TERM=dumb {sys.executable} -m kvplug.cli top; echo co''de $?", "Enter")
    until("code 1")
    tmux("send-keys", f"{sys.executable} -m kvplug.cli top --interval 200ms", "Enter")
    until("no engine or store of this user was found")
    first = engine("first")
    until("engine first: p2p, producer")
    second = engine("second")
    until("engine second: p2p, producer")
    assert max(map(len, screen().splitlines())) <= 80
    os.kill(first.pid, signal.SIGKILL)
    until("engine first", shown=False)
    os.kill(second.pid, signal.SIGSTOP)
    until(f"process {second.pid} does not answer")
    os.kill(second.pid, signal.SIGCONT)
    until("engine second: p2p, producer")
    tmux("send-keys", "C-c")
    until("kvplug top  ", shown=False)
    tmux("send-keys", "echo code $?", "Enter")
    until("code 0")
    assert "before" in screen() and "Traceback" not in screen()
