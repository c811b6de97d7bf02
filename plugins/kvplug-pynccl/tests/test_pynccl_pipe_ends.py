"""The pipe "pynccl" over the fake NCCL: order with the caller's work, blocks, what is refused, rings."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from kvplug import (
    Blocks,
    CapacityError,
    ConfigError,
    Credentials,
    KvplugError,
    PeerGoneError,
    PipeContext,
    StatelessGroup,
    TimeoutError,
    TransportError,
    UnsupportedError,
    WireError,
    dial,
    streams,
)
from kvplug.testing import check_plugin, peers
from kvplug.wire.messages import NONE, tensor_prefix
from kvplug_pynccl import interface, plugin, probe
from kvplug_pynccl.device import CudaDevice, CudaStream
from kvplug_pynccl.nccl.errors import NcclLibraryError
from kvplug_pynccl.nccl.places import places
from kvplug_pynccl.options import PyncclPipeOptions
from kvplug_pynccl.pipe import joining, link
from kvplug_pynccl.pipe.contact import Contact
from kvplug_pynccl.pipe.content import check_out, content_of
from kvplug_pynccl.pipe.endpoint import PyncclEndpoint
from kvplug_pynccl.pipe.frames import WINDOW, Announcement, Frame, Frames, Kind
from kvplug_pynccl.testing.host import HostDevice

ENDS = Path(__file__).with_name("pynccl_ends.py")
ends = SimpleNamespace(**run_path(str(ENDS)))
near_pair = ends.near_pair
in_thread, end_of, until = ends.in_thread, ends.end_of, ends.until
PATIENCE_S = ends.PATIENCE_S


# -- order with the caller's stream ------------------------------------------------------------------


def test_what_the_caller_has_enqueued_is_done_before_it_is_sent(
    near_pair: Any, fake_path: str, controls: Any
) -> None:
    gate, caller = controls.stream(), controls.stream()
    one, other = near_pair(device=HostDevice(fake_path, caller))
    source, wanted = torch.zeros(100_000), torch.rand(100_000)
    caller.wait_for(gate, gate.record() + 1)  # something that is enqueued there later
    caller.copy(source.data_ptr(), wanted.data_ptr(), wanted.nbytes)
    transfer = one.send_tensor(source)
    receiving = in_thread(lambda: other.recv_tensor(timeout=PATIENCE_S))
    receiving[0].join(0.3)
    assert receiving[0].is_alive() and not transfer.done()
    nothing = ctypes.create_string_buffer(1)
    gate.copy(ctypes.addressof(nothing), ctypes.addressof(nothing), 0)
    assert torch.equal(end_of(receiving), wanted)
    transfer.wait(PATIENCE_S)
    for stream in (gate, caller):
        stream.close()


def test_memory_is_received_into_only_when_the_caller_has_done_with_it(
    near_pair: Any, fake_path: str, controls: Any
) -> None:
    gate, caller = controls.stream(), controls.stream()
    one, other = near_pair(device=HostDevice(fake_path, caller))
    message, out, kept = torch.rand(100_000), torch.rand(100_000), torch.zeros(100_000)
    before = out.clone()
    one.send_tensor(message)
    caller.wait_for(gate, gate.record() + 1)
    caller.copy(kept.data_ptr(), out.data_ptr(), out.nbytes)
    receiving = in_thread(lambda: other.recv_tensor(out, timeout=PATIENCE_S))
    receiving[0].join(0.3)
    assert receiving[0].is_alive() and torch.equal(out, before)
    gate.copy(out.data_ptr(), out.data_ptr(), 0)
    assert end_of(receiving) is out
    assert torch.equal(out, message) and torch.equal(kept, before)
    for stream in (gate, caller):
        stream.close()


@pytest.fixture
def gated(fake_path: str, controls: Any) -> Iterator[SimpleNamespace]:
    """A device whose caller's stream does nothing between ``shut`` and ``open``."""
    gate, caller = controls.stream(), controls.stream()
    nothing = ctypes.create_string_buffer(1)
    yield SimpleNamespace(
        device=HostDevice(fake_path, caller),
        shut=lambda: caller.wait_for(gate, gate.record() + 1),
        open=lambda: gate.copy(ctypes.addressof(nothing), ctypes.addressof(nothing), 0),
    )
    for stream in (gate, caller):
        stream.close()


