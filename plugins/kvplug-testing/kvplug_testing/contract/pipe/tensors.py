"""Messages arrive unchanged (law PIPE-1), also in memory of the caller (law PIPE-5)."""

from __future__ import annotations

import itertools
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from kvplug import CapacityError, UnsupportedError
from kvplug.kit import MAX_DIMS
from kvplug.transport import TensorMismatchError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import dtypes, tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, passes, received, sent
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
            before, around = (_out(dtype, (2, *shape[::-1], 2)) for _ in range(2))
            turned = around[1, ..., 0].permute([*reversed(range(len(shape)))])
            for out in (None, _out(dtype, shape), turned):
                passes(one, other, tensor_of(dtype, shape), out)
            beside = [around[0], around[..., 1]]
            assert_same([before[0], before[..., 1]], beside, "memory beside out was written")

    @law("PIPE-1", "PIPE-5")
    def test_a_tensor_of_each_claimed_device_arrives_with_its_bits(self) -> None:
        import torch

        for device in self.devices:
            try:
                torch.empty(0, device=device)
            except (AssertionError, RuntimeError) as e:  # torch raises either
                pytest.skip(f"torch has no device {device} here: {str(e).partition('.')[0]}")
            one, other = self.pair(device=device)
            message = tensor_of("float32", (40, 30)).to(device)
            for out in (None, torch.zeros_like(message)):
                passes(one, other, message, out)

    @law("PIPE-1")
    def test_a_tensor_arrives_as_it_reads_however_it_lies_in_memory(self) -> None:
        import torch

        pair = self.pair()
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
            *(tensor_of("uint8", (size,), seed=size) for size in SIZES),
        ):
            passes(*pair, message)
            passes(*pair[::-1], message)
        for out in (numbers.clone().conj(), numbers.clone().conj().imag):
            passes(*pair, torch.arange(36).view(4, 9).to(out.dtype), out)

    @property
    def max_dims(self) -> int:
        """The limit that the transport claims, or that of the wire format."""
        claimed = None if self.spec is None else self.spec.capabilities.max_dims
        return MAX_DIMS if claimed is None else min(MAX_DIMS, claimed)

    @law("PIPE-1", "PIPE-2")
    def test_what_is_not_carried_is_refused_and_nothing_is_queued(self) -> None:
        import torch

        one, other = self.pair()
        dims = [1] * (self.max_dims + 1)
        for refused in (torch.zeros(dims), torch.eye(3).to_sparse(), torch.empty(3, device="meta"), b"bytes"):
            raises(UnsupportedError, partial(one.send_tensor, refused, timeout=waits.patience_s))
            passes(one, other, tensor_of("int32", (2,)))

    @law("PIPE-1", level="long", timeout_s=900.0)
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
        source[marks] = torch.arange(1, len(marks) + 1, dtype=torch.uint8)
        sending = Call(lambda: one.send_tensor(source))
        assert Call(lambda: other.recv_tensor(target, timeout=800)).result(810) is target
        sending.result(60).wait(60)
        assert torch.equal(source, target), "other bytes came"

    # -- memory of the caller ------------------------------------------------------------------

    @law("PIPE-5")
    def test_a_large_message_is_received_into_out_without_another_tensor(self) -> None:
        import torch

        if self.spec is None or not self.spec.capabilities.receive_into:
            pytest.skip(f"{self.called} does not claim receive_into")
        if not _PEAK.exists():
            pytest.skip("this needs Linux's /proc")
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
        for offered, wanted in _MISFITS:
            message, misfit = None if offered is None else tensor_of(*offered), _out(*wanted)
            for out in (None, None if offered is None else _out(*offered)):
                sending = Call(partial(one.send_tensor, message))
                for _ in range(2):
                    raises(TensorMismatchError, partial(other.recv_tensor, misfit))
                    assert_same(_out(*wanted), misfit, "memory was written although the message was refused")
                assert_same(message, received(other, out), "the refused message did not stay as it was")
                sending.result().wait(waits.patience_s)
                passes(one, other, tensor_of("int32", (5,)))


def _kilobytes(file: str, name: str) -> int:
    """A value from Linux's /proc, in kB."""
    lines = Path("/proc", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
