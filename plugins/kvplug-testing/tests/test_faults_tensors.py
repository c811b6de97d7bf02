"""What a plan of faults does to real pipes, and that a plan without rules does nothing at all."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvplug import ClosedError, KvplugError, PeerGoneError, Registry, TimeoutError, errors  # noqa: E402
from kvplug.transport import (  # noqa: E402
    BusyError,
    Credentials,
    Pipe,
    PipeContext,
    PipeEndpoint,
    PipeListener,
    TensorMismatchError,
    Transfer,
)
from kvplug.transport.spec import Kind  # noqa: E402
from kvplug_testing import PipeContract, peers  # noqa: E402
from kvplug_testing.faults import FaultyEndpoint, FaultyPipe, Plan, Rule  # noqa: E402
from kvplug_testing.waits import Call, raises  # noqa: E402

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20
PATIENCE_S = 20.0


NEVER = Plan(rules=[Rule(do="drop", direction=way, message=1 << 40) for way in ("send", "recv")])
"""A rule does nothing to messages that it does not hit, and yet each one is looked at."""


@pytest.mark.variant
class TestTransparent(PipeContract):
    """It is the inner pipe: at one end without rules, at the other with rules that hit nothing."""

    transport = "memory"
    across_processes = False

    def make_endpoint(self, context: PipeContext) -> PipeEndpoint:
        return Different(super().make_endpoint(context))


class Different(FaultyEndpoint):
    """Who connects has no rules, who accepts has some."""

    def __init__(self, inner: PipeEndpoint) -> None:
        super().__init__(inner, Plan())
        self._accepting = FaultyEndpoint(inner, NEVER)

    def listen(self) -> PipeListener:
        return self._accepting.listen()


# -- what rules do ---------------------------------------------------------------------------------

Pair = Callable[..., tuple[FaultyPipe, FaultyPipe]]


def endpoint(transport: str, **options: Any) -> PipeEndpoint:
    spec = Registry.from_env().get(Kind.PIPE, transport)
    cls = spec.load_options()
    context = PipeContext(options=cls(**options), credentials=Credentials(), timeout_s=PATIENCE_S)
    return spec.load_factory()(context)


@pytest.fixture(params=["memory", "cpu"])
def pair(request: pytest.FixtureRequest) -> Any:
    """Makes two connected pipes: ``pair([rules of the first], [rules of the second], seed=…, **options)``."""
    if not Registry.from_env().owners(Kind.PIPE, request.param):
        pytest.skip(f"no transport {request.param} is installed")
    made: list[FaultyPipe] = []

    def make(near: list[Rule], far: list[Rule] = [], seed: int = 0, **options: Any) -> Any:  # noqa: B006
        inner = endpoint(request.param, **options)
        listener = FaultyEndpoint(inner, Plan(seed=seed, rules=far)).listen()
        connecting = Call(
            lambda: FaultyEndpoint(inner, Plan(seed=seed, rules=near)).connect(listener.contact)
        )
        accepted = listener.accept(timeout=PATIENCE_S)
        made.extend([connecting.result(), accepted])
        listener.close()
        return made[-2], made[-1]

    torch.ones(MIB).add_(1)  # makes torch's own threads
    warm = make([])
    for pipe in warm:
        pipe.abort()
    made.clear()
    with peers.nothing_left():
        yield make
        for pipe in made:
            pipe.abort()
        made.clear()


def tensor(number: int, nbytes: int = 64) -> Any:
    return torch.full((nbytes,), number, dtype=torch.uint8)


def send(pipe: FaultyPipe, *numbers: int, nbytes: int = 64) -> None:
    for number in numbers:
        pipe.send_tensor(tensor(number, nbytes), timeout=PATIENCE_S)


def received(pipe: FaultyPipe, count: int) -> list[int]:
    return [int(pipe.recv_tensor(timeout=PATIENCE_S)[0]) for _ in range(count)]


def is_idle(pipe: FaultyPipe) -> bool:
    raises(TimeoutError, lambda: pipe.recv_tensor(timeout=0.1))
    return True


def differing_bits(a: Any, b: Any) -> int:
    changed = a.view(torch.uint8).flatten() ^ b.view(torch.uint8).flatten()
    return sum(byte.bit_count() for byte in changed.tolist())


@pytest.mark.parametrize("direction", ["send", "recv"])
class TestEachDirection:
    """One end sends 1, 2, 3 and so on; a rule at it, or at the other end, does something to them."""

    def ends(self, pair: Pair, direction: str, *rules: dict[str, Any], **more: Any) -> Any:
        made = [Rule(direction=direction, **rule) for rule in rules]
        return pair(made, [], **more) if direction == "send" else pair([], made, **more)

    def test_a_message_that_is_dropped_never_comes_and_the_others_do(
        self, pair: Pair, direction: str
    ) -> None:
        near, far = self.ends(pair, direction, {"do": "drop", "every": 2})
        send(near, 1, 2, 3, 4, 5)
        assert received(far, 3) == [1, 3, 5]
        assert is_idle(far)

    def test_one_that_is_duplicated_comes_twice(self, pair: Pair, direction: str) -> None:
        near, far = self.ends(pair, direction, {"do": "duplicate", "message": 2})
        send(near, 1, 2, 3)
        assert received(far, 4) == [1, 2, 2, 3]

    def test_one_that_is_swapped_comes_after_the_next(self, pair: Pair, direction: str) -> None:
        near, far = self.ends(pair, direction, {"do": "swap", "message": 2})
        send(near, 1, 2, 3, 4)
        assert received(far, 4) == [1, 3, 2, 4]

    def test_one_that_is_swapped_with_none_comes_when_the_pipe_ends(self, pair: Pair, direction: str) -> None:
        near, far = self.ends(pair, direction, {"do": "swap", "message": 2})
        send(near, 1, 2)
        assert received(far, 1) == [1]
        assert is_idle(far)
        near.close(timeout=PATIENCE_S)
        assert received(far, 1) == [2]
        raises(PeerGoneError, far.recv_tensor)

    def test_everything_may_be_swapped(self, pair: Pair, direction: str) -> None:
        near, far = self.ends(pair, direction, {"do": "swap"})
        send(near, 1, 2, 3, 4)
        assert received(far, 4) == [2, 1, 4, 3]

    def test_just_so_many_bits_are_flipped_and_the_source_is_what_it_was(
        self, pair: Pair, direction: str
    ) -> None:
        near, far = self.ends(
            pair, direction, {"do": "flip", "message": 2}, {"do": "flip", "message": 3, "bits": 100}
        )
        source = torch.randn(50, 3, dtype=torch.bfloat16).t()
        for _ in range(3):
            near.send_tensor(source, timeout=PATIENCE_S)
        near.send_tensor(None, timeout=PATIENCE_S)
        got = [far.recv_tensor(timeout=PATIENCE_S) for _ in range(4)]
        assert got[3] is None
        assert [differing_bits(each.contiguous(), source.contiguous()) for each in got[:3]] == [0, 1, 100]

    def test_flips_are_the_seeds(self, pair: Pair, direction: str) -> None:
        found = []
        for seed in (1, 1, 2):
            near, far = self.ends(pair, direction, {"do": "flip", "bits": 8}, seed=seed)
            send(near, 0, 0)
            found.append([far.recv_tensor(timeout=PATIENCE_S) for _ in range(2)])
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])
        assert not torch.equal(found[0][0], found[2][0])
        assert not torch.equal(found[0][0], found[0][1])

    def test_a_delay_only_delays(self, pair: Pair, direction: str) -> None:
        near, far = self.ends(pair, direction, {"do": "delay", "message": 2, "seconds": 0.3})
        sending = Call(lambda: send(near, 1, 2, 3))
        receiving = Call(lambda: received(far, 3))
        assert receiving.result() == [1, 2, 3]
        sending.result()
        assert receiving.took_s >= 0.25

    def test_a_deadline_within_a_delay_loses_nothing(self, pair: Pair, direction: str) -> None:
        near, far = self.ends(pair, direction, {"do": "delay", "message": 1, "seconds": 0.5})
        began = time.monotonic()
        if direction == "send":
            raises(TimeoutError, lambda: near.send_tensor(tensor(1), timeout=0.1))
        send(near, 1)
        if direction == "recv":
            raises(TimeoutError, lambda: far.recv_tensor(timeout=0.1))
        assert received(far, 1) == [1]
        assert 0.5 <= time.monotonic() - began < 5  # it goes on from where it was, and is held up once
        assert is_idle(far)

    def test_a_slow_pipe_lets_through_so_much_in_a_second(self, pair: Pair, direction: str) -> None:
        near, far = self.ends(pair, direction, {"do": "slow", "bytes_per_s": 4 * MIB})
        sending = Call(lambda: send(near, 1, 2, nbytes=MIB // 2))
        receiving = Call(lambda: received(far, 2))
        assert receiving.result() == [1, 2]
        sending.result()
        assert receiving.took_s >= 0.2

    @pytest.mark.parametrize("name", ["PeerGoneError", "TimeoutError", "TransportError", "WireError"])
    def test_an_error_that_is_raised_costs_no_message(self, pair: Pair, direction: str, name: str) -> None:
        near, far = self.ends(pair, direction, {"do": "raise", "message": 2, "error": name})
        call = (lambda: send(near, 2)) if direction == "send" else (lambda: received(far, 1))
        send(near, 1)
        if direction == "recv":
            assert received(far, 1) == [1]
        error = raises(getattr(errors, name), call)
        assert "a planned fault: rule 1 (raise), message 2" in str(error)
        send(near, 2)
        assert received(far, 1 if direction == "recv" else 2)[-1] == 2

    def test_after_so_many_bytes_the_peer_is_gone_at_both_ends(self, pair: Pair, direction: str) -> None:
        near, far = self.ends(pair, direction, {"do": "disconnect", "after": 3 * MIB})

        def go_on_sending() -> None:
            for number in range(1, 100):
                near.send_tensor(tensor(number, MIB), timeout=PATIENCE_S)

        sending = Call(go_on_sending)
        assert received(far, 3) == [1, 2, 3]
        raises(PeerGoneError, lambda: received(far, 100))
        sending.raised(PeerGoneError)
        for pipe in (near, far):
            raises(PeerGoneError, pipe.recv_tensor)
            raises(PeerGoneError, lambda pipe=pipe: pipe.send_tensor(None))
            pipe.close(timeout=1)
            assert pipe.closed
            raises(ClosedError, pipe.recv_tensor)

    def test_who_waits_in_the_other_direction_is_woken_by_a_disconnection(
        self, pair: Pair, direction: str
    ) -> None:
        near, far = self.ends(pair, direction, {"do": "disconnect", "message": 2})
        waiting = Call(lambda: near.recv_tensor(timeout=PATIENCE_S))
        send(near, 1)
        assert received(far, 1) == [1]
        assert waiting.is_blocked()
        if direction == "send":
            raises(PeerGoneError, lambda: send(near, 2))
        raises(PeerGoneError, lambda: received(far, 1))
        waiting.raised(PeerGoneError)

    def test_a_stop_ends_with_the_deadline_and_goes_on_after_its_time(
        self, pair: Pair, direction: str
    ) -> None:
        near, far = self.ends(pair, direction, {"do": "stop", "message": 2, "seconds": 0.6})
        send(near, 1)
        assert received(far, 1) == [1]
        if direction == "send":
            raises(TimeoutError, lambda: near.send_tensor(tensor(2), timeout=0.1))
            assert is_idle(far)
        send(near, 2, 3)
        if direction == "recv":
            raises(TimeoutError, lambda: far.recv_tensor(timeout=0.1))
        assert received(far, 2) == [2, 3]

    @pytest.mark.parametrize("end", ["close", "abort"])
    def test_closing_wakes_whoever_is_stopped_for_good(self, pair: Pair, direction: str, end: str) -> None:
        near, far = self.ends(pair, direction, {"do": "stop"})
        stopped = near if direction == "send" else far
        call = Call(
            lambda: (
                stopped.send_tensor(None, timeout=None)
                if direction == "send"
                else stopped.recv_tensor(timeout=None)
            )
        )
        assert call.is_blocked()
        second = (lambda: stopped.send_tensor(None)) if direction == "send" else stopped.recv_tensor
        raises(BusyError, second)
        getattr(stopped, end)()
        call.raised(ClosedError)


def test_an_end_that_stops_reading_lets_its_peer_feel_it(pair: Pair) -> None:
    near, far = pair([], [Rule(do="stop", direction="recv")], max_in_flight_bytes=MIB)
    raises(TimeoutError, lambda: far.recv_tensor(timeout=0.1))

    def clog() -> None:
        for _ in range(100):
            near.send_tensor(tensor(1, MIB), timeout=0.3)

    raises(TimeoutError, clog)


def test_memory_of_the_callers_own_is_filled_and_what_does_not_fit_stays(pair: Pair) -> None:
    near, far = pair([], [Rule(do=do, direction="recv", message=1) for do in ("flip", "duplicate")])
    near.send_tensor(torch.zeros(4, 6), timeout=PATIENCE_S)
    raises(TensorMismatchError, lambda: far.recv_tensor(torch.empty(6, 4)))
    raises(TensorMismatchError, lambda: far.recv_tensor(torch.empty(4, 6, dtype=torch.float64)))
    outs = [torch.full((6, 4), 7.0).t(), torch.full((4, 6), 7.0)]
    for out in outs:
        assert far.recv_tensor(out, timeout=PATIENCE_S) is out
        assert differing_bits(out.contiguous(), torch.zeros(4, 6)) == 1
    assert torch.equal(*outs)
    near.send_tensor(torch.ones(2), timeout=PATIENCE_S)
    out = torch.zeros(2)
    assert far.recv_tensor(out, timeout=PATIENCE_S) is out
    assert out.tolist() == [1, 1]


def test_the_caller_may_overwrite_what_was_swapped_or_duplicated(pair: Pair) -> None:
    near, far = pair([Rule(do="swap", message=1), Rule(do="duplicate", message=2)])
    for number in (1, 2):
        source = tensor(number)
        near.send_tensor(source, timeout=PATIENCE_S).wait(PATIENCE_S)
        source.fill_(99)
    assert received(far, 3) == [2, 2, 1]


def test_what_is_owed_waits_for_room_and_is_not_lost(pair: Pair) -> None:
    near, far = pair([Rule(do="duplicate")], max_in_flight_bytes=MIB)
    sent = 0
    try:
        for number in range(1, 40):
            near.send_tensor(tensor(number, MIB), timeout=0.2)
            sent = number
    except TimeoutError:
        pass
    assert 0 < sent < 39
    closing = Call(lambda: near.close(timeout=PATIENCE_S))
    assert received(far, 2 * sent) == [number for number in range(1, sent + 1) for _ in range(2)]
    closing.result()


def test_several_rules_meet_in_one_message(pair: Pair) -> None:
    rules = [Rule(do="flip", message=2), Rule(do="swap", message=2), Rule(do="duplicate", every=2)]
    near, far = pair(rules)
    send(near, 0, 0, 0)
    got = [int(far.recv_tensor(timeout=PATIENCE_S).count_nonzero()) for _ in range(4)]
    assert got[:2] == [0, 0]
    assert got[2] == got[3] > 0
    assert near.hits == {"flip": 1, "swap": 1, "duplicate": 1}
    assert "1 x flip" in repr(near)


def test_a_rule_may_name_a_pipe(pair: Pair) -> None:
    inner = endpoint("memory")
    listener = inner.listen()
    end = FaultyEndpoint(inner, Plan(rules=[Rule(do="drop", pipe=2)]))
    for expected in ([1], [], [1]):
        near = end.connect(listener.contact)
        far = listener.accept()
        send(near, 1)
        near.close()
        got = []
        while (message := Call(lambda: far.recv_tensor()).end()).error is None:  # noqa: B023 - at once
            got.append(int(message.value[0]))
        assert got == expected
        far.abort()
    listener.close()


def test_a_plan_that_meets_no_message_warns_when_its_last_pipe_ends(caplog: pytest.LogCaptureFixture) -> None:
    inner = endpoint("memory")
    listener = inner.listen()
    for message, warnings in ((7, 1), (2, 0)):
        caplog.clear()
        end = FaultyEndpoint(inner, Plan(rules=[Rule(do="drop", message=message)]))
        pipes = [end.connect(listener.contact) for _ in range(2)]
        for pipe in pipes:
            send(pipe, 1, 2)
        pipes[0].abort()
        assert "no planned fault" not in caplog.text
        for pipe in pipes:
            pipe.abort()
        assert (
            caplog.text.count("no planned fault has happened in this process: rules 1, messages 4,")
            == warnings
        )
    listener.close()


def test_a_switch_decides_whether_a_fault_happens() -> None:
    inner = endpoint("memory")
    listener = inner.listen()
    on = False
    near = FaultyPipe(
        inner.connect(listener.contact), Plan(rules=[Rule(do="drop", every=2)]), when=lambda: on
    )
    far = listener.accept()
    for number in range(1, 9):
        on = number > 4
        send(near, number)
    assert received(far, 6) == [1, 2, 3, 4, 5, 7]
    near.close()
    listener.close()
    far.abort()


class Unread(Pipe):
    """Takes ``room`` messages, of which none ever leaves; then its peer is gone."""

    closed = False
    peer = "nobody"

    def __init__(self, room: int) -> None:
        self.room = room
        self.taken: list[Transfer] = []

    def send_tensor(self, tensor: Any, *, timeout: Any = None) -> Transfer:
        if len(self.taken) == self.room:
            raise PeerGoneError("no peer is gone")
        self.taken.append(Transfer(tensor.nbytes))
        return self.taken[-1]

    def recv_tensor(self, out: Any = None, *, timeout: Any = None) -> Any:
        raise TimeoutError("no message")

    def close(self, timeout: Any = None) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


@pytest.mark.parametrize("do", ["disconnect", "kill"])
def test_a_planned_death_comes_though_nobody_reads_and_no_deadline_is_set(
    do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[int] = []
    monkeypatch.setattr("kvplug_testing.faults.pipe.LEAVING_S", 0.2)
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: signals.append(number))
    pipe = FaultyPipe(Unread(room=5), Plan(rules=[Rule(do=do, message=2)]))
    send(pipe, 1)
    call = Call(lambda: pipe.send_tensor(tensor(2), timeout=None)).end()
    assert isinstance(call.error, PeerGoneError) is (do == "disconnect")
    assert signals == ([signal.SIGKILL] if do == "kill" else [])
    assert pipe.hits == {do: 1}


def test_a_message_that_was_taken_has_its_transfer_though_its_second_copy_cannot_be_sent() -> None:
    inner = Unread(room=1)
    pipe = FaultyPipe(inner, Plan(rules=[Rule(do="duplicate")]))
    transfer = pipe.send_tensor(tensor(1), timeout=PATIENCE_S)
    assert [transfer] == inner.taken
    raises(PeerGoneError, lambda: pipe.send_tensor(tensor(2), timeout=PATIENCE_S))
    assert pipe.hits == {"duplicate": 1}


@pytest.mark.parametrize("direction", ["send", "recv"])
def test_where_there_is_nothing_to_flip_nothing_has_happened(
    pair: Pair, direction: str, caplog: pytest.LogCaptureFixture
) -> None:
    rules = [Rule(do="flip", direction=direction), Rule(do="duplicate", direction=direction, message=1)]
    near, far = pair(rules) if direction == "send" else pair([], rules)
    with caplog.at_level(logging.INFO):
        for message in (None, torch.empty(0, 3), tensor(0)):
            near.send_tensor(message, timeout=PATIENCE_S)
        got = [far.recv_tensor(timeout=PATIENCE_S) for _ in range(4)]
    assert got[:2] == [None, None]
    assert differing_bits(got[3], tensor(0)) == 1
    assert (near if direction == "send" else far).hits == {"flip": 1, "duplicate": 1}
    told = [record.getMessage() for record in caplog.records if "rule 1 (flip)" in record.getMessage()]
    assert ["finds nothing to flip" in text for text in told] == [True, True, False]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_in_a_forked_child_it_is_closed_and_the_parents_goes_on(pair: Pair) -> None:
    near, far = pair([Rule(do="stop", message=2)])
    stopped = Call(lambda: send(near, 1, 2))
    assert received(far, 1) == [1]
    assert stopped.is_blocked()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            near.send_tensor(None)
        except ClosedError:
            status = 0 if near.closed else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not near.closed
    near.abort()
    stopped.raised(ClosedError)


# -- between processes -------------------------------------------------------------------------------


def send_until_it_ends(parent: Any, contact: str, name: str) -> None:
    rules = [Rule(do="kill", after=3 * MIB, times=1, signal=name)]
    with FaultyEndpoint(endpoint("cpu"), Plan(rules=rules)).connect(contact) as pipe:
        for number in range(1, 6):
            pipe.send_tensor(tensor(number, MIB), timeout=PATIENCE_S)
        parent.recv(timeout=PATIENCE_S)


@pytest.fixture
def listener() -> Any:
    if not Registry.from_env().owners(Kind.PIPE, "cpu"):
        pytest.skip("no transport between processes is installed")
    listener = endpoint("cpu").listen()
    yield listener
    listener.close()


def sender(fork_server: Any, listener: Any, ends_by: str) -> peers.Peer:
    """A process that sends until this signal of its own comes."""
    return fork_server.start(f"{os.path.abspath(__file__)}:send_until_it_ends", listener.contact, ends_by)


@pytest.mark.full
def test_a_process_that_kills_itself_after_so_many_bytes_leaves_nothing(
    listener: Any, fork_server: Any
) -> None:
    with peers.nothing_left(), sender(fork_server, listener, "SIGKILL") as child:
        pipe = listener.accept(timeout=PATIENCE_S)
        got: list[int] = []

        def receive_all() -> None:
            while True:
                got.extend(received(pipe, 1))

        raises(PeerGoneError, receive_all)
        assert got == [1, 2, 3][: len(got)]  # what had not arrived yet died with it
        pipe.close()
        child.wait()
        assert child.exit_code == -signal.SIGKILL


@pytest.mark.full
def test_a_process_that_stops_itself_is_alive_and_goes_on_when_it_may(
    listener: Any, fork_server: Any
) -> None:
    with sender(fork_server, listener, "SIGSTOP") as child:
        pipe = listener.accept(timeout=PATIENCE_S)
        assert received(pipe, 3) == [1, 2, 3]
        raises(TimeoutError, lambda: pipe.recv_tensor(timeout=0.3))
        child.cont()
        assert received(pipe, 2) == [4, 5]
        child.send("end")
        child.result()
        pipe.close()


def test_no_error_of_a_plan_is_a_stranger() -> None:
    """Those that a rule may raise are made from one text."""
    names = Rule.__annotations__["error"]
    for name in ("PeerGoneError", "TimeoutError", "TransportError", "WireError", "UnsupportedError"):
        assert name in names
        assert isinstance(getattr(errors, name)("why"), KvplugError)


def test_more_bits_than_there_are_turn_all_of_them_over() -> None:
    from random import Random

    from kvplug_testing.faults.messages import flipped

    assert flipped(tensor(0, 3), 1000, Random(1)).tolist() == [255] * 3
    assert flipped(torch.empty(0), 1, Random(1)).numel() == 0
    assert flipped(torch.zeros((), dtype=torch.bfloat16), 2, Random(1)).shape == ()
