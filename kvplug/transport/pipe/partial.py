"""The message that a pipe receives: its meta, and the part that waits for the next call."""

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
    """A message whose announcement has been read, and maybe a part of its bytes.

    A receive call that runs out of time leaves it, and the next call resumes it.
    """

    INTERRUPTED: ClassVar = "interrupted in the middle of a message"
    """Why a pipe fails after Ctrl-C between a copy and its accounting: the stream's position is lost."""

    __slots__ = ("got", "meta", "nbytes", "own")

    def __init__(self, meta: TensorMeta | None) -> None:
        """``meta``: what the tensor is; ``None``: the message is ``None``, and has no bytes."""
        self.meta = meta
        """What the tensor is; ``None`` for a message that is ``None``."""
        self.nbytes = 0 if meta is None else meta.nbytes
        """Bytes of the whole message."""
        self.got = 0
        """How many bytes have arrived."""
        self.own: Tensor | None = None
        """A tensor of the pipe's, in which the part that has arrived waits for the next call."""

    def late(self, peer: str) -> TimeoutError:
        """The error of a call whose deadline passed in the middle of the message."""
        return TimeoutError(
            f"{self.got} of {self.nbytes} bytes of a tensor have arrived from {peer};"
            " the next call goes on with it"
        )

    def check_out(self, out: Tensor | None) -> None:
        """Whether it can be received into ``out``, a CPU tensor; ``None``: into new memory.

        Raises:
            TensorMismatchError: not this message, which stays.
            UnsupportedError: ``out`` is no dense tensor in CPU memory.
        """
        if out is None:
            return
        if self.meta is None:
            raise TensorMismatchError("the next message is None, and out= was given; it stays")
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
        """Receive a tensor in CPU memory: what is left of it, into ``out`` or memory of the pipe's.

        Args:
            out: What :meth:`check_out` has let pass.
            allocate: New memory. Default: any of the process. If it raises the message stays.
            fill: Receive what is left into a contiguous tensor whose first ``got`` bytes are there already,
                and count ``got``; False at the deadline.
            fail: The stream's position is lost: break the pipe.
            peer: For the error.
            limit: The pipe's, of messages that it takes memory for; ``None``: what this process can have.

        Raises:
            CapacityError: the message is too large for memory of the pipe's, and stays.
            TimeoutError: not all has arrived; the next call goes on with it.
            TensorMismatchError: ``out`` cannot be written; the message stays.
            ResourceExhaustedError: there is no memory to copy it into ``out``; the message stays.
            KvplugError: what ``allocate`` and ``fill`` raise.
        """
        assert self.meta is not None
        tensor = out if self.own is None and out is not None and is_dense(out) else self.own
        if tensor is None:
            (limit or MessageLimit()).check(self.nbytes, peer)
            tensor = allocate(self.meta)
        try:
            if not fill(tensor):
                # Before anything is raised: what has arrived is part of what the next call returns.
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
        try:
            copy_into(out, memory_of(tensor))
        except RuntimeError as e:
            NamedExhaustion.check(e, "copying a message into out=; it stays")
            raise TensorMismatchError(f"out= cannot be written, and the message stays: {e}") from e
        return out

    def allocate_own(self, allocate: Callable[[TensorMeta], Tensor], fail: Callable[[str], object]) -> Tensor:
        """Memory for the part that has arrived. Where there is none, the pipe fails, and this raises."""
        assert self.meta is not None
        try:
            return allocate(self.meta)
        except BaseException:
            fail("there was no memory for the part of a message that had arrived")
            raise

    def arrived(self) -> Iterable[tuple[int, int]]:
        """(start, stop) of the bytes that are here."""
        return ((0, self.got),)

    def _keep(
        self, out: Tensor, allocate: Callable[[TensorMeta], Tensor], fail: Callable[[str], object]
    ) -> None:
        """Copy what has arrived out of the caller's memory, which is the caller's again now."""
        if not self.got:
            return
        own = self.allocate_own(allocate, fail)
        mine, theirs = memory_of_writable(own), memory_of(out)
        for start, stop in self.arrived():
            mine[start:stop] = theirs[start:stop]
        self.own = own
