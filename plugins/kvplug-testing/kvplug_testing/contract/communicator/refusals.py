"""Refused calls (law COMM-3): refused at every rank, with the reason, and the communicator stays usable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvplug import ConfigError, KvplugError, UnsupportedError
from kvplug.transport import RecvOp, SendOp, TensorMismatchError
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.calls import OtherDevice
from kvplug_testing.contract.communicator.missing import METHODS
from kvplug_testing.contract.communicator.suite import CommunicatorSuite, Ranks, check_raised
from kvplug_testing.contract.communicator.tensors import WORLD, check, each_rank, tensor_of, total


def still_works(ranks: Ranks) -> None:
    """Check that the communicator works after a refusal."""
    given = each_rank("int64", (3,), len(ranks))
    found = ranks.values("all_reduce", [[each] for each in given])
    check(found, [total(given)] * len(ranks), "all_reduce after a call that was refused")


def _f32(*shape: int) -> Any:
    return tensor_of("float32", shape, 1)


_Case = tuple[str, Callable[[], list[Any]], type[KvplugError], Sequence[str]]
_WRONG_EVERYWHERE: dict[str, _Case] = {
    # At every rank: the method, its arguments, the error, and words that its message must contain.
    "no such dimension": (
        "all_gather",
        lambda: [_f32(2, 3), 2],
        TensorMismatchError,
        ["dimension 2", "[2, 3]"],
    ),
    "no such negative one": ("all_gather", lambda: [_f32(2, 3), -3], TensorMismatchError, ["dimension -3"]),
    "without dimensions": ("all_gather", lambda: [_f32()], TensorMismatchError, ["dimension"]),
    "dim=None": ("all_gather", lambda: [_f32(2, 3), None], TensorMismatchError, ["dim=None"]),
    "one size for all": ("all_gatherv", lambda: [_f32(2, 3), 0, 2], TensorMismatchError, ["sizes=2", "3"]),
    "too few sizes": ("all_gatherv", lambda: [_f32(2, 3), 0, [2, 2]], TensorMismatchError, ["[2, 2]", "3"]),
    "other sizes than the tensors'": (
        *("all_gatherv", lambda: [_f32(2, 3), 0, [3, 3, 3]]),
        *(TensorMismatchError, ["[3, 3, 3]", "2 elements"]),
    ),
    "a negative size": ("all_gatherv", lambda: [_f32(2, 3), 0, [-1, 2, 2]], TensorMismatchError, ["-1"]),
    "what cannot be shared": (
        *("reduce_scatter", lambda: [_f32(4), 0]),
        *(TensorMismatchError, ["4 elements", "3 ranks"]),
    ),
    "sizes that do not add up": (
        *("reduce_scatterv", lambda: [_f32(6), 0, [1, 2, 4]]),
        *(TensorMismatchError, ["add up to 7", "6 elements"]),
    ),
    "no such destination": ("gather", lambda: [_f32(2, 3), WORLD], ConfigError, ["dst=3", "0 to 2"]),
    "no such source": ("broadcast", lambda: [_f32(2, 3), -1], ConfigError, ["src=-1", "0 to 2"]),
    "a sum of booleans": ("all_reduce", lambda: [tensor_of("bool", (2, 3), 1)], UnsupportedError, ["bool"]),
    "no tensor": ("all_reduce", lambda: ["a word"], UnsupportedError, ["str"]),
}

_WRONG_TOGETHER: dict[str, tuple[str, Callable[[int], list[Any]]]] = {
    # Calls that are valid alone but do not match each other: the method, and the arguments of a rank.
    "shapes of all_reduce": ("all_reduce", lambda rank: [_f32(2 + rank % 2)]),
    "dtypes of all_reduce": (
        "all_reduce",
        lambda rank: [tensor_of("float64" if rank == 2 else "float32", (4,), rank)],
    ),
    "shapes of all_gather": ("all_gather", lambda rank: [_f32(2, 2 + rank)]),
    "dimensions of all_gather": ("all_gather", lambda rank: [_f32(2, 2), rank % 2]),
    "other dimensions of all_gatherv": ("all_gatherv", lambda rank: [_f32(1, 2 + rank), 0, [1, 1, 1]]),
    "sizes of all_gatherv": ("all_gatherv", lambda rank: [_f32(2), 0, [2, 2, 2 if rank else 3]]),
    "lists of all_gatherv": ("all_gatherv", lambda rank: [[_f32(2)] * (1 + rank % 2), 0]),
    "sizes of reduce_scatterv": (
        "reduce_scatterv",
        lambda rank: [_f32(6), 0, [2, 2, 2] if rank else [1, 2, 3]],
    ),
    "destinations of gather": ("gather", lambda rank: [_f32(2), rank % 2]),
    "sources of broadcast": ("broadcast", lambda rank: [_f32(2), rank % 2]),
    "one rank alone is wrong": ("all_gather", lambda rank: [_f32(2), 5 * (rank == 1)]),
}


class Refusals(CommunicatorSuite):
    """Wrong arguments."""

    @law("COMM-3")
    def test_what_is_wrong_everywhere_is_refused_in_words_and_harms_nothing(self) -> None:
        ranks = self.ranks()
        for case, (method, args, kind, words) in _WRONG_EVERYWHERE.items():
            for outcome in ranks.raised(method, [args()] * WORLD, kind):
                missing = [word for word in words if word not in outcome.text]
                assert not missing, f"{method}, {case}: {', '.join(missing)} is not in {outcome}"
            still_works(ranks)

    @law("COMM-3", needs="compared_calls")
    @pytest.mark.parametrize("case", list(_WRONG_TOGETHER))
    def test_what_does_not_fit_together_is_refused_at_every_rank_and_harms_nothing(self, case: str) -> None:
        method, args_of = _WRONG_TOGETHER[case]
        ranks = self.ranks()
        given = [args_of(rank) for rank in range(WORLD)]
        found = ranks.raised(method, given, TensorMismatchError)
        for outcome in found:
            if method == "all_reduce":
                check([outcome.first], [given[outcome.rank][0]], "the input of a refused all_reduce")
        assert any("rank 0" in outcome.text and "rank 2" in outcome.text for outcome in found), (
            f"{case}: the error does not say what each rank gave: {found[0]}"
        )
        still_works(ranks)

    @law("COMM-3", needs="compared_calls")
    def test_different_collectives_are_refused_at_every_rank(self) -> None:
        ranks = self.ranks()
        methods = ("all_reduce", "all_gather", "all_reduce")
        pending = [
            each for rank, method in enumerate(methods) for each in ranks.begin(method, {rank: [_f32(2)]})
        ]
        for each in pending:
            check_raised(each.outcome(), TensorMismatchError)
        still_works(ranks)

    @law("COMM-3", needs="compared_calls")
    def test_a_receiver_that_wants_something_else_is_refused_and_the_sender_too(self) -> None:
        import torch

        ranks = self.ranks(2)
        for shape, dtype in (((3,), torch.float32), ((2,), torch.int64)):
            pair = [*ranks.begin("send", {0: [_f32(2), 1]}), *ranks.begin("recv", {1: [shape, dtype, 0]})]
            for each in pair:
                check_raised(each.outcome(), TensorMismatchError)
        still_works(ranks)

    @law("COMM-3")
    def test_a_tensor_of_another_device_is_refused_by_its_name(self) -> None:
        ranks = self.ranks(2)
        here = _f32(2)
        there = OtherDevice(here)
        for method in METHODS:
            for outcome in ranks.raised(method, [[there]] * 2, UnsupportedError):
                assert "on meta" in outcome.text, str(outcome)
        if self.compared_calls:  # the ranks do not compare
            for call in (["send", there, 1], ["batch_isend_irecv", [RecvOp(there, 1)]]):
                check_raised(ranks[0].call(*call), UnsupportedError)
        else:
            for wrong, right in (
                (("send", [there, 1]), ("recv", [(2,), here.dtype, 0])),
                (("batch_isend_irecv", [[RecvOp(there, 1)]]), ("batch_isend_irecv", [[SendOp(here, 0)]])),
            ):
                refused = ranks.begin(wrong[0], {0: wrong[1]})
                others = ranks.begin(right[0], {1: right[1]})
                check_raised(refused[0].outcome(), UnsupportedError)
                check_raised(others[0].outcome(), TensorMismatchError)
        still_works(ranks)

    @law("COMM-3")
    def test_a_rank_neither_sends_to_itself_nor_to_one_that_is_not_there(self) -> None:
        import torch

        ranks = self.ranks(2)
        for other in (0, 2, -1):
            check_raised(ranks[0].call("send", _f32(2), other), ConfigError)
            check_raised(ranks[0].call("recv", (2,), torch.float32, other), ConfigError)
        check_raised(self.ranks(1)[0].call("send", _f32(2)), ConfigError)
        still_works(ranks)

    @law("COMM-3")
    def test_arguments_are_checked_with_one_rank_too(self) -> None:
        ranks = self.ranks(1)
        for method, args, kind in (
            ("all_gather", [_f32(2), 1], TensorMismatchError),
            ("all_gatherv", [_f32(2), 0, [3]], TensorMismatchError),
            ("reduce_scatterv", [_f32(2), 0, [1, 1]], TensorMismatchError),
            ("gather", [_f32(2), 1], ConfigError),
            ("all_reduce", [tensor_of("bool", (2,), 0)], UnsupportedError),
        ):
            ranks.raised(method, [args], kind)
        still_works(ranks)

    @law("COMM-3")
    def test_what_is_claimed_is_taken_and_what_is_not_is_refused(self) -> None:
        import torch

        ranks = self.ranks(2)
        for dtype in ("float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn", "uint8"):
            for summing, method in ((True, "all_reduce"), (False, "all_gather")):
                given = [[torch.zeros(4, dtype=getattr(torch, dtype))]] * 2
                if ranks[0].call("supports", self.device, dtype, summing=summing).value:
                    ranks.values(method, given)
                else:
                    ranks.raised(method, given, UnsupportedError)
        still_works(ranks)
