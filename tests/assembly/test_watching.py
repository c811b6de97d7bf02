"""Programs of the same user find the processes of engines, and no one else does."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from kvplug.assembly.state import ProcessState, SideState
from kvplug.assembly.watched import LocalProcess
from kvplug.assembly.watching import WatchPoint, runtime_folder, watched_sockets
from kvplug.cli.request import explain_request
from kvplug.errors import PeerGoneError, TimeoutError, TransportError
from kvplug.metrics.spans import SpanLog
from kvplug.metrics.stats import TransferStats
from kvplug.net.wire import encode
from kvplug_testing import waits
from kvplug_testing.peers import Parent, start

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime folder of this test and its peers."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "kvplug"


def watch_point(parent: Parent, folder: str) -> None:
    os.environ["XDG_RUNTIME_DIR"] = folder
    spans = SpanLog()
    root = spans.begin("cmpl-1-0")
    spans.record("load", "cmpl-1-0", time.perf_counter() - 1, parent=root, reason="timeout")
    spans.record("serve", "", 0.0, parent=root, num_pages=3)
    spans.record("load", "other", 0.0)
    point = WatchPoint(lambda: {"engine_id": "e1"}, spans)
    parent.send(root.trace_id)
    parent.recv()
    point.close()


def processes() -> list[LocalProcess]:
    """The processes of this user, of which some may be gone."""
    return [LocalProcess(path) for path in watched_sockets()]


def answers() -> list[tuple[int, str, list[str]]]:
    """The pid, the engine's id and the spans' names of each process that answers."""
    found = []
    for each in processes():
        with contextlib.closing(each), contextlib.suppress(PeerGoneError, TimeoutError):
            (state,) = each.states()
            spans = [f"{span.name} {span.reason}" for span in each.spans_of("cmpl-1")]
            found.append((each.pid, state.engine_id, spans))
    return found


def test_a_process_answers_until_it_is_killed_and_leaves_nothing_behind(tmp_path: Path, folder: Path) -> None:
    with start(watch_point, str(tmp_path)) as peer:
        trace_id = peer.recv()
        assert answers() == [(peer.pid, "e1", ["serve ", "load timeout"])]
        (each,) = processes()
        with contextlib.closing(each):
            assert [span.request_id for span in each.spans_of(trace_id)] == ["", "cmpl-1-0"]
            assert each.spans_of("") != []
        assert folder.stat().st_mode & 0o777 == 0o700
        os.kill(peer.pid, signal.SIGKILL)
        waits.until(lambda: not answers(), what="the end of the peer")
    assert not [*folder.iterdir()]


def test_a_dozen_programs_may_watch_and_clients_choose_long_ids(folder: Path) -> None:
    spans = SpanLog()
    for number in range(600):
        spans.record("load", f"cmpl-{number:03} {'x' * 60_000}", 0.0)
    with contextlib.closing(WatchPoint(dict, spans)):
        (path,) = folder.iterdir()
        with contextlib.ExitStack() as stack:
            for _ in range(12):
                each = stack.enter_context(contextlib.closing(LocalProcess(path)))
                assert each.states() == [SideState()]
            assert len(each.spans_of("cmpl-")) == 500
            assert [span.name for span in each.spans_of("cmpl-007")] == ["load"]


def test_each_line_about_a_request_names_its_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start(watch_point, str(tmp_path)) as peer:
        trace_id = peer.recv()
        assert explain_request(trace_id, as_json=False)
        summary, _, table = capsys.readouterr().out.partition("\n\n")
        assert summary == f"cmpl-1-0 (pid {peer.pid}): load failed: timeout"
        serve = next(line for line in table.splitlines() if line.startswith("serve"))
        assert serve.split()[-2:] == [str(peer.pid), "num_pages=3"]
        peer.send(None)


def test_the_socket_of_a_killed_process_goes_when_the_next_one_starts(tmp_path: Path, folder: Path) -> None:
    with start(watch_point, str(tmp_path)) as peer:
        peer.recv()
        peer.kill()
    assert len([*folder.iterdir()]) == 1
    point = WatchPoint(dict, SpanLog())
    assert [int(path.name.partition("-")[0]) for path in folder.iterdir()] == [os.getpid()]
    point.close()
    point.close()
    assert not [*folder.iterdir()] and not answers()


def test_a_stopped_process_delays_the_others_by_seconds_only(tmp_path: Path) -> None:
    with start(watch_point, str(tmp_path)) as stopped, start(watch_point, str(tmp_path)) as peer:
        stopped.recv()
        peer.recv()
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            assert [pid for pid, *_ in answers()] == [peer.pid]
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        peer.send("end")
        stopped.send("end")


def test_the_state_of_a_busy_engine_is_small() -> None:
    stats = TransferStats()
    for _ in range(2000):
        stats.record("load", 1, 0.1, tokens=3, trace_id="0af7651916cd43dd8448eb211c80319c")
    plain = ProcessState(stats).plain()
    assert plain["stats"]["ops"]["load"]["tokens"] == 6000
    assert len(encode(plain)) < 2000


def listening(stack: contextlib.ExitStack, path: Path) -> socket.socket:
    """A server at ``path`` that accepts no connection."""
    path.parent.mkdir(mode=0o700)
    server = stack.enter_context(socket.socket(socket.AF_UNIX))
    server.bind(str(path))
    server.listen(0)
    return server


def test_the_socket_of_a_process_that_hangs_up_stays(folder: Path) -> None:
    path = folder / f"{os.getpid()}-7"
    with contextlib.ExitStack() as stack:
        server = listening(stack, path)
        watched = waits.Call(lambda: LocalProcess(path).states())
        server.accept()[0].close()
        with pytest.raises(PeerGoneError, match="hung up"):
            watched.result()
        assert path.exists()


def test_a_stopped_process_of_another_container_delays_no_start(folder: Path) -> None:
    path = folder / f"{2**31 - 1}-0"  # no process has this id here
    with contextlib.ExitStack() as stack:
        listening(stack, path)
        with contextlib.suppress(BlockingIOError):  # until its backlog is full
            while True:
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(path))
        waits.Call(lambda: WatchPoint(dict, SpanLog())).result().close()
        assert path.exists()


def test_a_folder_that_others_can_use_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(TransportError, match="only this user"):
        runtime_folder()
    with caplog.at_level("INFO"):
        WatchPoint(dict, SpanLog()).close()  # the engine starts all the same
    assert "will not find this process" in caplog.text
