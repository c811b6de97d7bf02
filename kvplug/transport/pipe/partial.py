"""The message that a pipe is receiving: its meta, and the bytes that have arrived so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar

from kvplug.errors import KvplugError, TensorMismatchError, TimeoutError, UnsupportedError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.memory.room import MessageLimit
from kvplug.net.wire.tensors import (
    TensorMeta,
    copy_into,
    dtype_name,
    empty_like_meta,
    is_dense,
    memory_of,
    memory_of_writable,
    meta_of,
)

if TYPE_CHECKING:
    from torch import Tensor


class PartialMessage:
    """A message whose announcement, and perhaps some of its bytes, have been received.

    If a receive call runs out of time, the next call resumes the message.
    """

    INTERRUPTED: ClassVar = "interrupted in the middle of a message"
    """The reason given when Ctrl-C strikes between a copy and its accounting: the position in the stream is
    lost, so the pipe fails."""

    __slots__ = ("got", "meta", "nbytes", "own")

    def __init__(self, meta: TensorMeta | None) -> None:
        """``meta`` describes the tensor. It is ``None`` if the message is ``None``, which has no bytes."""
        self.meta = meta
        """Describes the tensor; ``None`` for a message that is ``None``."""
        self.nbytes = 0 if meta is None else meta.nbytes
        """Bytes of the whole message."""
        self.got = 0
        """How many bytes have arrived."""
        self.own: Tensor | None = None
        """The pipe's own tensor, which keeps the bytes that have arrived for the next call."""

    def late(self, peer: str) -> TimeoutError:
        """Return the error for a call whose deadline passed in the middle of the message."""
        return TimeoutError(
            f"{self.got} of {self.nbytes} bytes of a tensor have arrived from {peer};"
            " the next call resumes it"
        )

    def check_out(self, out: Tensor | None) -> None:
        """Check that the message can be received into ``out``; ``None`` stands for new memory.

        Raises:
            TensorMismatchError: ``out`` does not fit the message, which remains unreceived.
            UnsupportedError: ``out`` is not a dense tensor in CPU memory.
        """
        if out is None:
            return
        if self.meta is None:
            raise TensorMismatchError("the next message is None, but out= was given; the message stays")
        import torch

        if not isinstance(out, torch.Tensor):
            raise UnsupportedError(f"out= must be a tensor, not {type(out).__name__}")
        if not out.is_cpu or out.layout is not torch.strided:
            raise UnsupportedError(f"out= must be a dense CPU tensor, not {out.device} {out.layout}")
        if dtype_name(out.dtype) != self.meta.dtype or out.shape != self.meta.shape:
            raise meta_of(out).mismatch(self.meta, "out= is")

    def receive(
        self,
        out: Tensor | None,
        *,
        allocate: Callable[[TensorMeta], Tensor] = empty_like_meta,
        fill: Callable[[Tensor], bool],
        fail: Callable[[str], object],
        peer: str,
        limit: MessageLimit | None = None,
    ) -> Tensor:
        """Receive the rest of a tensor in CPU memory, into ``out`` or into memory that the pipe allocates.

        Args:
            out: A tensor that :meth:`check_out` has accepted, or ``None``.
            allocate: Allocates memory. Default: from the process's memory. If it raises, the message stays.
            fill: Receives the remaining bytes into a contiguous tensor that already holds the first ``got``
                bytes, and updates ``got``. Returns False at the deadline.
            fail: Breaks the pipe: the position in the stream is lost.
            peer: Names the peer in errors.
            limit: Limits the messages that the pipe allocates memory for; ``None``: only this process's
                available memory limits them.

        Raises:
            CapacityError: the message is larger than the pipe may allocate, and stays.
            TimeoutError: not all bytes have arrived; the next call resumes the message.
            TensorMismatchError: ``out`` cannot be written; the message stays.
            ResourceExhaustedError: there is no memory to copy the message into ``out``; the message stays.
            KvplugError: ``allocate`` or ``fill`` raised it.
        """
        assert self.meta is not None
        tensor = out if self.own is None and out is not None and is_dense(out) else self.own
        if tensor is None:
            (limit or MessageLimit()).check(self.nbytes, peer)
            tensor = allocate(self.meta)
        try:
            if not fill(tensor):
                # Keep the bytes that have arrived before raising: the next call returns them.
                if tensor is out:
                    self._keep(tensor, allocate, fail)
                elif self.got:
                    self.own = tensor
                raise self.late(peer)
        except KvplugError:
            raise
        except BaseException as e:
            fail(str(NamedExhaustion.of(e, "receiving a message") or self.INTERRUPTED))
            raise
        if out is None or tensor is out:
            return tensor
        self.own = tensor
        what = "out= cannot be written, and the message stays"
        with NamedExhaustion(what, TensorMismatchError, (RuntimeError,)):
            copy_into(out, memory_of(tensor))
        return out

    def allocate_own(self, allocate: Callable[[TensorMeta], Tensor], fail: Callable[[str], object]) -> Tensor:
        """Allocate memory for the bytes that have arrived. Fail the pipe and raise if that is impossible."""
        assert self.meta is not None
        try:
            return allocate(self.meta)
        except BaseException:
            fail("there was no memory for the part of a message that had arrived")
            raise

    def arrived(self) -> Iterable[tuple[int, int]]:
        """Return (start, stop) of each range of bytes that has arrived."""
        return ((0, self.got),)

    def _keep(
        self, out: Tensor, allocate: Callable[[TensorMeta], Tensor], fail: Callable[[str], object]
    ) -> None:
        """Copy the bytes that have arrived out of ``out``, since the caller may use it again from now on."""
        if not self.got:
            return
        own = self.allocate_own(allocate, fail)
        mine, theirs = memory_of_writable(own), memory_of(out)
        for start, stop in self.arrived():
            mine[start:stop] = theirs[start:stop]
        self.own = own
