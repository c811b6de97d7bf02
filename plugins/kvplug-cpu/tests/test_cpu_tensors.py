"""Messages over several connections at once: any number, any split, into memory old and new."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cpu_ends import streams_of
from kvplug import TimeoutError
from kvplug_testing.comparison import assert_filled, assert_same
from kvplug_testing.resources import Resources
from kvplug_testing.waits import Call


@pytest.mark.parametrize("connections", [1, 3])
def test_any_number_of_connections_carries_the_same_bytes(local_pair: Any, connections: int) -> None:
    one, other = local_pair(connections=connections, split_bytes=1)
    for size in (1, 4095, 4096, 4097, 8192, 100_001, 3_000_000):
        sent = torch.randint(0, 255, (size,), dtype=torch.uint8)
        one.send_tensor(sent)
        assert_same(sent, other.recv_tensor())


def test_the_smaller_number_of_connections_counts(socket_kind: str, endpoint: Any) -> None:
    def num_sockets() -> int:
        return sum("socket:" in each for each in Resources.of().descriptors)

    held = []
    for here, there in ((2, 2), (2, 4), (4, 2), (4, 4)):
        with endpoint(socket_kind, connections=there).listen() as listener:
            before = num_sockets()
            one, other = endpoint(socket_kind, connections=here).connect(listener.contact), listener.accept()
            with one, other:
                held.append(num_sockets() - before)
                sent = torch.arange(1_000_000)
                one.send_tensor(sent)
                assert_same(sent, other.recv_tensor())
    assert held[0] == held[1] == held[2] == held[3] - 2 * 2


# -- out= ---------------------------------------------------------------------------------------


def test_only_the_view_that_was_given_as_out_is_written(local_pair: Any) -> None:
    one, other = local_pair(split_bytes=4096)
    memory = torch.zeros(50_000)
    one.send_tensor(torch.ones(20_000))
    other.recv_tensor(memory[10_000:30_000])
    assert memory[:10_000].sum() == 0
    assert memory[10_000:30_000].sum() == 20_000
    assert memory[30_000:].sum() == 0


# -- deadlines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("first_out", [False, True])
@pytest.mark.parametrize("second_out", [False, True])
def test_a_receive_that_times_out_in_the_middle_goes_on_in_the_next_call(
    by_hand: Any, first_out: bool, second_out: bool
) -> None:
    peer, other = by_hand(split_bytes=100_000)
    sent = torch.randint(0, 255, (2_000_000,), dtype=torch.uint8)
    first, second = streams_of(sent, 100_000)
    peer.data[0].sendall(first[:50_000])
    peer.data[1].sendall(second[:20_000])
    out = torch.zeros_like(sent)
    with pytest.raises(TimeoutError, match="of 2000000 bytes"):
        other.recv_tensor(out if first_out else None, timeout=0.2)
    out.fill_(99)  # the caller's own again
    rest = [
        Call(lambda: peer.data[0].sendall(first[50_000:])),
        Call(lambda: peer.data[1].sendall(second[20_000:])),
    ]
    if second_out:
        fresh = torch.empty_like(sent)
        assert other.recv_tensor(fresh) is fresh
        assert_same(sent, fresh)
    else:
        assert_same(sent, other.recv_tensor())
    for each in rest:
        each.result()
    assert_filled(99, out, "memory was written to after its call had ended")
