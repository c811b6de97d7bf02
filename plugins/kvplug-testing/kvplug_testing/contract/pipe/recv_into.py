"""Receiving into memory of the caller (law PIPE-5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from kvplug import UnsupportedError
from kvplug.kit import DTYPES
from kvplug.transport import TensorMismatchError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import dtypes, tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, received, sent
from kvplug_testing.waits import Call

_PEAK: Final = Path("/proc/self/clear_refs")
_MISFITS: Final[dict[str, tuple[tuple[str, tuple[int, ...]] | None, tuple[str, tuple[int, ...]]]]] = {
    # message, out: (dtype, shape)
    "another shape": (("float32", (6, 4)), ("float32", (4, 6))),
    "another number of elements": (("float32", (6, 4)), ("float32", (6, 5))),
    "more dimensions": (("float32", (6,)), ("float32", (6, 1))),
    "a dimension for a scalar": (("float32", ()), ("float32", (1,))),
    "a scalar for a dimension": (("int64", (1,)), ("int64", ())),
    "another empty shape": (("float32", (0, 3)), ("float32", (3, 0))),
    "something for nothing": (("float32", (0,)), ("float32", (1,))),
    "another dtype of that size": (("float32", (6, 4)), ("int32", (6, 4))),
    "another float of that size": (("bfloat16", (8,)), ("float16", (8,))),
    "a wider dtype": (("float32", (6, 4)), ("float64", (6, 4))),
    "bytes of as many": (("int16", (8,)), ("uint8", (16,))),
    "a large one": (("uint8", (8 * MIB + 1,)), ("uint8", (8 * MIB,))),
    "None for a scalar": (None, ("float32", ())),
    "None for nothing": (None, ("float32", (0,))),
}


def _out(dtype: str, shape: tuple[int, ...]) -> Any:
    """Memory filled with a pattern that no message contains."""
    return tensor_of(dtype, shape, seed=99)


class RecvInto(PipeSuite):
    """``recv_tensor(out=...)``."""

    @law("PIPE-5")
    @pytest.mark.parametrize("dtype", list(DTYPES))
    def test_out_of_each_dtype_is_filled_contiguous_or_not(self, dtype: str) -> None:
        if dtype not in dtypes():
            pytest.skip(f"torch has no {dtype} here")
        one, other = self.pair()
        for shape in ((), (0,), (3, 0, 2), (7,), (2, 3, 4), (4, 6)):
            message = tensor_of(dtype, shape)
            for out in (_out(dtype, shape), _out(dtype, shape[::-1]).permute([*reversed(range(len(shape)))])):
                sent(one, message)
                assert received(other, out) is out, "something else than out was returned"
                assert_same(message, out)

    @law("PIPE-5")
    @pytest.mark.parametrize("kind", ["transposed", "every other", "a column", "conjugated", "negated"])
    def test_out_that_is_not_contiguous_is_filled_and_nothing_around_it(self, kind: str) -> None:
        import torch

        one, other = self.pair()
        whole = torch.full((12, 10), -0.5)
        numbers = torch.full((12, 10), -0.5 - 0.5j)
        out = {
            "transposed": lambda: whole.t(),
            "every other": lambda: whole[1::2, ::3],
            "a column": lambda: whole[:, 4],
            "conjugated": lambda: numbers[2:5].conj(),
            "negated": lambda: numbers[2:5].conj().imag,
        }[kind]()
        message = torch.arange(out.numel()).view(out.shape).to(out.dtype)
        sent(one, message)
        assert received(other, out) is out, "something else than out was returned"
        assert_same(message.tolist(), out.tolist(), "out does not hold the message")
        untouched = int((whole == -0.5).sum()) + int((torch.view_as_real(numbers) == -0.5).sum())
        filled = out.numel() * (2 if out.is_complex() else 1)
        assert untouched == 3 * whole.numel() - filled, "memory beside out was written"

    @law("PIPE-5")
    def test_a_large_message_is_received_into_memory_contiguous_or_not(self) -> None:
        import torch

        one, other = self.pair()
        message = tensor_of("float32", (1500, 2001))
        for out in (torch.zeros(1500, 2001), torch.zeros(2001, 1500).t(), torch.zeros(3000, 2001)[::2]):
            sending = Call(lambda: one.send_tensor(message))
            assert received(other, out) is out
            assert_same(message, out)
            sending.result().wait(waits.patience_s)

    @property
    def received_in_place(self) -> str:
        """The reason to skip a test, for ``needs``."""
        if self.spec is None or not self.spec.capabilities.receive_into:
            return f"{self.called} does not claim receive_into"
        return "" if _PEAK.exists() else "this system does not tell how much memory was used at most"

    @law("PIPE-5", needs="received_in_place")
    def test_a_large_message_is_received_into_out_without_another_tensor(self) -> None:
        import torch

        one, other = self.pair()
        message, out = torch.ones(64 * MIB, dtype=torch.uint8), torch.zeros(64 * MIB, dtype=torch.uint8)
        transfer = sent(one, message)
        _PEAK.write_text("5")  # reset the peak
        before = _kilobytes("VmRSS")
        received(other, out)
        more = (_kilobytes("VmHWM") - before) << 10
        assert_same(message, out)
        transfer.wait(waits.patience_s)
        assert more < message.nbytes // 2, f"{more >> 20} MiB more were used for a message of 64 MiB"

    @law("PIPE-5")
    @pytest.mark.parametrize("kind", list(_MISFITS))
    def test_a_message_that_does_not_fit_out_is_refused_and_stays(self, kind: str) -> None:
        offered, wanted = _MISFITS[kind]
        one, other = self.pair()
        message, misfit = None if offered is None else tensor_of(*offered), _out(*wanted)
        following, before = tensor_of("int32", (5,)), misfit.clone()
        for out in (None, None if offered is None else _out(*offered)):
            sending = Call(lambda: (one.send_tensor(message), one.send_tensor(following)))
            for _ in range(3):
                error = _refusal(other, misfit)
                assert isinstance(error, TensorMismatchError), f"TensorMismatchError was expected: {error!r}"
                assert_same(before, misfit, "memory was written although the message was refused")
            assert_same(message, received(other, out), "the refused message did not stay as it was")
            assert_same(following, received(other), "the message after the refused one is another")
            for transfer in sending.result():
                transfer.wait(waits.patience_s)

    @law("PIPE-5")
    def test_out_that_is_no_dense_tensor_is_refused_and_the_message_stays(self) -> None:
        import torch

        one, other = self.pair()
        message = tensor_of("float32", (3, 3))
        sent(one, message)
        for out in (torch.eye(3).to_sparse(), torch.empty(3, 3, device="meta")):
            error = _refusal(other, out)
            assert isinstance(error, TensorMismatchError | UnsupportedError), f"{error!r} for {out.layout}"
        assert_same(message, received(other))


def _kilobytes(name: str) -> int:
    """A value of this process's memory from /proc, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _refusal(pipe: Any, out: Any) -> BaseException | None:
    """The error that receiving into ``out`` raises."""
    within = waits.patience_s
    return Call(lambda: pipe.recv_tensor(out, timeout=within)).end(within + 1).error
