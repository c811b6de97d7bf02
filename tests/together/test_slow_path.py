"""The alarm about slow paths, with real pipes: throttled, stopped for a moment, refused, switched off."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from kvplug import Config, PeerGoneError, connect_pipe, listen_pipe
from kvplug.assembly import slow_path
from kvplug.errors import SlowPathError
from kvplug.metrics import rate as rates
from kvplug.metrics.stats import TransferStats
from kvplug.negotiation.agreement import agree
from kvplug.negotiation.hello import Hello
from kvplug.negotiation.select import Offer
from kvplug.net.trust.identity import PeerIdentity
from kvplug.transport import Capabilities, Pipe
from kvplug_lab.faults import FaultyPipe, Rule
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.waits import Call

pytestmark = [pytest.mark.timeout(100), pytest.mark.xdist_group("timing")]

MIB = 1 << 20
MESSAGE = torch.zeros(2 * MIB, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An alarm after three slow batches, and on an idle host, whatever else this one does."""
    monkeypatch.setattr(rates, "_SLOW_BATCHES", 3)
    monkeypatch.setattr(rates, "_SLOW_S", 0.5)
    monkeypatch.setattr(rates, "_HISTORY", 4)
    monkeypatch.setattr(rates, "host_load", lambda: 1.0)
    monkeypatch.setattr(rates, "_sending", rates.SharedTime())


def config(transport: str = "cpu", **more: Any) -> Config:
    return Config.from_dict({"transport": transport, "timeout_s": 20, "connect_timeout_s": 20, **more})


def slow(pipe: Pipe) -> Pipe:
    """A pipe that sends slowly."""
    return FaultyPipe(pipe, [Rule.parsed(f"slow bytes_per_s={20 * MIB}")])


def pair(ours: Config, theirs: Config | None = None, **more: Any) -> tuple[Any, Pipe]:
    with listen_pipe(theirs or config(), "unix:") as server:
        joining = Call(lambda: connect_pipe(ours, server.contact, **more))
        return joining.result(20), server.accept()


def take(pipe: Pipe) -> None:
    """Take everything that comes out of the pipe, until its peer is gone."""
    out = torch.empty_like(MESSAGE)
    with suppress(PeerGoneError):
        while True:
            pipe.recv_tensor(out, timeout=20)
    pipe.close()


@contextmanager
def taken(ours: Config, theirs: Config | None = None) -> Iterator[Any]:
    """A slow pipe whose other end takes everything."""
    pipe, other = pair(ours, theirs, wrap_pipe=slow)
    taking = Call(lambda: take(other))
    yield pipe
    pipe.close()
    taking.result(20)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [r.getMessage() for r in caplog.records if r.name == slow_path.__name__]


def send(pipe: Pipe, count: int) -> None:
    for _ in range(count):
        pipe.send_tensor(MESSAGE).wait(20)


def test_a_throttled_pipe_is_logged_and_counted_once_for_each_peer(
    warned: Any, caplog: pytest.LogCaptureFixture
) -> None:
    peer = config()
    with taken(config(), peer) as pipe:
        send(pipe, 40)
        snapshot = pipe.recorder.stats.snapshot()
    (text,) = warned()
    for part in (
        r"the pipe 'cpu' to .*pid \d+.* carries 0\.0\d+ GB/s \(\d+ MiB in .* s\)",
        "less than a tenth of the 6 GB/s that its transport claims",
        "one host, and 'shm', which claims 15 GB/s, was passed over: could be used, but cpu is named",
        'slow_path = "off"',
        "this is logged once",
    ):
        assert re.search(part, text), text
    (record,) = (each for each in caplog.records if getattr(each, "event", "") == "slow_pipe")
    assert (record.transport, record.expected_gb_per_s) == ("cpu", 6) and record.gb_per_s < 0.1
    assert (snapshot["slow"], snapshot["failures"]) == ({"send": {"cpu": 1}}, {})
    del pipe
    gc.collect()
    with taken(config(), peer) as pipe:
        send(pipe, 16)
    assert len(warned()) == 1, "the same peer, by another pipe"
    with taken(config(slow_path="off")) as pipe:
        send(pipe, 25)
    assert len(warned()) == 1, "switched off, nothing is logged"


