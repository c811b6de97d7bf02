"""Checks around every call: one thread at a time, valid arguments, equal calls at all ranks, no use after
failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kvplug.errors import (
    BusyError,
    ClosedError,
    ConfigError,
    KvplugError,
    TensorMismatchError,
    UnsupportedError,
)
from kvplug.net.deadline import Deadline, Timeout
from kvplug.net.exhaustion import exhaustion_of, raise_if_exhausted
from kvplug.net.threads import hold_at_exit
from kvplug.transport.communicator.calls import (
    PAIRED,
    check_dim,
    check_fillable,
    check_paired,
    check_received,
    check_same,
    describe,
    empty,
    in_one,
    in_short,
    is_outermost,
    is_paired,
    joined,
    paired,
    plain,
)
from kvplug.transport.communicator.primitives import Primitives

if TYPE_CHECKING:
    from torch import Tensor

Call = Mapping[str, Any]
Pairs = Sequence[tuple["Tensor", int]]

REFUSALS: Final = (UnsupportedError, TensorMismatchError, ConfigError, BusyError, ClosedError)
"""After these errors the communicator stays usable: no rank has begun the call."""


class CheckedCalls(Primitives):
    """The checks that all public methods share."""

    @contextmanager
    def _call(self, name: str, timeout: Timeout, check: Callable[[], dict[str, Any]]) -> Iterator[Deadline]:
        """Runs one collective: checks its arguments here, then compares them with the other ranks'."""
        with self._attempt(timeout) as deadline:
            with self._agreed(name, check, lambda call: self._compare(call, deadline)) as calls:
                check_same(name, calls)
            yield deadline

    @contextmanager
    def _pairs_call(self, sends: Pairs, recvs: Pairs, timeout: Timeout) -> Iterator[Deadline]:
        """The same for calls between this rank and some others."""
        for _, dst in sends:
            self._check_rank("dst", dst, other=True)
        for _, src in recvs:
            self._check_rank("src", src, other=True)
        peers = sorted({peer for _, peer in (*sends, *recvs)})
        with self._attempt(timeout) as deadline:
            try:
                self._agree_in_pairs(sends, recvs, peers, deadline)
            except REFUSALS as e:
                if len(peers) > 1:
                    self._break(e)  # a peer that agreed has begun, and waits for this rank
                raise
            yield deadline

    def _agree_in_pairs(self, sends: Pairs, recvs: Pairs, peers: Sequence[int], deadline: Deadline) -> None:
        fault: KvplugError | None = None
        calls: dict[int, Call]
        try:
            said = [
                [(in_short(self._said(tensor, filled=each is recvs)), peer) for tensor, peer in each]
                for each in (sends, recvs)
            ]
            calls = {
                peer: paired(*([what for what, at in each if at == peer] for each in said)) for peer in peers
            }
        except KvplugError as e:
            fault, calls = e, {peer: {"call": PAIRED, "refused": str(e)} for peer in peers}
        if self.compares and peers:
            try:
                theirs = {
                    peer: check_received(peer, call)
                    for peer, call in self._compare_pairs(calls, deadline).items()
                }
            except KvplugError as e:
                if fault is None:
                    raise
                self._break(e)
                raise fault from e
            try:
                if fault is None:
                    check_paired(self.rank_in_group, calls, theirs)
            except TensorMismatchError as e:
                fault = e
            others_wait = self.world_size > 2 and not all(is_paired(their) for their in theirs.values())
            if fault is not None and others_wait:
                self._break(fault)  # those that are in the collective too, and hear of it only so
        if fault is not None:
            raise fault

    @contextmanager
    def _attempt(self, timeout: Timeout) -> Iterator[Deadline]:
        """One thread at a time; a call that fails after it has begun breaks the communicator."""
        try:
            self._check_usable()
            deadline = Deadline.after(timeout, self.context.timeout_s)
            if not self._busy.acquire(blocking=False):
                raise BusyError("another thread is in a collective of this communicator already")
            try:
                # The thread that was in a call until now may have broken it, and a program that leaves
                # destroys it without having seen this call.
                self._check_whole()
                yield deadline
            except REFUSALS:
                raise
            except BaseException as e:
                if self._destroyed:
                    raise ClosedError(f"{self!r} was destroyed during the call") from e
                self._break(exhaustion_of(e, repr(self)) or e)
                raise_if_exhausted(e, repr(self))
                raise
            finally:
                self._busy.release()
        except BaseException:
            hold_at_exit()
            raise

    def _break(self, error: BaseException) -> None:
        if not self._broken:
            self._broken = f"{type(error).__name__}: {error}"
            self._give_up(error)

    @contextmanager
    def _agreed(
        self,
        name: str,
        check: Callable[[], dict[str, Any]],
        exchange: Callable[[Call], Sequence[Call]],
        *,
        always: bool = False,
    ) -> Iterator[Sequence[Call]]:
        """The next calls of all ranks; a rank whose own arguments are wrong sends that to the others first.

        ``always``: exchange calls even where ranks do not compare them, since the caller needs a part of
        them.
        """
        alone = self.world_size == 1 or not (self.compares or always)
        fault: KvplugError | None = None
        try:
            call = {"call": name, **check()}
        except KvplugError as e:
            fault, call = e, {"call": name, "refused": str(e)}
        if fault is not None and alone:
            raise fault
        calls: Sequence[Call] = [call]
        if not alone:
            try:
                calls = [check_received(rank, each) for rank, each in enumerate(exchange(call))]
            except KvplugError as e:
                if fault is None:
                    raise
                self._break(e)
                raise fault from e
        if fault is not None:
            raise fault
        yield calls

    def _said(
        self, tensor: Tensor, *, summing: bool = False, filled: bool = False, **given: Any
    ) -> dict[str, Any]:
        """Check a tensor and what comes with it; what must be the same at every rank, in plain values.

        ``filled``: the call writes to it.
        """
        self._check_taken(tensor, summing=summing)
        if filled:
            check_fillable(tensor)
        if "dim" in given:
            check_dim(given["dim"])
        return describe(tensor, rank=self.rank_in_group, world_size=self.world_size, **given)

    # -- shared by several methods ---------------------------------------------------------------

    def _gathered(self, tensor: Tensor, dim: int, lengths: Sequence[int], deadline: Deadline) -> Tensor:
        work = plain(tensor)
        before, after = work.shape[:dim], work.shape[dim + 1 :]
        whole, parts = in_one(work, [(*before, length, *after) for length in lengths])
        self._all_gather(parts, work, deadline)
        if is_outermost(work.shape, dim):
            return whole.view(*before, sum(lengths), *after)
        return joined(parts, dim)

    def _scattered(self, tensor: Tensor, dim: int, lengths: Sequence[int], deadline: Deadline) -> Tensor:
        if is_outermost(tensor.shape, dim):
            parts = list(plain(tensor).split(list(lengths), dim))
        else:
            cut = tensor.detach().split(list(lengths), dim)
            _, parts = in_one(tensor, [part.shape for part in cut])
            for part, original in zip(parts, cut, strict=True):
                part.copy_(original)
        output = empty(tensor, parts[self.rank_in_group].shape)
        self._reduce_scatter(output, parts, deadline)
        return output
