"""What the pipe "nixl" adds: fences, lanes that are named, memory that is registered and forgotten."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("nixl_cu12", reason="the wheel nixl-cu12 is not installed")

import kvplug
import nixl_ends
from kvplug import ClosedError, PeerGoneError, TimeoutError, TransportError
from kvplug_nixl import agent as agents
from kvplug_nixl.agent import Agent, Exported, NixlError
from kvplug_nixl.pipe import pipe as pipes
from kvplug_nixl.pipe.fence import PeerFence
from kvplug_nixl.pipe.pipe import NixlPipe
from kvplug_testing import peers
from kvplug_testing.pairs import PipePairs
from kvplug_testing.waits import Call, until
from nixl_ends import MIB, PATIENCE_S, endpoint, pattern

pytestmark = pytest.mark.timeout(120)
TCP = {"tls": "tcp,self"}


@pytest.fixture
def pairs() -> Iterator[PipePairs]:
    with PipePairs() as made:
        yield made


def test_a_message_that_is_registered_while_the_pipe_ends_is_refused_as_closed(
    pairs: PipePairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pairs.local(endpoint())
    export = Agent.export

    def export_late(agent: Agent, tensors: Sequence[torch.Tensor]) -> Exported:
        one.abort()
        until(lambda: not agent.is_open)
        return export(agent, tensors)

    monkeypatch.setattr(Agent, "export", export_late)
    with pytest.raises(ClosedError):
        one.send_tensor(pattern(MIB))


# -- memory that is taken back -------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, TCP], ids=["shared memory", "tcp"])
def test_a_message_whose_owner_takes_it_back_while_it_is_read_is_no_message(
    pairs: PipePairs, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    one, other = pairs.local(endpoint(**options))
    check = PeerFence.check

    def late(fence: PeerFence, wait: Any) -> bool:
        one._fence.take_back()  # as abort() does first: the other end may hear of the rest much later
        return check(fence, wait)

    monkeypatch.setattr(PeerFence, "check", late)
    one.send_tensor(pattern(MIB))
    with pytest.raises(PeerGoneError, match="taken back"):
        other.recv_tensor()


# -- peers that stop, die and start together -----------------------------------------------------------


def test_a_process_that_was_forked_from_one_with_ucx_is_told_what_to_do() -> None:
    with peers.start(nixl_ends.connect_in_a_fork, timeout_s=100) as child:
        assert "forked" in child.recv()
        child.result()


@pytest.mark.full
def test_forks_while_threads_register_memory_do_not_crash_the_process() -> None:
    with peers.start(nixl_ends.fork_while_registering, 8.0, timeout_s=100) as child:
        child.result(100)


# -- lanes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["warn", "refuse"])
def test_lanes_that_are_ten_times_slower_than_expected_are_told_with_the_reason(
    slow: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = kvplug.Config(
        transport="nixl", slow_path=slow, options={"nixl": {**TCP, "expected_gb_per_s": 1e6}}
    )
    said = r"less than a tenth of the 1e\+06 GB/s .*UCX reads through .*tcp/lo.*UCX_TLS"
    with kvplug.listen_pipe(config, "unix:") as server:
        connecting = Call(lambda: kvplug.connect_pipe(config, server.contact))
        if slow == "refuse":
            with pytest.raises(TransportError, match=said):
                connecting.result()
            until(lambda: "cannot join the pipe" in caplog.text, what="the reason at the other end")
            return
        for pipe in (server.accept(PATIENCE_S), connecting.result()):
            pipe.abort()
    assert re.search(said, caplog.text)


# -- registered memory ---------------------------------------------------------------------------------


def test_memory_is_unregistered_when_its_storage_is_gone(pairs: PipePairs) -> None:
    one, other = pairs.local(endpoint())
    for seed in range(60):
        one.send_tensor(pattern(MIB, seed))
        assert torch.equal(other.recv_tensor(), pattern(MIB, seed))
    assert len(one._agent._regions) < 25
    assert len(other._agent._regions) < 25


def test_a_peer_forgets_old_regions_now_and_then(pairs: PipePairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_MAX_EXPORTED", 4)
    one, other = pairs.local(endpoint())
    kept = [pattern(MIB, seed) for seed in range(12)]
    for message in (*kept, *kept):
        one.send_tensor(message)
        assert torch.equal(other.recv_tensor(), message)


def test_memory_that_was_another_regions_is_told_from_it(pairs: PipePairs) -> None:
    one, other = pairs.local(endpoint())
    for number in range(200):  # the allocator gives the same addresses for other lengths
        message = pattern((1 + number * 7 % 13) * 40_000, number)
        one.send_tensor(message)
        assert torch.equal(other.recv_tensor(), message)


def test_a_message_of_many_pieces_is_read_in_pieces_between_which_the_deadline_counts(
    pairs: PipePairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pairs.local(endpoint())
    message, out = pattern(40 * MIB), torch.zeros(40 * MIB, dtype=torch.uint8)
    begin = NixlPipe._begin

    def slow(receiver: NixlPipe, *given: Any) -> Any:
        time.sleep(0.05)
        return begin(receiver, *given)

    monkeypatch.setattr(pipes, "_PIECE_BYTES", 8 * MIB)
    monkeypatch.setattr(NixlPipe, "_begin", slow)
    one.send_tensor(message)
    with pytest.raises(TimeoutError, match="the next call resumes it"):
        other.recv_tensor(out, timeout=0.07)
    out.zero_()
    assert other.recv_tensor(out) is out
    assert torch.equal(out, message)


def test_metadata_of_another_agent_is_refused() -> None:
    one, other = (Agent(error_handling="none", only_loopback=True) for _ in range(2))
    with pytest.raises(NixlError, match="not of"):
        other.connect(one.metadata(), "kvplug-0000000000000000")
    one.close()
    other.close()
