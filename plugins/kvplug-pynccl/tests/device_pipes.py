"""What the pipes "cuda-ipc" and "pynccl" have in common, over the fakes of their libraries."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.cuda import _sleep as spin_on_gpu

from kvplug import (
    ConfigError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    TransportError,
)
from kvplug.transport import Blocks, Credentials, Deadline, PeerIdentity, Pipe, PipeEndpoint
from kvplug_lab.gpu import fake
from kvplug_testing import pairs, peers
from kvplug_testing.comparison import assert_filled, assert_same
from kvplug_testing.contract.pipe.devices import LateKernels
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.waits import Call, until

PATIENCE_S = 40.0
MIB = 1 << 20
CHILD = f"{__file__}:"
"""Before the name of a function here that a child is to run."""


def noise(nbytes: int = MIB) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def keep_gpu_busy(cycles: int = 200_000_000) -> None:
    """Enqueue a kernel that does nothing for so long."""
    spin_on_gpu(cycles)


def assert_works(pair: Any) -> None:
    one, other = pair
    for source, target in ((one, other), (other, one)):
        message = noise()
        source.send_tensor(message)
        assert_same(message, target.recv_tensor(timeout=PATIENCE_S))


class LateKernelsOfAFake(LateKernels):
    """The caller's stream of a fake: for the kit, whose tensors are the CPU's then."""

    queues_torch = False

    def __init__(self, path: str) -> None:
        self.device = "cpu"
        self._controls = fake.Controls(path)
        self.caller = self._controls.stream()

    def calling(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def late(self) -> Iterator[None]:
        self._controls.set(gate=1)
        self.caller.put_gate()
        try:
            yield
        finally:
            self._controls.set(gate=0)

    def tensor(self, content: Any) -> Any:
        return content.clone()

    def copy(self, target: Any, source: Any) -> None:
        self.caller.copy(target.data_ptr(), source.data_ptr(), source.nbytes)

    def read(self, tensor: Any) -> Any:
        assert self.caller.synchronize(PATIENCE_S)
        return tensor


# -- ends ------------------------------------------------------------------------------------------------


def fixtures_of(ends: str, endpoint: Any, device: Any, *counters: str) -> tuple[Any, Any, Any, Any]:
    """``pipe_pairs``, ``local_pair``, ``remote_pair`` and ``gated`` for the pipe of the module at ``ends``.

    When all pairs of a test have ended, the ``counters`` of the fake must come to 0.
    """

    @pytest.fixture
    def pipe_pairs(controls: Any) -> Iterator[pairs.PipePairs]:
        with pairs.PipePairs() as found:
            yield found
            controls.reset()
        until(lambda: not any(controls.get(counter) for counter in counters))

    @pytest.fixture
    def local_pair(fake_path: str, pipe_pairs: pairs.PipePairs) -> Callable[..., Any]:
        """Makes two connected pipes, both of this process."""
        return lambda **options: pipe_pairs.local(endpoint(fake_path, **options))

    @pytest.fixture
    def remote_pair(
        fake_path: str, pipe_pairs: pairs.PipePairs, fork_server: ForkServer
    ) -> Callable[..., Any]:
        """Makes a pipe whose other end is in a child that does ``what``: (pipe, child)."""

        def make(what: str, *args: Any, env: Any = None, **options: Any) -> Any:
            given = (ends, fake_path, options, what, list(args), env or {})
            return pipe_pairs.remote(
                endpoint(fake_path, **options),
                lambda contact: fork_server.start(
                    f"{CHILD}remote_end", contact, *given, timeout_s=4 * PATIENCE_S
                ),
            )

        return make

    @pytest.fixture
    def gated(fake_path: str, controls: Any) -> Iterator[SimpleNamespace]:
        """A device whose caller's stream does nothing between ``shut`` and ``open``."""
        caller = controls.stream()

        def shut() -> None:
            controls.set(gate=1)
            caller.put_gate()

        yield SimpleNamespace(
            device=device(fake_path, caller),
            caller=caller,
            shut=shut,
            open=lambda: controls.set(gate=0),
        )
        caller.close()

    return pipe_pairs, local_pair, remote_pair, gated


def module_at(file: str) -> Any:
    """In a child, which imports only from the folder of the function that it runs."""
    folder, name = os.path.split(file)
    sys.path.append(folder)
    return importlib.import_module(name.removesuffix(".py"))


def remote_end(
    parent: peers.Parent,
    contact: str,
    ends: str,
    path: str,
    options: Any,
    what: str,
    args: Any,
    env: dict[str, str],
) -> Any:
    """In a child: connect, then run ``what``. The fake reads ``env`` when it is loaded, which is in here."""
    os.environ.update(env)
    module = module_at(ends)
    with module.endpoint(path, **options).connect(contact) as pipe:
        return WHAT.get(what, getattr(module, what, None))(parent, pipe, *args)