@pytest.mark.parametrize("copied", [False, True])
def test_a_receiver_hears_of_a_message_only_when_the_senders_device_has_made_it(
    near_pair: Any, gated: Any, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    monkeypatch.setattr(link, "_IDLE_LOOK_S", 3600.0)  # what wakes the sender's thread is the message
    one, other = near_pair(device=gated.device, copy_bytes=1000 if copied else 0)
    source, after = torch.arange(250, dtype=torch.float32), torch.arange(5)
    gated.shut()
    transfers = [one.send_tensor(message) for message in (source, after, None)]
    out = torch.zeros_like(source)
    with pytest.raises(TimeoutError, match="no message has arrived"):
        other.recv_tensor(out, timeout=1.2)
    assert not any(transfer.done() for transfer in transfers)
    gated.open()
    if copied:
        for transfer in transfers:
            transfer.wait(PATIENCE_S)
    assert other.recv_tensor(out, timeout=PATIENCE_S) is out
    assert torch.equal(out, source)
    assert torch.equal(other.recv_tensor(timeout=PATIENCE_S), after)
    assert other.recv_tensor(timeout=PATIENCE_S) is None


def test_a_sender_hears_of_memory_only_when_the_receivers_device_has_done_with_it(
    near_pair: Any, gated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = near_pair(device=gated.device, copy_bytes=0)
    source = torch.rand(1000)
    one.send_tensor(source)
    heard: list[Any] = []
    clear = one._link.outbox.clear
    monkeypatch.setattr(one._link.outbox, "clear", lambda frame: (heard.append(frame), clear(frame)))
    gated.shut()
    out = torch.zeros_like(source)
    with pytest.raises(TimeoutError, match="stays"):
        other.recv_tensor(out, timeout=1.2)
    out.fill_(7)
    with pytest.raises(TimeoutError, match="stays"):
        other.recv_tensor(timeout=0.1)
    assert not heard and bool((out == 7).all())
    gated.open()
    assert torch.equal(other.recv_tensor(timeout=PATIENCE_S), source)


@pytest.mark.parametrize("where", ["strided", "blocks"])
def test_a_copy_behind_what_never_ends_keeps_the_deadline_and_the_message(
    near_pair: Any, gated: Any, controls: Any, where: str
) -> None:
    one, other = near_pair(device=gated.device)
    source, memory = torch.rand(2, 3, 5000), torch.zeros(2, 6, 5000)

    def receive(timeout: float) -> None:
        if where == "strided":
            other.recv_tensor(memory[:, 1::2], timeout=timeout)
        else:
            other.recv_blocks(list(memory), [1, 3, 5], timeout=timeout)

    controls.set(hold=1)
    one.send_tensor(source)
    receiving = in_thread(lambda: receive(4.0))
    until(lambda: other._link.inbox._active and other._link.inbox._active.operation)
    gated.shut()
    controls.set(hold=0)
    error = end_of(receiving)
    assert isinstance(error, TimeoutError) and "has not ended" in str(error)
    gated.open()
    receive(PATIENCE_S)
    assert torch.equal(memory[:, 1::2], source)


def test_a_small_tensor_is_the_callers_again_once_it_was_copied(near_pair: Any) -> None:
    one, other = near_pair(copy_bytes=1000)
    small, large = torch.zeros(1000, dtype=torch.uint8), torch.zeros(1001, dtype=torch.uint8)
    done = [one.send_tensor(tensor).done() for tensor in (small, large)]
    assert done == [True, False]
    small.fill_(1)
    for _ in range(2):
        assert int(other.recv_tensor(timeout=PATIENCE_S).sum()) == 0


def test_a_stream_is_lent_to_one_at_a_time_and_again_only_when_it_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda", 0)
    handles = iter(range(1, 100))

    def made(device: torch.device) -> SimpleNamespace:
        busy = SimpleNamespace(device=device, cuda_stream=next(handles), idle=False)
        busy.query = lambda: busy.idle
        return busy

    monkeypatch.setattr(streams, "_idle", defaultdict(list))
    monkeypatch.setattr(streams, "_made", made)
    lent = [CudaStream(gpu) for _ in range(40)]
    assert len({stream.handle for stream in lent}) == 40
    first = lent[0]
    for _ in range(2):
        first.close()
    assert CudaStream(gpu).handle == 41
    first._stream.idle = True
    assert [CudaStream(gpu).handle for _ in range(2)] == [1, 42]
    assert CudaStream(torch.device("cuda", 1)).handle == 43


def test_a_message_that_an_earlier_call_took_memory_for_is_handed_over_to_the_stream_of_this_one(
    near_pair: Any, controls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = near_pair()
    given: list[Any] = []
    monkeypatch.setattr(HostDevice, "hand_over", lambda _, tensor: given.append(tensor))
    controls.set(hold=1)
    one.send_tensor(torch.arange(10))
    with pytest.raises(TimeoutError):
        other.recv_tensor(timeout=0.1)
    assert not given
    controls.set(hold=0)
    received = other.recv_tensor(timeout=PATIENCE_S)
    assert len(given) == 1 and given[0] is received


# -- blocks ----------------------------------------------------------------------------------------------


def test_blocks_that_follow_one_another_are_sent_and_received_in_place_in_one_group(
    near_pair: Any, controls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = near_pair()
    source = [torch.rand(20, 4, 1000) for _ in range(3)]
    target = [torch.zeros(20, 4, 1000) for _ in range(3)]
    before = controls.get("operations")
    monkeypatch.setattr(HostDevice, "empty", lambda *_: pytest.fail("memory was taken"))
    transfer = one.send_blocks(source, [5, 6, 7])
    other.recv_blocks(target, [11, 12, 13])
    transfer.wait(PATIENCE_S)
    for sent, got in zip(source, target, strict=True):
        assert torch.equal(got[11:14], sent[5:8])
        assert not got[:11].any() and not got[14:].any()
    assert controls.get("operations") - before == 6  # a send and a receive for each view


@pytest.mark.parametrize("ids", [[5, 6, 7], [9, 2, 4]])
@pytest.mark.parametrize("into", [[1, 2, 3], [8, 0, 5]])
def test_blocks_come_as_they_were_however_they_lie_at_either_end(
    near_pair: Any, ids: list[int], into: list[int]
) -> None:
    one, other = near_pair()
    source, target = [torch.rand(10, 9000) for _ in range(2)], [torch.zeros(10, 9000) for _ in range(2)]
    one.send_blocks(source, ids)
    other.recv_blocks(target, into)
    one.send_blocks(source, ids)
    for sent, got in zip(source, target, strict=True):
        assert torch.equal(got[into], sent[ids])
    assert torch.equal(other.recv_tensor(), torch.stack([each[ids] for each in source]))


# -- what the ends say ----------------------------------------------------------------------------------

PREFIX = tensor_prefix(torch.float32, torch.Size((10,)), 40)
HUGE = tensor_prefix(torch.uint8, torch.Size((2**55,)), 2**55)
LIES = {
    "no frame": b"x" * 16,
    "a kind that there is not": Frame(Kind.BEAT).pack().replace(b"\x04", b"\x09", 1),
    "a message out of order": Announcement(1, PREFIX, None).pack(),
    "an announcement that is cut short": Frame(Kind.ANNOUNCE, 0, b"\x01").pack(),
    "an announcement without a prefix": Frame(Kind.ANNOUNCE, 0, b"\x01\x00").pack(),
    "a prefix that contradicts itself": Announcement(0, PREFIX + b"x", None).pack(),
    "no pieces": Announcement(0, PREFIX, None, 0).pack(),
    "pieces that it does not have": Announcement(0, PREFIX, None, 3).pack(),
    "None in pieces": Announcement(0, NONE, None, 2).pack(),
    "clear for what was not announced": Frame(Kind.CLEAR, 0).pack(),
    "taken what was not announced": Frame(Kind.TAKEN, 0).pack(),
    "more than the window": b"".join(Announcement(n, NONE, None).pack() for n in range(WINDOW + 1)),
}


@pytest.mark.parametrize("what", list(LIES))
def test_a_peer_that_says_what_cannot_be_ends_the_pipe_and_nothing_else(near_pair: Any, what: str) -> None:
    one, other = near_pair()
    receiving = in_thread(lambda: other.recv_tensor(timeout=None))
    one._link.control.say(LIES[what])
    assert isinstance(end_of(receiving), TransportError | None)  # a None may have come first
    until(lambda: other._link.fate.sealed)
    with pytest.raises(TransportError, match="cannot be"):
        other.send_tensor(None)
    with pytest.raises(PeerGoneError):
        one.recv_tensor(timeout=PATIENCE_S)
    a, b = near_pair()
    a.send_tensor(torch.arange(3))
    assert b.recv_tensor(timeout=PATIENCE_S).tolist() == [0, 1, 2]


@pytest.mark.parametrize("frame", [Kind.CLEAR, Kind.TAKEN])
def test_a_peer_that_has_what_was_only_announced_ends_the_pipe(near_pair: Any, frame: Kind) -> None:
    one, other = near_pair()
    transfer = one.send_tensor(torch.zeros(100_000))
    other._link.control.say(Frame(frame, 0 if frame is Kind.TAKEN else 1).pack())
    with pytest.raises(TransportError, match="cannot be"):
        transfer.wait(PATIENCE_S)


def test_a_peer_that_clears_what_it_was_not_told_of_ends_the_pipe(near_pair: Any, gated: Any) -> None:
    one, other = near_pair(device=gated.device)
    gated.shut()
    transfer = one.send_tensor(torch.zeros(100_000))
    other._link.control.say(Frame(Kind.CLEAR, 0).pack())
    with pytest.raises(TransportError, match="cannot be"):
        transfer.wait(PATIENCE_S)
    gated.open()


def test_memory_is_taken_for_a_message_only_when_somebody_receives_it(near_pair: Any) -> None:
    one, other = near_pair()
    one._link.control.say(Announcement(0, HUGE, None).pack())
    with pytest.raises(KvplugError, match="no memory"):
        other.recv_tensor(timeout=PATIENCE_S)
    assert not other._link.fate.sealed


@given(st.lists(st.binary(max_size=200)))
def test_whatever_comes_is_frames_or_a_wire_error(chunks: list[bytes]) -> None:
    frames = Frames()
    try:
        for chunk in chunks:
            frames.feed(chunk)
    except WireError:
        pass
    assert len(frames._held) < 2000


def test_ends_that_disagree_on_what_comes_next_are_told_what_each_is_about_to_do(near_pair: Any) -> None:
    one, other = near_pair()
    transfer = one.send_tensor(torch.zeros(100_000))
    other._link.control.say(Frame(Kind.CLEAR, 0, PREFIX).pack())
    with pytest.raises(TransportError, match=r"disagree.*100000.*10.*check_order"):
        transfer.wait(PATIENCE_S)


def test_with_check_order_the_receiver_repeats_what_was_announced(
    near_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = near_pair(check_order=True)
    heard = []
    clear = one._link.outbox.clear
    monkeypatch.setattr(one._link.outbox, "clear", lambda frame: (heard.append(frame.payload), clear(frame)))
    one.send_tensor(torch.zeros(10))
    assert other.recv_tensor(timeout=PATIENCE_S).shape == (10,)
    assert heard == [PREFIX]


def test_a_stranger_that_is_let_in_and_joins_as_no_end_does_stops_nobody(
    fake_path: str, near_pair: Any, controls: Any
) -> None:
    end = ends.endpoint(fake_path)
    with end.listen() as listener, ExitStack() as stack:
        where = Contact.parse(listener.contact).reachable()
        for data in (b"", b"x" * 1000, joining.Join(step=2).pack(), joining.Join(step=0, version=7).pack()):
            connection = stack.enter_context(dial(where, Credentials(), joining.PURPOSE))
            connection.sock.sendall(data)
        connecting = in_thread(lambda: end.connect(listener.contact))
        with listener.accept() as one, end_of(connecting) as other:
            one.send_tensor(torch.arange(2))
            assert other.recv_tensor().tolist() == [0, 1]


# -- what is refused -----------------------------------------------------------------------------------


def _context(device: str = "cuda", host: str = "127.0.0.1", **options: Any) -> PipeContext:
    return PipeContext(
        options=PyncclPipeOptions(**options), credentials=Credentials(), device=device, host=host
    )


def test_a_device_that_is_no_gpu_is_refused() -> None:
    for device, said in (("cpu", "moves CUDA tensors"), ("nowhere", "none of torch's")):
        with pytest.raises(ConfigError, match=said):
            PyncclEndpoint(_context(device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_where_there_is_no_gpu_the_endpoint_says_so() -> None:
    with pytest.raises(ConfigError, match="needs a GPU"):
        PyncclEndpoint(_context())


def test_gpus_are_counted_and_the_current_one_is_meant_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"is_available": True, "current_device": 1, "device_count": 2}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert CudaDevice("cuda").name == "cuda:1"
    assert CudaDevice("cuda:0").name == "cuda:0"
    with pytest.raises(ConfigError, match="there are 2 GPUs"):
        CudaDevice("cuda:2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_nccl_itself_without_a_gpu_is_an_error_of_its_own_and_the_process_goes_on(
    fake_path: str, near_pair: Any
) -> None:
    place = next(places())
    if place.missing:
        pytest.skip(f"{place.what}: {place.missing}")
    end = ends.endpoint(place.path, device=HostDevice(fake_path))
    with end.listen() as listener:
        for _ in range(2):
            with pytest.raises(TransportError, match="there is no GPU"):
                end.connect(listener.contact)
    one, other = near_pair()
    one.send_tensor(None)
    assert other.recv_tensor() is None


def test_a_library_that_is_not_there_is_named(fake_path: str) -> None:
    with pytest.raises(NcclLibraryError, match="/nowhere/libnccl"):
        PyncclEndpoint(_context("cpu", library="/nowhere/libnccl.so.2"), HostDevice(fake_path))


def test_a_tensor_of_another_device_is_refused_by_name_and_nothing_is_queued(near_pair: Any) -> None:
    one, other = near_pair()
    with pytest.raises(UnsupportedError, match="meta"):
        one.send_tensor(torch.empty(3, device="meta"))
    one.send_tensor(torch.arange(3))
    with pytest.raises(UnsupportedError, match="meta"):
        other.recv_tensor(torch.empty(3, dtype=torch.int64, device="meta"))
    assert other.recv_tensor().tolist() == [0, 1, 2]


def test_where_there_is_no_memory_for_a_copy_nothing_is_queued(
    near_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = near_pair()

    def full(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", full)
        with pytest.raises(CapacityError, match=r"400 bytes.*nothing was queued.*out of memory"):
            one.send_tensor(torch.zeros(100))
        patch.setattr(Blocks, "gathered", full)
        with pytest.raises(CapacityError, match="80 bytes"):
            one.send_blocks([torch.zeros(5, 10)], [1, 3])
    one.send_tensor(torch.arange(3))
    assert other.recv_tensor(timeout=PATIENCE_S).tolist() == [0, 1, 2]


def test_a_cpu_tensor_on_a_pipe_of_gpus_is_refused_by_name_or_staged() -> None:
    class Gpu(HostDevice):
        def owns(self, tensor: Any) -> bool:
            return getattr(tensor, "on_gpu", False)

    gpu = Gpu.__new__(Gpu)
    gpu.name, gpu._caller = "cuda:0", None
    tensor = torch.rand(50)
    with pytest.raises(UnsupportedError, match="stage_cpu_tensors"):
        content_of(tensor, gpu, stage=False, copy_bytes=0)
    content = content_of(tensor, gpu, stage=True, copy_bytes=0)
    assert content.owned and content.memory is not None and content.memory.piece_bytes == 200
    meta = Announcement.read(Frame(Kind.ANNOUNCE, 0, b"\x01\x00" + content.prefix)).meta
    with pytest.raises(UnsupportedError, match="stage_cpu_tensors"):
        check_out(tensor, meta, gpu, stage=False)
    check_out(tensor, meta, gpu, stage=True)


# -- rest ------------------------------------------------------------------------------------------------


def test_a_pipe_that_has_nothing_to_do_costs_next_to_nothing(near_pair: Any) -> None:
    one, other = near_pair()
    one.send_tensor(torch.arange(100_000))
    other.recv_tensor()
    before = sum(os.times()[:2])
    time.sleep(3.0)
    assert sum(os.times()[:2]) - before < 0.3


# -- ranks ------------------------------------------------------------------------------------------------


def test_three_ranks_are_joined_in_a_ring(fake_path: str) -> None:
    with StatelessGroup.listen("unix:") as listener:
        address = listener.address
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                peers.start(f"{ENDS}:in_ring", *(fake_path, address, rank, 3), timeout_s=3 * PATIENCE_S)
            )
            for rank in range(3)
        ]
        seen = [rank.result(2 * PATIENCE_S) for rank in ranks]
    assert seen == [[2, 1, 0], [0, 2, 1], [1, 0, 2]]


# -- where NCCL listens ---------------------------------------------------------------------------------


def test_nccl_is_bound_to_the_interface_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface.interface_of("127.0.0.1") == interface.interface_of("unix:") == "lo"
    monkeypatch.delenv(interface.VARIABLE, raising=False)
    monkeypatch.setattr(interface, "_bound", "")
    interface.bind_to("127.0.0.1")
    assert os.environ[interface.VARIABLE] == "=lo"
    monkeypatch.setenv(interface.VARIABLE, "eth7")
    interface.bind_to("127.0.0.1")
    assert os.environ[interface.VARIABLE] == "eth7"


def test_an_address_that_no_interface_has_is_refused() -> None:
    for host in ("203.0.113.77", "no.such.host.invalid"):
        with pytest.raises(ConfigError, match="host"):
            interface.interface_of(host)


# -- the plugin ----------------------------------------------------------------------------------------


def test_the_plugin_offers_the_pipe_by_strings_alone() -> None:
    (spec,) = [each for each in plugin.kvplug_transports() if each.kind == "pipe"]
    assert spec.name == "pynccl"
    assert spec.capabilities.devices == {"cuda"}
    assert not spec.capabilities.authenticated
    assert spec.load_options() is PyncclPipeOptions
    assert spec.load_factory() is PyncclEndpoint


def test_describing_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvplug_pynccl import plugin; specs = plugin.kvplug_transports();"
        "[(spec.run_probe(), spec.load_options()) for spec in specs];"
        "print([n for n in ('torch', 'numpy', 'kvplug_pynccl.pipe.endpoint') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_probe_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_path: str
) -> None:
    monkeypatch.setattr(probe, "_DEV", tmp_path)
    assert "no GPU" in probe.describe().reason
    (tmp_path / "nvidia0").touch()
    monkeypatch.setenv("KVPLUG_NCCL_LIBRARY", str(tmp_path / "libnccl.so.2"))
    assert "KVPLUG_NCCL_LIBRARY" in probe.describe().reason
    monkeypatch.setenv("KVPLUG_NCCL_LIBRARY", fake_path)
    assert probe.describe().viable


def test_it_keeps_the_laws_of_plugins() -> None:
    from importlib.metadata import entry_points

    if not entry_points(group="kvplug", name="pynccl"):
        pytest.skip("kvplug-pynccl is not installed here")
    assert check_plugin("pynccl") == ()