def test_refusing_ends_the_pipe_with_what_was_measured(warned: Any) -> None:
    with taken(config(slow_path="refuse")) as pipe:
        message = r"carries 0\.0\d+ GB/s .*claims\. Likely: .*'shm'.*slow_path = \"off\""
        with pytest.raises(SlowPathError, match=message):
            send(pipe, 40)
        with pytest.raises(SlowPathError):
            pipe.recv_tensor(timeout=0)
        assert pipe.closed and not warned()
        snapshot = pipe.recorder.stats.snapshot()
        assert (snapshot["slow"], snapshot["failures"]) == ({"send": {"cpu": 1}}, {"send": {"slow": 1}})


def take_all(parent: peers.Parent, contact: str, transport: str) -> None:
    take(connect_pipe(config(transport), contact))


@pytest.mark.timing
@pytest.mark.parametrize("transport", ["cpu", "shm"])
def test_a_good_pipe_whose_peer_is_stopped_for_a_while_is_not_logged(
    transport: str, fork_server: ForkServer, warned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # with the limits that users get
    with (
        listen_pipe(config(transport), "unix:") as server,
        fork_server.start(f"{__file__}:take_all", server.contact, transport) as child,
    ):
        pipe = server.accept()
        for _ in range(2):
            send(pipe, 40)
            child.stop()
            sent = [pipe.send_tensor(MESSAGE) for _ in range(20)]
            time.sleep(0.7)
            child.cont()
            for transfer in sent:
                transfer.wait(20)
        pipe.close()
        child.result()
    assert not warned()


# -- causes ----------------------------------------------------------------------------------------------


def test_the_cause_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offer = Offer(name="cpu", capabilities=Capabilities(cost=Capabilities.Cost(latency_us=50, gb_per_s=6)))
    ours, theirs = (Hello(transports=(offer,), identity=PeerIdentity(boot_id="b", pid=pid)) for pid in (1, 2))
    alarm = slow_path.SlowPathAlarm(
        config=Config(slow_path="refuse", host="127.0.0.1"),
        stats=TransferStats(),
        abilities=lambda: {"cpu": offer.capabilities},
        agreement=agree(ours, theirs),
        transport="cpu",
        device="cpu",
    )
    slow: Any = SimpleNamespace(peer="pid 2", path_report=lambda: Pipe.PathReport(measured_gb_per_s=0.1))

    def causes(**changes: Any) -> str:
        with pytest.raises(SlowPathError, match="less than a tenth of the 6 GB/s") as refused:
            attrs.evolve(alarm, **changes).watch(slow)
        return str(refused.value)

    monkeypatch.setattr(slow_path, "_SMALL_SHM", 1 << 62)
    assert "/dev/shm has only" in causes()
    (tmp_path / "lo").mkdir()
    (tmp_path / "lo" / "speed").write_text("1000\n")
    monkeypatch.setattr(slow_path, "_NET", tmp_path)
    apart = attrs.evolve(alarm.agreement, cross_host=True)
    text = causes(agreement=apart)
    assert "the interface lo runs at 0.125 GB/s" in text and "/dev/shm" not in text
    (tmp_path / "lo" / "speed").write_text("-1\n")
    assert "measure it with iperf3" in causes(agreement=apart)
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(slow_path, "_CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr(slow_path, "host_load", lambda: 9.0)
    secured = attrs.evolve(alarm.config, thread_cpus="0", tls_cert="a", tls_key="b", tls_ca="c")
    text = causes(config=secured)
    for part in ("0.5 processors", "share processor 0", "9 runnable threads", "encrypted (tls_cert)"):
        assert part in text
    monkeypatch.setattr(slow_path.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(slow_path.os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert "this process may use only one processor" in causes()
