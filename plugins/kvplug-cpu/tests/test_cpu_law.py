"""The law of the pipe: deadlines, room, turns, ends, forks, and nothing left behind."""

from __future__ import annotations

import gc
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvplug import BusyError, ClosedError, PeerGoneError, TimeoutError
from kvplug.testing import peers

MIB = 1024 * 1024


class Running:
    """A call in another thread, and how it ended."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,))
        self.began = time.monotonic()
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as e:
            self.error = e
        self.took = time.monotonic() - self.began

    def end(self, within: float = 10.0) -> BaseException | None:
        self._thread.join(within)
        assert not self._thread.is_alive(), f"still blocked after {within} s:\n{peers.stacks()}"
        return self.error


def until(condition: Callable[[], bool], within: float = 10.0) -> None:
    limit = time.monotonic() + within
    while not condition():
        assert time.monotonic() < limit, peers.stacks()
        time.sleep(0.002)


def fill(pipe: Any, nbytes: int = MIB, timeout: float = 0.2) -> list[Any]:
    """Send until there is no room; what was accepted."""
    transfers = []
    with pytest.raises(TimeoutError, match="nothing was queued"):
        while True:
            transfers.append(pipe.send_tensor(torch.zeros(nbytes, dtype=torch.uint8), timeout=timeout))
    return transfers


# -- room ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1000, 100_000, MIB, 3 * MIB])
def test_with_the_receiver_stopped_what_is_held_is_bounded(near_pair: Any, nbytes: int) -> None:
    limit = 2 * MIB
    one, other = near_pair(max_in_flight_bytes=limit)
    transfers = fill(one, nbytes)
    held = [t for t in transfers if not t.done()]
    assert sum(t.nbytes for t in held) <= limit + nbytes
    assert sum(t.nbytes for t in transfers) <= limit + nbytes + 4 * MIB, "the kernel's share"
    for transfer in transfers:
        assert other.recv_tensor().numel() == nbytes
        transfer.wait(5)


def test_empty_messages_do_not_pile_up_without_bound(near_pair: Any) -> None:
    one, _ = near_pair(max_in_flight_bytes=MIB)
    with pytest.raises(TimeoutError):
        for _ in range(1_000_000):
            one.send_tensor(None, timeout=0.2)


def test_a_message_larger_than_the_limit_passes_alone(near_pair: Any) -> None:
    one, other = near_pair(max_in_flight_bytes=1000)
    transfer = one.send_tensor(torch.zeros(8 * MIB, dtype=torch.uint8))
    with pytest.raises(TimeoutError, match="max_in_flight_bytes"):
        one.send_tensor(torch.zeros(10), timeout=0.1)
    assert other.recv_tensor().numel() == 8 * MIB
    transfer.wait(5)
    one.send_tensor(torch.zeros(10), timeout=5).wait(5)


def test_a_blocked_sender_goes_on_as_soon_as_there_is_room(near_pair: Any) -> None:
    one, other = near_pair(max_in_flight_bytes=MIB)
    count = len(fill(one))
    blocked = Running(lambda: one.send_tensor(torch.zeros(MIB, dtype=torch.uint8), timeout=10))
    time.sleep(0.05)
    began = time.monotonic()
    for _ in range(count):
        other.recv_tensor()
    assert blocked.end() is None
    assert time.monotonic() - began < 2


# -- turns and deadlines --------------------------------------------------------------------------


def test_a_second_receiver_and_a_second_sender_are_refused(near_pair: Any) -> None:
    one, _ = near_pair(max_in_flight_bytes=1000)
    receiving = Running(lambda: one.recv_tensor(timeout=3))
    until(lambda: raises(BusyError, lambda: one.recv_tensor(timeout=0)))
    fill(one)
    sending = Running(lambda: one.send_tensor(torch.zeros(MIB), timeout=3))
    until(lambda: raises(BusyError, lambda: one.send_tensor(None, timeout=0)))
    one.abort()
    assert isinstance(receiving.end(), ClosedError)
    assert isinstance(sending.end(), ClosedError)


def raises(kind: type[BaseException], call: Callable[[], Any]) -> bool:
    try:
        call()
    except kind:
        return True
    except TimeoutError:
        return False
    return False


def test_each_blocking_call_ends_at_its_deadline(near_pair: Any, socket_kind: str, endpoint: Any) -> None:
    one, other = near_pair(max_in_flight_bytes=1000)
    fill(one)
    with endpoint(socket_kind).listen() as listener:
        for call in (
            lambda t: one.recv_tensor(timeout=t),
            lambda t: one.send_tensor(torch.zeros(MIB), timeout=t),
            lambda t: listener.accept(t),
        ):
            for timeout in (0, 0.3):
                began = time.monotonic()
                with pytest.raises(TimeoutError):
                    call(timeout)
                assert timeout <= time.monotonic() - began + 0.01 < timeout + 4.0
    with pytest.raises(ValueError, match="timeout"):
        other.recv_tensor(timeout=-1)


# -- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "abort"])
def test_ending_wakes_whoever_is_blocked_here_and_there(near_pair: Any, end: str) -> None:
    one, other = near_pair(max_in_flight_bytes=1000)
    fill(one)
    fill(other)
    transfer = one.send_tensor  # the calls below: a receive here is impossible (something is waiting)
    sending = Running(lambda: transfer(torch.zeros(MIB), timeout=10))
    theirs = Running(lambda: other.send_tensor(torch.zeros(MIB), timeout=10))
    time.sleep(0.05)
    if end == "close":
        one.close(timeout=0.1)
    else:
        one.abort()
    assert isinstance(sending.end(2), ClosedError)
    assert isinstance(theirs.end(2), PeerGoneError)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_ending_wakes_a_blocked_receiver_here_and_there(near_pair: Any, end: str) -> None:
    one, other = near_pair()
    mine, theirs = (
        Running(lambda: one.recv_tensor(timeout=10)),
        Running(lambda: other.recv_tensor(timeout=10)),
    )
    time.sleep(0.05)
    getattr(one, end)()
    assert isinstance(mine.end(2), ClosedError)
    assert isinstance(theirs.end(2), PeerGoneError)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_ending_in_the_middle_of_a_message_wakes_its_receiver(near_pair: Any, end: str) -> None:
    from kvplug_cpu.message import Content

    one, other = near_pair()
    content = Content.of(torch.zeros(4 * MIB, dtype=torch.uint8), MIB)
    one._lanes[0].send_now([memoryview(content.prefix), content.memory[:1000]])
    theirs = Running(lambda: other.recv_tensor(timeout=10))
    time.sleep(0.05)
    getattr(other, end)()
    assert isinstance(theirs.end(2), ClosedError)
    with pytest.raises(PeerGoneError):
        for _ in range(1000):
            one.send_tensor(torch.zeros(MIB), timeout=2)


def test_after_an_end_every_call_raises_closed_and_ending_again_is_nothing(near_pair: Any) -> None:
    for end in ("close", "abort"):
        one, other = near_pair()
        transfer = one.send_tensor(torch.ones(3))
        getattr(one, end)()
        assert one.closed
        one.close()
        one.abort()
        with pytest.raises(ClosedError):
            one.send_tensor(None)
        with pytest.raises(ClosedError):
            one.recv_tensor()
        assert transfer.done()
        assert not other.closed


def test_close_sends_what_is_queued_first(near_pair: Any) -> None:
    one, other = near_pair()
    transfers = [one.send_tensor(torch.full((MIB,), float(n))) for n in range(6)]
    closing = Running(lambda: one.close(timeout=10))
    for number in range(6):
        assert bool((other.recv_tensor() == number).all())
    assert closing.end() is None
    for transfer in transfers:
        transfer.wait(0)


def test_what_close_could_not_send_in_time_fails(near_pair: Any) -> None:
    one, _ = near_pair()
    transfer = one.send_tensor(torch.zeros(50 * MIB, dtype=torch.uint8))
    began = time.monotonic()
    one.close(timeout=0.2)
    assert time.monotonic() - began < 5
    with pytest.raises(ClosedError):
        transfer.wait(1)


def test_abort_is_at_once_and_what_was_queued_fails(near_pair: Any) -> None:
    one, _ = near_pair()
    transfers = [one.send_tensor(torch.zeros(5 * MIB)) for _ in range(3)]
    began = time.monotonic()
    one.abort()
    assert time.monotonic() - began < 5
    for transfer in transfers:
        with pytest.raises(ClosedError):
            transfer.wait(1)


def test_abort_ends_a_close_that_is_still_sending(near_pair: Any) -> None:
    one, _ = near_pair()
    one.send_tensor(torch.zeros(50 * MIB, dtype=torch.uint8))
    closing = Running(lambda: one.close(timeout=20))
    until(lambda: one.closed)
    one.abort()
    closing.end(2)


def test_both_ends_may_close_while_both_have_sent(near_pair: Any) -> None:
    one, other = near_pair()
    for pipe in (one, other):
        pipe.send_tensor(torch.arange(10))
    one.close()
    assert torch.equal(other.recv_tensor(), torch.arange(10))
    other.close()


def test_leaving_the_with_block_closes_politely_or_aborts(near_pair: Any) -> None:
    one, other = near_pair()
    with one:
        one.send_tensor(torch.arange(4))
    assert torch.equal(other.recv_tensor(), torch.arange(4))
    one, other = near_pair()
    with pytest.raises(KeyError), one:
        raise KeyError
    assert one.closed


# -- forks, leaks, idleness -----------------------------------------------------------------------


def test_a_forked_child_can_neither_use_nor_disturb_the_pipe(far_pair: Any) -> None:
    pipe, child = far_pair("fork_and_look")
    pipe.send_tensor(pipe.recv_tensor(timeout=20))
    assert child.result() == ["ClosedError,ClosedError,0", True]


def test_hundreds_of_pipes_leave_nothing_behind(socket_kind: str, endpoint: Any) -> None:
    end = endpoint(socket_kind, split_bytes=1000)
    with peers.nothing_left(), end.listen() as listener, peers.nothing_left():
        for number in range(150):
            one = end.connect(listener.contact)
            other = listener.accept()
            one.send_tensor(torch.arange(1000))
            assert other.recv_tensor().numel() == 1000
            one.close() if number % 3 else one.abort()
            other.close() if number % 2 else other.abort()
    gc.collect()


def test_a_listener_that_closes_drops_whom_nobody_accepted(socket_kind: str, endpoint: Any) -> None:
    with peers.nothing_left():
        end = endpoint(socket_kind)
        listener = end.listen()
        one = end.connect(listener.contact)
        other = listener.accept(10)
        third = end.connect(listener.contact)
        blocked = Running(lambda: third.recv_tensor(timeout=10))
        accepting = Running(lambda: (time.sleep(0.05), listener.close()))
        accepting.end()
        assert isinstance(blocked.end(2), PeerGoneError)
        with pytest.raises(ClosedError):
            listener.accept(1)
        with pytest.raises(PeerGoneError):
            end.connect(listener.contact)
        one.send_tensor(torch.arange(3))
        assert other.recv_tensor().numel() == 3
        for pipe in (one, other, third):
            pipe.abort()
        listener.close()
        gc.collect()


def test_waiting_costs_no_processor_time(near_pair: Any) -> None:
    one, _ = near_pair(max_in_flight_bytes=1000)
    fill(one)
    blocked = [
        Running(lambda: one.recv_tensor(timeout=1.5)),
        Running(lambda: one.send_tensor(torch.zeros(MIB), timeout=1.5)),
    ]
    time.sleep(0.3)
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(1.0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1
    for each in blocked:
        assert isinstance(each.end(), TimeoutError)


def test_small_messages_need_no_thread(near_pair: Any) -> None:
    one, other = near_pair()
    before = set(threading.enumerate())
    for number in range(1000):
        one.send_tensor(torch.tensor(number))
        assert other.recv_tensor().item() == number
    assert set(threading.enumerate()) <= before
