"""When a device is waited for while it is measured: its calls only enqueue."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.cuda import _sleep as spin_on_gpu

from kvplug_bench import pipes, worker
from kvplug_bench.device import CpuDevice, open_device
from kvplug_bench.links import Link, UnavailableError
from kvplug_bench.stopwatch import BURSTS, Stopwatch

pytestmark = pytest.mark.timeout(60)

KIB = 1 << 10
TASK = {"bulk": [("into", 4 * KIB), ("owned", 4 * KIB)], "burst_bytes": 8 * KIB, "latency_bytes": KIB}


class Noted(CpuDevice):
    """The CPU, as a device that would have to be waited for."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def synchronize(self) -> None:
        self._events.append("synchronize")


class End(Link):
    """One of two in this process."""

    def __init__(self, ours: Any, theirs: Any, events: list[str]) -> None:
        self._ours, self._theirs, self._events = ours, theirs, events

    def send(self, tensor: torch.Tensor) -> None:
        self._events.append(f"send {tensor.nbytes}")
        self._theirs.put(tensor.clone())

    def receive(self, out: torch.Tensor) -> None:
        out.copy_(self.receive_new(out))

    def receive_new(self, like: torch.Tensor) -> torch.Tensor:
        got: torch.Tensor = self._ours.get(timeout=30)
        assert got.nbytes == like.nbytes
        self._events.append(f"received {got.nbytes}")
        return got

    def close(self) -> None: ...


def test_a_copy_is_timed_until_the_device_has_made_it(monkeypatch):
    events: list[Any] = []

    class Watch(Stopwatch):
        def start(self) -> None:
            events.append("start")
            super().start()

        def stop(self) -> None:
            super().stop()
            events.append("stop")

    monkeypatch.setattr(worker, "Stopwatch", Watch)
    monkeypatch.setattr(worker, "open_device", lambda name: Noted(events))
    task = {**TASK, "kind": "copy", "device": "cpu", "bulk": [("into", 4 * KIB)]}
    worker.take_part(SimpleNamespace(send=events.append), task)
    kind, figures = events.pop()
    assert events == ["synchronize", "start", "synchronize", "stop"] * BURSTS
    assert (kind, list(figures)) == (worker.FIGURES, ["into 4096"])


def measured(**task: Any) -> tuple[dict[str, Any], list[str], list[str]]:
    """What the sender of a pipe has measured, and the events of both ends."""
    sender, receiver = list[str](), list[str]()
    one, other = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
    theirs = End(other, one, receiver), TASK | task, Noted(receiver)
    far = threading.Thread(target=pipes.run_receiver, args=theirs, daemon=True)
    far.start()
    figures = pipes.run_sender(End(one, other, sender), TASK | task, Noted(sender))
    far.join(30)
    assert not far.is_alive()
    return figures, sender, receiver


def test_a_receiver_answers_when_its_device_has_the_messages():
    _, sender, receiver = measured(small=[])
    burst = ["received 4096"] * 2
    assert receiver == ["synchronize", "send 64", *burst, "synchronize", "send 64"] * (2 * BURSTS)
    assert sender == ["synchronize", "received 64", "send 4096", "send 4096", "received 64"] * (2 * BURSTS)


def test_a_device_that_cannot_be_measured_says_why():
    assert open_device("cpu").name == "cpu"
    with pytest.raises(UnavailableError, match="device 'cuda:99' cannot be used on this machine"):
        open_device("cuda:99")
    with pytest.raises(UnavailableError, match="devices of the kind 'npu' cannot be timed"):
        open_device("npu:1")


@pytest.mark.gpu
def test_on_a_gpu_the_clock_stops_when_the_kernels_have_ended():
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    where = open_device("cuda")
    assert where.name == "cuda:0"
    spin_on_gpu(200_000_000)
    ended = torch.cuda.Event()
    ended.record()
    where.synchronize()
    assert ended.query()