def send_ones(parent: peers.Parent, pipe: Pipe, nbytes: int) -> None:
    """In a child: send a message of ``nbytes`` bytes, report it to the parent, and wait."""
    pipe.send_tensor(torch.ones(nbytes, dtype=torch.uint8))
    parent.send("sent")
    parent.recv(None)


def receive_interrupted(parent: peers.Parent, pipe: Pipe, nbytes: int) -> list[str]:
    """In a child: the errors of calls that Ctrl-C interrupts in the middle of a message, and of the next
    call. The last string says whether the caller's memory stayed unchanged afterwards.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = torch.zeros(nbytes, dtype=torch.uint8)
    said = []
    parent.send("here")
    for memory in (out, None):
        try:
            pipe.recv_tensor(memory, timeout=PATIENCE_S)
        except (KeyboardInterrupt, KvplugError) as e:
            said.append(f"{type(e).__name__}: {e}")
            out.fill_(5)
    parent.send("struck")
    parent.recv()
    said.append(str(bool((out == 5).all())))
    return said


WHAT: dict[str, Any] = {
    "echo": pairs.echo,
    "wait": pairs.wait,
    "send": send_ones,
    "interrupted": receive_interrupted,
}


def connects(parent: peers.Parent, contact: str, ends: str, path: str) -> str:
    """In a child: what becomes of a connection."""
    try:
        with module_at(ends).endpoint(path).connect(contact, timeout=PATIENCE_S) as pipe:
            pipe.send_tensor(torch.arange(3)).wait()
    except KvplugError as e:
        return f"{type(e).__name__}: {e}"
    return "connected"


def mute(parent: peers.Parent, contact: str, ends: str, path: str, heartbeat_s: float) -> None:
    """In a child that sees no process end, only missing heartbeats: connect, and echo."""
    PeerIdentity.open_pidfd = lambda self: None  # type: ignore[method-assign]
    end = module_at(ends).endpoint(path, heartbeat_timeout_s=heartbeat_s)
    with end.connect(contact) as pipe:
        pairs.echo(parent, pipe)


# -- over a fake -----------------------------------------------------------------------------------------


class PipesOverAFake:
    """Tests for a class of a plugin's, whose ``conftest.py`` has the fixtures."""

    ends: ClassVar[Any]
    """The module of the plugin's ends: ``endpoint``, ``HostDevice``, ``FAKE``, ``LARGE`` and ``content``."""
    factory: ClassVar[Any]
    """The fake's counter of operations."""
    exits: ClassVar[tuple[int, ...]] = (0,)
    """After so many operations a process ends inside the next one."""
    lies: ClassVar[dict[str, Any]]
    """What a peer cannot mean."""
    nonsense: ClassVar[tuple[Any, ...]]
    """What does not join."""

    def gpu(self, name: str, path: str) -> Any:
        """The plugin's device of that name."""
        raise NotImplementedError

    def lie(self, liar: Any, lie: Any) -> None:
        """Send the other end of a pipe something."""
        raise NotImplementedError

    def join(self, contact: str, nonsense: Any) -> Any:
        """A connection that has proved itself, and joins with that: something to be closed."""
        raise NotImplementedError

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "lie" in metafunc.fixturenames:
            metafunc.parametrize("lie", list(self.lies.values()), ids=list(self.lies))

    # -- what is refused ---------------------------------------------------------------------------------

    def test_a_device_that_is_no_gpu_or_not_here_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, fake_path: str
    ) -> None:
        refused = [("cpu", "moves CUDA tensors"), ("nowhere", "torch")]
        if not torch.cuda.is_available():
            refused.append(("cuda", "needs a GPU"))
        for device, words in refused:
            with pytest.raises(ConfigError, match=words):
                self.factory(PipeEndpoint.Context(options=None, credentials=Credentials(), device=device))
        for name, value in {"is_available": True, "current_device": 1, "device_count": 2}.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        assert [self.gpu(name, fake_path).name for name in ("cuda", "cuda:0")] == ["cuda:1", "cuda:0"]
        with pytest.raises(ConfigError, match="there are 2 GPUs"):
            self.gpu("cuda:2", fake_path)

    def test_where_there_is_no_memory_for_a_copy_nothing_is_queued(
        self, local_pair: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> Any:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")

        one, other = local_pair()
        monkeypatch.setattr(self.ends.content, "dense", full)
        monkeypatch.setattr(Blocks, "gathered", full)
        for call in (
            lambda: one.send_tensor(torch.arange(6).view(2, 3).t()),
            lambda: one.send_blocks([torch.zeros(5, 10)], [1, 3]),
        ):
            with pytest.raises(ResourceExhaustedError, match=r"nothing was queued.*out of memory"):
                call()
        one.send_tensor(None)
        assert other.recv_tensor(timeout=PATIENCE_S) is None

    # -- peers that lie, or do not join ------------------------------------------------------------------

    def test_a_peer_that_sends_what_cannot_be_ends_the_pipe_and_nothing_else(
        self, local_pair: Any, lie: Any
    ) -> None:
        one, other = local_pair()
        # Where the lie is that messages are there, receiving them would be an answer to it.
        receiving = None if isinstance(lie, list) else Call(lambda: other.recv_tensor(timeout=None))
        self.lie(one, lie)
        if receiving is not None:
            receiving.raised(TransportError)
        deadline = Deadline.after(PATIENCE_S / 2)
        with pytest.raises(TransportError, match="an invalid value"):
            while not deadline.expired:
                other.send_tensor(None, timeout=PATIENCE_S)
                time.sleep(0.001)
        # The liar's own half may first get a true answer to what it has never announced.
        with pytest.raises((PeerGoneError, TransportError)):
            while True:
                one.recv_tensor(timeout=PATIENCE_S)
        assert_works(local_pair())

    def test_a_connection_that_does_not_join_properly_disturbs_no_other(
        self, fake_path: str, controls: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        end = self.ends.endpoint(fake_path)
        with end.listen() as listener, ExitStack() as stack:
            for nonsense in self.nonsense:
                stack.enter_context(contextlib.closing(self.join(listener.contact, nonsense)))
            connecting = Call(lambda: end.connect(listener.contact))
            with listener.accept() as one, connecting.result() as other:
                one.send_tensor(torch.arange(2))
                assert other.recv_tensor().tolist() == [0, 1]
            until(lambda: caplog.messages)
        assert all(line.isprintable() and len(line) < 1500 for line in caplog.messages)

    # -- ends --------------------------------------------------------------------------------------------

    @pytest.mark.full
    def test_a_sender_that_dies_inside_a_copy_is_gone_for_its_receiver(
        self, remote_pair: Any, local_pair: Any
    ) -> None:
        large = self.ends.LARGE
        for after in self.exits:
            pipe, _ = remote_pair("send", large, env=self.ends.FAKE.environment(exit_after=after))
            out = torch.zeros(large, dtype=torch.uint8)
            with pytest.raises(PeerGoneError):
                pipe.recv_tensor(out, timeout=PATIENCE_S)
            out.fill_(7)  # the caller's again
            with pytest.raises(PeerGoneError):
                pipe.send_tensor(None)
            assert_works(local_pair())
            assert_filled(7, out)

    @pytest.mark.full
    def test_where_no_death_is_seen_silence_is_one_and_a_quiet_peer_is_not(
        self, fake_path: str, controls: Any, fork_server: ForkServer
    ) -> None:
        given = (self.ends.__file__, fake_path, 2.0)
        with (
            self.ends.endpoint(fake_path, heartbeat_timeout_s=2.0).listen() as listener,
            fork_server.start(f"{CHILD}mute", listener.contact, *given, timeout_s=2 * PATIENCE_S) as child,
            listener.accept() as pipe,
        ):
            with pytest.raises(TimeoutError):
                pipe.recv_tensor(timeout=4.0)
            pipe.send_tensor(torch.arange(4))
            assert pipe.recv_tensor(timeout=PATIENCE_S).tolist() == [0, 1, 2, 3]
            child.stop()
            with pytest.raises(PeerGoneError, match="silent"):
                pipe.recv_tensor(timeout=PATIENCE_S)
            child.kill()


# -- on a GPU --------------------------------------------------------------------------------------------


class PipesOnAGpu:
    """For a class of a plugin, whose module has ``remote_pair``: a pipe on the first GPU, and a child."""

    options: ClassVar[dict[str, Any]] = {}

    def test_what_the_caller_has_enqueued_is_done_before_it_is_sent(self, remote_pair: Any) -> None:
        pipe, _ = remote_pair("echo", **self.options)
        source = torch.zeros(1 << 22, device="cuda:0")
        torch.cuda.synchronize("cuda:0")
        with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
            keep_gpu_busy()
            source.fill_(3)
            transfer = pipe.send_tensor(source)
        assert_filled(3, pipe.recv_tensor())
        transfer.wait(PATIENCE_S)

    def test_a_slice_of_a_paged_cache_is_sent_and_filled_in_place(self, remote_pair: Any) -> None:
        pipe, _ = remote_pair("echo", **self.options)
        cache = torch.rand(3, 40, 16, 8, 128, device="cuda:0", dtype=torch.float32).half()
        target = torch.zeros_like(cache)
        for ids, into in (([3, 4, 5], [7, 8, 9]), ([9, 1, 4], [0, 20, 3])):
            pipe.send_blocks(list(cache), ids)
            pipe.recv_blocks(list(target), into)
            assert_same(cache[:, ids], target[:, into])
        pipe.send_tensor(cache[0])
        assert pipe.recv_tensor(target[1]) is not None
        assert_same(cache[0], target[1])
