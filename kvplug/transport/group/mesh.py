"""Pipes between the ranks of a group, and the control plane of a communicator over them.

A library of collectives, such as NCCL, does not report which rank is missing, and a rank cannot use it to
report that it has given up. The pipes do both: each notices when its peer's process ends, and carries news.

A pipe carries calls (any bytes) to be compared, tensors that a call announced, and news: a message ``None``,
followed by the encoded news.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvplug.errors import (
    ClosedError,
    ConfigError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TensorMismatchError,
    TimeoutError,
    TransportError,
    WireError,
)
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.peer_text import peer_text
from kvplug.net.wire import decode, encode
from kvplug.transport.group.group import STORE_TIMEOUT_S, contact_in, listen_and_send
from kvplug.transport.pipe import Pipe

if TYPE_CHECKING:
    import torch

    from kvplug.transport.group.group import StatelessGroup
    from kvplug.transport.pipe import PipeEndpoint, Transfer

_STEP_S = 0.05
"""How often a rank that waits for another rank checks whether a third rank is gone."""
_NEWS_S = 5.0
"""How long to wait for news after its announcement. Both are sent together, but a host may be busy."""
_VERDICT_S = 0.5
"""How long ranks whose collective failed wait for the other ranks' reports of the cause."""
_OWN_S = 0.1
"""How long a rank checks whether another rank is gone before it reports an error of its own."""
_DRAIN_S = 0.5
"""How long a rank whose exchange has failed waits for its transfers to end."""
_KINDS: dict[str, type[KvplugError]] = {
    kind.__name__: kind for kind in (TimeoutError, PeerGoneError, TransportError)
}


