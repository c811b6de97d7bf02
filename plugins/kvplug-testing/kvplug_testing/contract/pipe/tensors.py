"""Messages arrive unchanged (law PIPE-1), also in memory of the caller (law PIPE-5)."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
import pytest

from kvplug import CapacityError, UnsupportedError
from kvplug.kit import MAX_DIMS
from kvplug.transport import Pipe, TensorMismatchError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import dtypes, tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, received, sent
from kvplug_testing.waits import Call, raises

SHAPES: Final = [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 4)]
SIZES: Final = [1, 15, 4095, 4096, 4097, 65_535, 65_536, 65_537, MIB - 1, MIB, MIB + 1, 32 * MIB + 3]
"""Bytes, around typical sizes of buffers and pages, and more than any buffer holds."""
SPARSE_BYTES: Final = (4 << 30) + 12_345
_PEAK: Final = Path("/proc/self/clear_refs")
_MISFITS: Final[list[tuple[tuple[str, tuple[int, ...]] | None, tuple[str, tuple[int, ...]]]]] = [
    # message, out: (dtype, shape)
    (("float32", (6, 4)), ("float32", (4, 6))),
    (("float32", (6, 4)), ("int32", (6, 4))),
    (("float32", (6, 4)), ("float64", (6, 4))),
    (("bfloat16", (8,)), ("float16", (8,))),
    (("int16", (8,)), ("uint8", (16,))),
    (("int64", (1,)), ("int64", ())),
    (("float32", (0, 3)), ("float32", (3, 0))),
    (("uint8", (8 * MIB + 1,)), ("uint8", (8 * MIB,))),
    (None, ("float32", (0,))),
]


def _out(dtype: str, shape: tuple[int, ...]) -> Any:
    """Memory filled with a pattern that no message contains."""
    return tensor_of(dtype, shape, seed=99)


class Tensors(PipeSuite):
    """One message at a time."""

    @law("PIPE-1", "PIPE-5")
    def test_a_tensor_of_each_dtype_arrives_with_its_bits(self) -> None:
        one, other = self.pair()
        for dtype, shape in itertools.product(dtypes(), SHAPES):
            message = tensor_of(dtype, shape)
            turned = _out(dtype, shape[::-1]).permute([*reversed(range(len(shape)))])
            for out in (None, _out(dtype, shape), turned):
                _passes(one, other, message, out)

    @law("PIPE-1", "PIPE-5")
    def test_a_tensor_of_each_claimed_device_arrives_with_its_bits(self) -> None:
        import torch

        for device in self.devices:
            try:
                torch.empty(0, device=device)
            except (AssertionError, RuntimeError) as e:  # torch raises either
                pytest.skip(f"torch has no device {device} here: {str(e).partition('.')[0]}")
            one, other = self.pair_of(self.make_endpoint(attrs.evolve(self.context(), device=device)))
            message = tensor_of("float32", (40, 30)).to(device)
            for out in (None, torch.zeros_like(message)):
                _passes(one, other, message, out)

    @law("PIPE-1")
    def test_a_tensor_arrives_as_it_reads_however_it_lies_in_memory(self) -> None:
        import torch

        one, other = self.pair()
        matrix, numbers = tensor_of("float32", (40, 30)), tensor_of("complex64", (4, 9))
        for message in (
            matrix.t(),
            matrix[::2, 1::3],
            matrix[3:7],
            matrix[0].expand(50, 30),
            tensor_of("bfloat16", (2, 3, 4, 5)).permute(3, 1, 0, 2),
            tensor_of("float8_e4m3fn", (6, 7)).t(),
            numbers.conj(),
            numbers.conj().t(),
            numbers.conj().imag,
            torch.nn.Parameter(matrix),
            tensor_of("int16", (*[1] * (self.max_dims - 2), 3, 2)),
        ):
            _passes(one, other, message)

    @law("PIPE-1")
    def test_messages_of_any_size_arrive_whole_both_ways(self) -> None:
        pair = self.pair()
        for sender, receiver in (pair, pair[::-1]):
            for size in SIZES:
                _passes(sender, receiver, tensor_of("uint8", (size,), seed=size))

    @property
    def max_dims(self) -> int:
        """The limit that the transport claims, or that of the wire format."""
        claimed = None if self.spec is None else self.spec.capabilities.max_dims
        return MAX_DIMS if claimed is None else min(MAX_DIMS, claimed)

    @law("PIPE-1", "PIPE-2")
    def test_what_is_not_carried_is_refused_and_nothing_is_queued(self) -> None:
        import torch

        one, other = self.pair()
        message = tensor_of("int32", (2,))
        dims = [1] * (self.max_dims + 1)
        for refused in (torch.zeros(dims), torch.eye(3).to_sparse(), torch.empty(3, device="meta"), b"bytes"):
            raises(UnsupportedError, lambda each=refused: one.send_tensor(each, timeout=waits.patience_s))  # type: ignore[misc]
            _passes(one, other, message)

    @law("PIPE-1", needs="proc", level="long", timeout_s=900.0)
    def test_more_than_four_gibibytes_arrive_from_one_mapped_file_in_another(self, tmp_path: Path) -> None:
        import torch

        free = min(shutil.disk_usage(tmp_path).free, _kilobytes("meminfo", "MemAvailable") << 10)
        if free < 3 * SPARSE_BYTES:
            pytest.skip(f"{free >> 20} MiB are free, and {3 * SPARSE_BYTES >> 20} may be needed")
        one, other = self.pair()
        source, target = (
            torch.from_file(str(tmp_path / name), shared=True, size=SPARSE_BYTES, dtype=torch.uint8)
            for name in ("source", "target")
        )
        marks = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, SPARSE_BYTES - 1]  # counters overflow here
        for value, at in enumerate(marks, 1):
            source[at] = value
        sending = Call(lambda: one.send_tensor(source))
        assert Call(lambda: other.recv_tensor(target, timeout=800)).result(810) is target
        sending.result(60).wait(60)
        for start in range(0, SPARSE_BYTES, 64 * MIB):
            part = slice(start, start + 64 * MIB)
            assert_same(source[part], target[part], f"in the 64 MiB from {start} on")

    # -- memory of the caller ------------------------------------------------------------------

    @law("PIPE-5")
    def test_out_that_is_not_contiguous_is_filled_and_nothing_around_it(self) -> None:
        import torch

        one, other = self.pair()
        parts: list[Callable[[Any], Any]] = [
            lambda whole: whole.t(),
            lambda whole: whole[1::2, ::3],
            lambda whole: whole[2:5].conj(),
        ]
        for out_of in parts:
            around = torch.full((12, 10), -0.5 - 0.5j)
            for memory in (around, torch.view_as_real(around)[..., 0], around.conj().imag):
                out = out_of(memory)
                before, inside = torch.view_as_real(around).clone(), out.clone()
                message = torch.arange(out.numel()).view(out.shape).to(out.dtype)
                sent(one, message)
                assert received(other, out) is out, "something else than out was returned"
                assert_same(message.tolist(), out.tolist(), "out does not hold the message")
                out.copy_(inside)
                assert_same(before, torch.view_as_real(around), "memory beside out was written")

    @property
    def received_in_place(self) -> str:
        """The reason to skip a test, for ``needs``."""
        claimed = self.spec is not None and self.spec.capabilities.receive_into
        return self.proc if claimed else f"{self.called} does not claim receive_into"

    @property
    def proc(self) -> str:
        """The reason to skip a test, for ``needs``."""
        return "" if _PEAK.exists() else "this needs Linux's /proc"

    @law("PIPE-5", needs="received_in_place")
    def test_a_large_message_is_received_into_out_without_another_tensor(self) -> None:
        import torch

        one, other = self.pair()
        message, out = torch.ones(64 * MIB, dtype=torch.uint8), torch.zeros(64 * MIB, dtype=torch.uint8)
        transfer = sent(one, message)
        _PEAK.write_text("5")  # reset the peak
        before = _kilobytes("self/status", "VmRSS")
        received(other, out)
        more = (_kilobytes("self/status", "VmHWM") - before) << 10
        assert_same(message, out)
        transfer.wait(waits.patience_s)
        assert more < message.nbytes // 2, f"{more >> 20} MiB more were used for a message of 64 MiB"

    @law("PIPE-5")
    def test_a_message_that_does_not_fit_out_is_refused_and_stays(self) -> None:
        one, other = self.pair()
        following = tensor_of("int32", (5,))
        for offered, wanted in _MISFITS:
            message, misfit = None if offered is None else tensor_of(*offered), _out(*wanted)
            before = misfit.clone()
            for out in (None, None if offered is None else _out(*offered)):
                sending = Call(lambda m=message: (one.send_tensor(m), one.send_tensor(following)))  # type: ignore[misc]
                for _ in range(2):
                    raises(TensorMismatchError, lambda m=misfit: other.recv_tensor(m))  # type: ignore[misc]
                    assert_same(before, misfit, "memory was written although the message was refused")
                assert_same(message, received(other, out), "the refused message did not stay as it was")
                assert_same(following, received(other), "the message after the refused one is another")
                for transfer in sending.result():
                    transfer.wait(waits.patience_s)

    @law("ALL-10")
    def test_a_message_beyond_the_limit_is_refused_before_memory_is_taken_and_stays(self) -> None:
        one, other = self.pair_of(self.make_endpoint(self.context(max_message_bytes=1000)))
        large, small = tensor_of("uint8", (1001,)), tensor_of("uint8", (1000,))
        for message in (large, large, small):
            sent(one, message)
        for _ in range(2):
            for _ in range(2):
                raises(CapacityError, lambda: other.recv_tensor(timeout=waits.patience_s))
            got = received(other, _out("uint8", (1001,)))
            assert_same(large, got, "it was not received into memory of the caller's")
        assert_same(small, received(other))


def _passes(sender: Pipe, receiver: Pipe, message: Any, out: Any = None) -> None:
    """The message arrives, in ``out`` if there is one, and its transfer ends."""
    sending = Call(lambda: sender.send_tensor(message))
    got = received(receiver, out)
    assert out is None or got is out, "something else than out was returned"
    assert_same(message.detach().cpu(), None if got is None else got.cpu())
    sending.result().wait(waits.patience_s)


def _kilobytes(file: str, name: str) -> int:
    """A value from Linux's /proc, in kB."""
    lines = Path("/proc", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
