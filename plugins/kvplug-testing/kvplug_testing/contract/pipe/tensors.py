"""Messages arrive unchanged (law PIPE-1): every dtype, every shape, any strides, any size, ``None``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
import pytest

from kvplug import UnsupportedError
from kvplug.kit import DTYPES, MAX_DIMS
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same, difference
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import dtypes, tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, received, sent
from kvplug_testing.waits import Call, raises

SHAPES: Final = [(), (0,), (3, 0, 2), (1,), (7,), (3, 5), (2, 3, 4)]
SIZES: Final = [1, 15, 4095, 4096, 4097, 65_535, 65_536, 65_537, MIB - 1, MIB, MIB + 1, 3 * MIB + 5]
"""Bytes, around typical sizes of buffers and pages."""
SPARSE_BYTES: Final = (4 << 30) + 12_345
DEVICES: Final = ("cpu", "cuda")
"""Devices with a separate test; all others share one."""


def _matrix() -> Any:
    return tensor_of("float32", (40, 30))


STRIDED: Final[dict[str, Callable[[Any], Any]]] = {
    # Functions of torch that make tensors whose elements are not contiguous, or in another order.
    "transposed": lambda torch: _matrix().t(),
    "strided": lambda torch: _matrix()[::2, 1::3],
    "sliced at an offset": lambda torch: _matrix()[3:7],
    "a column": lambda torch: _matrix()[:, 4],
    "expanded": lambda torch: _matrix()[0].expand(50, 30),
    "expanded from one element": lambda torch: _matrix()[5, 5].expand(6, 4, 2),
    "permuted": lambda torch: tensor_of("bfloat16", (2, 3, 4, 5)).permute(3, 1, 0, 2),
    "with channels last": lambda torch: tensor_of("float16", (2, 3, 4, 5)).to(
        memory_format=torch.channels_last
    ),
    "conjugated": lambda torch: tensor_of("complex64", (4, 9)).conj(),
    "conjugated and transposed": lambda torch: tensor_of("complex64", (4, 9)).conj().t(),
    "negated": lambda torch: tensor_of("complex64", (4, 9)).conj().imag,
    "the imaginary part": lambda torch: tensor_of("complex64", (4, 9)).imag,
    "of float8, transposed": lambda torch: tensor_of("float8_e4m3fn", (6, 7)).t(),
    "a parameter": lambda torch: torch.nn.Parameter(_matrix()),
}


class Tensors(PipeSuite):
    """One message at a time."""

    @property
    def max_dims(self) -> int:
        """The limit that the transport claims, or that of the wire format."""
        claimed = None if self.spec is None else self.spec.capabilities.max_dims
        return MAX_DIMS if claimed is None else min(MAX_DIMS, claimed)

    @law("PIPE-1")
    @pytest.mark.parametrize("dtype", list(DTYPES))
    def test_a_tensor_of_each_dtype_arrives_with_its_bits(self, dtype: str) -> None:
        if dtype not in dtypes():
            pytest.skip(f"torch has no {dtype} here")
        one, other = self.pair()
        for shape in SHAPES:
            message = tensor_of(dtype, shape)
            transfer = sent(one, message)
            assert_same(message, received(other))
            transfer.wait(waits.patience_s)

    @law("PIPE-1", "PIPE-5")
    @pytest.mark.parametrize("device", [*DEVICES, "any other"])
    def test_a_tensor_of_each_claimed_device_arrives_with_its_bits(self, device: str) -> None:
        claimed = [name for name in self.devices if device == (name if name in DEVICES else "any other")]
        if not claimed:
            pytest.skip(f"{self.called} claims devices {', '.join(self.devices)}, not {device}")
        for name in claimed:
            self._passes_on(name)

    def _passes_on(self, device: str) -> None:
        import torch

        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError) as e:  # torch raises either
            pytest.skip(f"torch has no device {device} here: {str(e).partition('.')[0]}")
        one, other = self.pair_of(self.make_endpoint(attrs.evolve(self.context(), device=device)))
        message = _matrix().to(device)
        for out in (None, torch.zeros_like(message)):
            transfer = sent(one, message)
            got = received(other, out)
            assert out is None or got is out, "something else than out was returned"
            assert_same(message.cpu(), got.cpu())
            transfer.wait(waits.patience_s)

    @law("PIPE-1")
    @pytest.mark.parametrize("kind", list(STRIDED))
    def test_a_tensor_arrives_as_it_reads_however_it_lies_in_memory(self, kind: str) -> None:
        import torch

        one, other = self.pair()
        message = STRIDED[kind](torch)
        transfer = sent(one, message)
        assert_same(message.detach(), received(other))
        transfer.wait(waits.patience_s)

    @law("PIPE-1")
    def test_messages_of_any_size_arrive_whole_both_ways(self) -> None:
        pair = self.pair()
        for sender, receiver in (pair, pair[::-1]):
            for size in SIZES:
                message = tensor_of("uint8", (size,), seed=size)
                sending = Call(lambda sender=sender, message=message: sender.send_tensor(message))  # type: ignore[misc]
                assert_same(message, received(receiver))
                sending.result().wait(waits.patience_s)

    @law("PIPE-1")
    def test_a_message_larger_than_any_internal_buffer_arrives_whole(self) -> None:
        one, other = self.pair()
        message = tensor_of("uint8", (32 * MIB + 3,))
        sending = Call(lambda: one.send_tensor(message))
        assert_same(message, received(other))
        sending.result().wait(waits.patience_s)

    @law("PIPE-1")
    def test_what_was_received_stays_as_it_is_when_more_arrives(self) -> None:
        one, other = self.pair()
        messages = [tensor_of("int64", (100,), seed=number) for number in range(8)]
        kept = []
        for message in messages:
            sent(one, message)
            kept.append(received(other))
        for number, (message, got) in enumerate(zip(messages, kept, strict=True)):
            changed = difference(message, got)
            assert not changed, f"message {number}, looked at after 8 were received: {changed}"
        kept[0].zero_()
        assert_same(messages[1], kept[1], "two received tensors share memory")
        assert_same(tensor_of("int64", (100,), seed=0), messages[0], "it is the sender's memory")

    @law("PIPE-1")
    def test_tensors_of_as_many_dimensions_as_are_claimed_arrive(self) -> None:
        one, other = self.pair()
        for ndim in sorted({4, 5, 8, 9, 16, self.max_dims}):
            if ndim <= self.max_dims:
                message = tensor_of("int16", (*[1] * (ndim - 2), 3, 2))
                sent(one, message)
                assert_same(message, received(other))

    @law("PIPE-1", "PIPE-2")
    def test_a_tensor_of_too_many_dimensions_is_refused_and_nothing_is_queued(self) -> None:
        import torch

        self._is_refused(torch.zeros([1] * (self.max_dims + 1)))

    @law("PIPE-1", "PIPE-2")
    @pytest.mark.parametrize("kind", ["sparse", "on no device", "quantized", "nested", "no tensor"])
    @pytest.mark.filterwarnings("ignore")  # torch deprecates some of them
    def test_what_is_not_carried_is_refused_and_nothing_is_queued(self, kind: str) -> None:
        import torch

        make: dict[str, Callable[[], Any]] = {
            "sparse": lambda: torch.eye(3).to_sparse(),
            "on no device": lambda: torch.empty(3, device="meta"),
            "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
            "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "no tensor": lambda: b"bytes",
        }
        self._is_refused(make[kind]())

    def _is_refused(self, tensor: Any) -> None:
        one, other = self.pair()
        before, after = tensor_of("int32", (2,)), tensor_of("int32", (3,))
        sent(one, before)
        raises(UnsupportedError, lambda: one.send_tensor(tensor, timeout=waits.patience_s))
        sent(one, after)
        for message in (before, after):
            changed = difference(message, received(other))
            assert not changed, f"a refused tensor left something in the stream: {changed}"

    @law("PIPE-1", level="long", timeout_s=900.0)
    def test_more_than_four_gibibytes_arrive_from_one_mapped_file_in_another(self, tmp_path: Path) -> None:
        import torch

        _skip_without_room(tmp_path)
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
        assert [int(target[at]) for at in marks] == [*range(1, len(marks) + 1)]


def _skip_without_room(folder: Path) -> None:
    """Skip without space for the target file; a transport without ``receive_into`` also holds the whole
    message.
    """
    free = shutil.disk_usage(folder).free
    if free < 2 * SPARSE_BYTES:
        pytest.skip(f"{folder} has {free >> 20} MiB left, and {2 * SPARSE_BYTES >> 20} are needed")
    available = _available_memory()
    if available < 3 * SPARSE_BYTES:
        pytest.skip(f"{available >> 20} MiB of memory are available; {3 * SPARSE_BYTES >> 20} may be needed")


def _available_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")), 0)