def connect_ranks(
    group: StatelessGroup,
    endpoint: PipeEndpoint,
    peers: Iterable[int] | None = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> dict[int, Pipe]:
    """Connect one pipe to each of ``peers`` (default: all other ranks), and return the pipes by rank.

    Two ranks get a pipe if each names the other. The lower rank listens. All ranks connect their pairs in the
    same order, lowest rank first, so that ranks cannot deadlock. If this raises, the pipes made so far are
    aborted.

    Raises:
        TimeoutError: a peer, which the error names, did not connect in time.
        PeerGoneError: a peer, which the error names, is gone.
        TransportError: a peer could not listen; the error says why.
        WireError: a peer sent something other than its contact.
        ConfigError: ``peers`` names this rank, or a rank that the group does not have.
        The rest as the endpoint.
    """
    deadline = Deadline.after(timeout, STORE_TIMEOUT_S)
    chosen = set(range(group.world_size)) - {group.rank} if peers is None else set(peers)
    if not chosen <= set(range(group.world_size)) - {group.rank}:
        raise ConfigError(
            f"peers of rank {group.rank} must be other ranks of the group, got {sorted(chosen)}"
        )
    pipes: dict[int, Pipe] = {}
    try:
        for peer in sorted(chosen, key=lambda p: (min(p, group.rank), max(p, group.rank))):
            connect = _listen_for if group.rank < peer else _dial
            try:
                pipes[peer] = connect(group, endpoint, peer, deadline)
            except (TimeoutError, PeerGoneError) as e:  # a listener cannot name the missing peer
                raise type(e)(f"no pipe to rank {peer}: {e}") from e
    except BaseException:
        for pipe in pipes.values():
            pipe.abort()
        raise
    return pipes


def _listen_for(group: StatelessGroup, endpoint: PipeEndpoint, peer: int, deadline: Deadline) -> Pipe:
    # Each peer has its own listener, so only that peer knows the contact.
    listener = listen_and_send(endpoint.listen, lambda message: group.send(message, peer))
    try:
        return listener.accept(deadline.remaining())
    finally:
        listener.close()


def _dial(group: StatelessGroup, endpoint: PipeEndpoint, peer: int, deadline: Deadline) -> Pipe:
    contact = contact_in(group.recv(peer, deadline.remaining()), peer)
    return endpoint.connect(contact, deadline.remaining())


@attrs.define
class _End:
    """The state of one pipe."""

    pipe: Pipe
    early: deque[torch.Tensor] = attrs.field(factory=deque)
    """Tensors that arrived while this rank waited for something else."""
    bad: Callable[[], KvplugError] | None = None
    """Makes the exception that says why nothing more arrives. An exception itself would keep the objects in
    its traceback's frames alive."""
    stopped: bool = False
    """Whether the other rank has given up the collective that is under way."""
    left_after: int | None = None
    """The number of collectives after which the other rank left; only later collectives miss it."""

    def error(self) -> KvplugError:
        """Return the exception to raise if ``bad`` is set."""
        return TransportError("the connection ended") if self.bad is None else self.bad()


class Mesh:
    """One rank's pipes to all other ranks, as :func:`connect_ranks` makes them. Only one thread at a time may
    call it, except for :meth:`abort`.
    """

    def __init__(self, pipes: Mapping[int, Pipe]) -> None:
        self._ends = {rank: _End(pipe) for rank, pipe in sorted(pipes.items())}
        self._collectives = 0
        """The number of collectives that all ranks have agreed on, or are agreeing on."""
        self._given_up = False
        self._reported = False

    def __len__(self) -> int:
        """How many other ranks there are."""
        return len(self._ends)

    def abort(self) -> None:
        """Abort all pipes. Never blocks. Waiting calls raise ClosedError, and other ranks treat this rank as
        gone."""
        for end in self._ends.values():
            end.pipe.abort()

    # -- calls -----------------------------------------------------------------------------------

    def send(self, calls: Mapping[int, bytes], deadline: Deadline) -> None:
        """Send each of these ranks its call, which must not be empty. Raises as :meth:`recv`."""
        messages = {call: _tensor_of(call) for call in set(calls.values())}
        for rank, call in calls.items():
            self._send(messages[call], rank, deadline)

    def recv(self, ranks: Iterable[int], deadline: Deadline) -> dict[int, bytes]:
        """Receive the next call of each of these ranks.

        Raises:
            TimeoutError: names the ranks that sent nothing in time, to this rank or to another one.
            PeerGoneError: a rank, which the error names, is gone. A rank that left after doing its part
                counts only if it is one of ``ranks``.
            ClosedError: ``abort`` was called.
        """
        missing = list(ranks)
        found: dict[int, bytes] = {}
        while missing:
            end = self._ends[missing[0]]
            if not end.early:
                left = deadline.remaining()
                self._look(missing[0], Deadline.after(_STEP_S if left is None else min(left, _STEP_S)))
            if end.early:
                found[missing.pop(0)] = _bytes_of(end.early.popleft())
                continue
            if end.bad is not None:
                raise end.error()
            self._check_ends()
            if deadline.expired:
                missing = [rank for rank in missing if not self._ends[rank].early]
                if missing:
                    raise TimeoutError(f"{_all(missing)} sent no call in time")
        return found

    def compare(
        self, calls: Mapping[int, bytes], deadline: Deadline, *, collective: bool = True
    ) -> dict[int, bytes]:
        """Exchange calls with these ranks, and return theirs. Raises as :meth:`recv`.

        ``collective``: ``calls`` names all other ranks, and a collective of all ranks follows.
        """
        if collective:
            self._collectives += 1
        self.send(calls, deadline)
        return self.recv(calls, deadline)

    def check(self) -> None:
        """Check that all ranks still take part.

        Raises:
            TransportError: a rank has given up the collective under way, and has not reported why.
            The rest as ``recv``.
        """
        self._check_ends()
        stopped = [rank for rank, end in self._ends.items() if end.stopped]
        if stopped:
            raise TransportError(f"{_all(stopped)} gave up")

    def _check_ends(self) -> None:
        for rank, end in self._ends.items():
            self._look(rank)
            if end.bad is not None and not self._has_done_its_part(end):
                raise end.error()

    def _has_done_its_part(self, end: _End) -> bool:
        """Whether the other rank has left, but only after all collectives that need it."""
        return end.left_after is not None and end.left_after >= self._collectives

    # -- tensors ---------------------------------------------------------------------------------

    def exchange(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        recvs: Sequence[tuple[torch.Tensor, int]],
        deadline: Deadline,
    ) -> None:
        """Send and receive all tensors at once. When this returns, the sent tensors may be overwritten.
        Raises as :meth:`recv`."""
        transfers = []
        try:
            for tensor, rank in sends:
                transfers.append((rank, self._send(tensor, rank, deadline)))
            for tensor, rank in recvs:
                self._receive(tensor, rank, deadline)
            for rank, transfer in transfers:
                try:
                    transfer.wait(deadline.remaining())
                except (TimeoutError, PeerGoneError) as e:
                    raise self._blaming(rank, e) from e
        except BaseException:
            # The caller may now change tensors that are still queued, so no rank may receive them. But a rank
            # that is cut off in the middle of a tensor receives nothing more from this rank, and treats this
            # rank as gone. So give the transfers a moment to end, and take what other ranks are sending.
            soon = Deadline.after(_DRAIN_S)
            for rank, transfer in transfers:
                while not transfer.done() and not soon.expired:
                    with contextlib.suppress(KvplugError):
                        for each in self._ends:
                            self._look(each, Deadline.after(_STEP_S / len(self._ends)))
                        transfer.wait(0.001)
                if not transfer.done():
                    end = self._ends[rank]
                    end.bad = end.bad or functools.partial(
                        TimeoutError, f"rank {rank} took no tensor in time"
                    )
                    end.pipe.abort()
            raise

    def _send(self, tensor: torch.Tensor, rank: int, deadline: Deadline) -> Transfer:
        try:
            return self._ends[rank].pipe.send_tensor(tensor, timeout=deadline.remaining())
        except (TimeoutError, PeerGoneError) as e:
            raise self._blaming(rank, e) from e

    def _receive(self, tensor: torch.Tensor, rank: int, deadline: Deadline) -> None:
        end = self._ends[rank]
        if end.early:
            tensor.copy_(end.early.popleft())
            return
        try:
            end.pipe.recv_tensor(tensor, timeout=deadline.remaining())
        except TensorMismatchError:
            self._look(rank)
            if end.stopped and not end.bad:
                self._look(rank, Deadline.after(_NEWS_S))
            raise (
                end.error() if end.bad else WireError("the tensor is not the one that was announced")
            ) from None
        except (TimeoutError, PeerGoneError) as e:
            raise self._blaming(rank, e) from e

    # -- news ------------------------------------------------------------------------------------

    def give_up(self, error: BaseException | None = None) -> None:
        """Inform all other ranks that this rank has given up; with ``error``, also report why. Does nothing
        if the reason was reported before. Never waits.
        """
        if self._reported:
            return
        self._given_up, self._reported = True, error is not None
        if error is None:
            self._announce(["stopped"])
            return
        lacking = NamedExhaustion.of(error)
        kind = type(error).__name__ if type(error).__name__ in _KINDS else "TransportError"
        # The text of errors such as KeyError and KeyboardInterrupt means little without the class.
        text = str(lacking or error) if lacking or isinstance(error, KvplugError) else repr(error)
        self._announce(["ended", kind, text[:2000], lacking.resource if lacking else ""])

    def leave(self) -> None:
        """Inform all other ranks that this rank has finished its calls, unless it gave up. Never waits."""
        if not self._given_up:
            self._announce(["left", self._collectives])

    def _announce(self, news: list[Any]) -> None:
        message = _tensor_of(encode(news))
        for end in self._ends.values():
            with contextlib.suppress(KvplugError):
                end.pipe.send_tensor(None, timeout=0)
                end.pipe.send_tensor(message, timeout=0)

    def silent(self, within: Deadline, *, reason_wanted: bool) -> list[int]:
        """Return the ranks that have sent no news ``within`` the deadline: they are stopped or cut off.

        ``reason_wanted``: this rank does not know why the collective failed, but another rank may.

        Raises:
            PeerGoneError: a rank, which the error names, is gone.
            The rest: the error with which another rank has given up.
        """
        while True:
            here = {rank: end for rank, end in self._ends.items() if not self._has_done_its_part(end)}
            waiting = [rank for rank, end in here.items() if not end.stopped]
            watched = list(here) if reason_wanted else waiting
            if within.expired or not watched:
                return waiting
            for rank in watched:
                self._look(rank, Deadline.after(min(_STEP_S, within.remaining() or 0.0) / len(watched)))
            known = [
                end.error()
                for end in here.values()
                if end.bad is not None and not self._has_done_its_part(end)
            ]
            if known:
                raise next((error for error in known if isinstance(error, PeerGoneError)), known[0])

    @contextlib.contextmanager
    def diagnose(
        self, among: Collection[int] | None = None, *, own: tuple[type[KvplugError], ...] = ()
    ) -> Iterator[None]:
        """Run an operation of the library, and find the rank that made it fail.

        The library does not name that rank, so the ranks exchange what they know. ``among``: the ranks of the
        operation (default: all). ``own``: errors that arise at this rank. They are raised whatever the other
        ranks report, unless a rank is gone, and silent ranks are not blamed for them.

        Raises:
            TimeoutError: names the ranks that do not answer.
            The rest as ``silent``, or as the operation.
        """
        try:
            yield
        except (TimeoutError, TransportError) as e:
            if not self._ends:
                raise
            self.give_up()
            try:
                if isinstance(e, (*own, ResourceExhaustedError)):
                    self._find_loss()
                else:
                    self._find_fault(e, among)
                raise
            except KvplugError as verdict:
                self.give_up(verdict)
                raise

    def _find_fault(self, error: KvplugError, among: Collection[int] | None) -> None:
        """Raise an error that names the rank at fault, if more is known than ``error`` reports."""
        late = isinstance(error, TimeoutError)
        silent = self.silent(Deadline.after(_VERDICT_S), reason_wanted=not late)
        if late and not silent:
            raise TimeoutError(f"{error}; all ranks answer, and have given up the collective") from error
        missed = [rank for rank in silent if among is None or rank in among]
        if missed:
            raise TimeoutError(
                f"{_all(missed)} began a collective, did not finish it, and does not answer"
            ) from error

    def _find_loss(self) -> None:
        """Raise PeerGoneError if a rank is gone."""
        try:
            self.silent(Deadline.after(_OWN_S), reason_wanted=True)
        except (PeerGoneError, ClosedError):
            raise
        except (TimeoutError, TransportError):
            return  # another rank's view of the cause, which does not matter here

    # -- internals -------------------------------------------------------------------------------

    def _look(self, rank: int, deadline: Deadline | None = None) -> None:
        """Receive at most one message from a rank, waiting until the deadline (default: not at all)."""
        end = self._ends[rank]
        if end.bad is not None:
            return
        try:
            message = end.pipe.recv_tensor(timeout=0 if deadline is None else deadline.remaining())
            if message is not None:
                end.early.append(message)
                return
            news = decode(_bytes_of(end.pipe.recv_tensor(timeout=_NEWS_S)))
        except TimeoutError:
            return
        except (ClosedError, ResourceExhaustedError):
            raise
        except KvplugError as e:
            text = f"rank {rank} is gone: {e}" if isinstance(e, PeerGoneError) else str(e)
            end.bad = functools.partial(type(e), text)
            return
        match news:
            case ["left", int(collectives)]:
                end.left_after = collectives
                return
        end.stopped = True
        match news:
            case ["ended", str(kind), str(why), str(resource)]:
                why = f"rank {rank} has given up: {peer_text(why)}"
                end.bad = functools.partial(_KINDS.get(kind, TransportError), why)
                if resource:
                    end.bad = functools.partial(ResourceExhaustedError, why, resource=peer_text(resource))

    def _blaming(self, rank: int, error: TimeoutError | PeerGoneError) -> KvplugError:
        """Return an error that names the rank whose pipe raised ``error``, or gives the reason that the rank
        reported before it left."""
        if isinstance(error, TimeoutError):
            return TimeoutError(f"rank {rank}: {error}")
        end = self._ends[rank]
        before = -1
        while end.bad is None and len(end.early) > before:
            before = len(end.early)
            self._look(rank)
        return end.error() if end.bad else PeerGoneError(f"rank {rank} is gone: {error}")


def _all(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)


def _tensor_of(data: bytes) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes_of(message: torch.Tensor | None) -> bytes:
    import torch

    if message is None or message.dtype != torch.uint8 or message.dim() != 1:
        raise WireError("bytes were expected, but a tensor arrived")
    return bytes(message.numpy())
