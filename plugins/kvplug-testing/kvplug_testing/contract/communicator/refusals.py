"""Refused calls (law COMM-3): refused at every rank, with the reason, and the communicator stays usable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvplug import ConfigError, KvplugError, UnsupportedError
from kvplug.transport import RecvOp, SendOp, TensorMismatchError
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.calls import OtherDevice
from kvplug_testing.contract.communicator.suite import WORLD, CommunicatorSuite, Ranks, check_raised
from kvplug_testing.contract.communicator.tensors import check, tensor_of, total

Each = Callable[[int], Sequence[Any]]
_F32 = "float32"


def still_works(ranks: Ranks) -> None:
    """Check that the communicator works after a refusal."""
    given = [tensor_of("int64", (3,), rank) for rank in range(len(ranks))]
    found = ranks.values("all_reduce", lambda rank: [given[rank]])
    check(found, [total(given)] * len(ranks), "all_reduce after a call that was refused")


def wrong_everywhere() -> dict[str, tuple[str, Each, type[KvplugError], list[str]]]:
    """Calls that are wrong at every rank: name, arguments, error, and words that its message must contain."""
    two = (2, 3)
    return {
        "all_gather along a dimension that is not there": (
            "all_gather",
            lambda rank: [tensor_of(_F32, two, rank), 2],
            TensorMismatchError,
            ["dimension 2", "[2, 3]"],
        ),
        "all_gather along a negative dimension that is not there": (
            "all_gather",
            lambda rank: [tensor_of(_F32, two, rank), -3],
            TensorMismatchError,
            ["dimension -3"],
        ),
        "all_gather of a tensor without dimensions": (
            "all_gather",
            lambda rank: [tensor_of(_F32, (), rank)],
            TensorMismatchError,
            ["dimension"],
        ),
        "all_gather along no dimension": (
            "all_gather",
            lambda rank: [tensor_of(_F32, two, rank), None],
            TensorMismatchError,
            ["dim=None"],
        ),
        "all_gatherv with one size for all": (
            "all_gatherv",
            lambda rank: [tensor_of(_F32, two, rank), 0, 2],
            TensorMismatchError,
            ["sizes=2", str(WORLD)],
        ),
        "all_gatherv with too few sizes": (
            "all_gatherv",
            lambda rank: [tensor_of(_F32, two, rank), 0, [2, 2]],
            TensorMismatchError,
            ["[2, 2]", str(WORLD)],
        ),
        "all_gatherv with sizes that are not the tensors'": (
            "all_gatherv",
            lambda rank: [tensor_of(_F32, two, rank), 0, [3, 3, 3]],
            TensorMismatchError,
            ["[3, 3, 3]", "2 elements"],
        ),
        "all_gatherv with a negative size": (
            "all_gatherv",
            lambda rank: [tensor_of(_F32, two, rank), 0, [-1, 2, 2]],
            TensorMismatchError,
            ["-1"],
        ),
        "reduce_scatter of what cannot be shared": (
            "reduce_scatter",
            lambda rank: [tensor_of(_F32, (4,), rank), 0],
            TensorMismatchError,
            ["4 elements", "3 ranks"],
        ),
        "reduce_scatterv with sizes that do not add up": (
            "reduce_scatterv",
            lambda rank: [tensor_of(_F32, (6,), rank), 0, [1, 2, 4]],
            TensorMismatchError,
            ["add up to 7", "6 elements"],
        ),
        "gather to a rank that is not there": (
            "gather",
            lambda rank: [tensor_of(_F32, two, rank), WORLD],
            ConfigError,
            ["dst=3", "0 to 2"],
        ),
        "broadcast from a rank that is not there": (
            "broadcast",
            lambda rank: [tensor_of(_F32, two, rank), -1],
            ConfigError,
            ["src=-1", "0 to 2"],
        ),
        "all_reduce of booleans": (
            "all_reduce",
            lambda rank: [tensor_of("bool", two, rank)],
            UnsupportedError,
            ["bool"],
        ),
        "all_reduce of something else": ("all_reduce", lambda _: ["a word"], UnsupportedError, ["str"]),
    }


def wrong_together() -> dict[str, tuple[str, Each]]:
    """Calls that are valid alone but do not match each other."""
    return {
        "shapes of all_reduce": ("all_reduce", lambda rank: [tensor_of(_F32, (2 + rank % 2,), rank)]),
        "dtypes of all_reduce": (
            "all_reduce",
            lambda rank: [tensor_of("float64" if rank == 2 else _F32, (4,), rank)],
        ),
        "shapes of all_gather": ("all_gather", lambda rank: [tensor_of(_F32, (2, 2 + rank), rank)]),
        "dimensions of all_gather": ("all_gather", lambda rank: [tensor_of(_F32, (2, 2), rank), rank % 2]),
        "other dimensions of all_gatherv": (
            "all_gatherv",
            lambda rank: [tensor_of(_F32, (1, 2 + rank), rank), 0, [1, 1, 1]],
        ),
        "sizes of all_gatherv": (
            "all_gatherv",
            lambda rank: [tensor_of(_F32, (2,), rank), 0, [2, 2, 2] if rank else [2, 2, 3]],
        ),
        "lists of all_gatherv": (
            "all_gatherv",
            lambda rank: [[tensor_of(_F32, (2,), rank)] * (1 + rank % 2), 0],
        ),
        "sizes of reduce_scatterv": (
            "reduce_scatterv",
            lambda rank: [tensor_of(_F32, (6,), rank), 0, [2, 2, 2] if rank else [1, 2, 3]],
        ),
        "destinations of gather": ("gather", lambda rank: [tensor_of(_F32, (2,), rank), rank % 2]),
        "sources of broadcast": ("broadcast", lambda rank: [tensor_of(_F32, (2,), rank), rank % 2]),
        "one rank alone is wrong": (
            "all_gather",
            lambda rank: [tensor_of(_F32, (2,), rank), 5 * (rank == 1)],
        ),
    }


class Refusals(CommunicatorSuite):
    """Wrong arguments."""

    @law("COMM-3")
    @pytest.mark.parametrize("case", list(wrong_everywhere()))
    def test_what_is_wrong_everywhere_is_refused_in_words_and_harms_nothing(self, case: str) -> None:
        method, each, kind, words = wrong_everywhere()[case]
        ranks = self.ranks()
        for outcome in ranks.refused(method, each, kind):
            missing = [word for word in words if word not in outcome.text]
            assert not missing, f"{case}: {', '.join(missing)} is not in {outcome}"
        still_works(ranks)

    @law("COMM-3", needs="compared_calls")
    @pytest.mark.parametrize("case", list(wrong_together()))
    def test_what_does_not_fit_together_is_refused_at_every_rank_and_harms_nothing(self, case: str) -> None:
        method, each = wrong_together()[case]
        ranks = self.ranks()
        given = [list(each(rank)) for rank in range(WORLD)]
        found = ranks.refused(method, lambda rank: given[rank], TensorMismatchError)
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
        methods = ["all_reduce", "all_gather", "all_reduce"]
        pending = [
            ranks[rank].begin(methods[rank], tensor_of(_F32, (2,), rank), timeout=waits.patience_s)
            for rank in range(WORLD)
        ]
        for each in pending:
            check_raised(each.outcome(), TensorMismatchError)
        still_works(ranks)

    @law("COMM-3", needs="compared_calls")
    def test_a_receiver_that_wants_something_else_is_refused_and_the_sender_too(self) -> None:
        import torch

        ranks = self.ranks(2)
        for shape, dtype in (((3,), torch.float32), ((2,), torch.int64)):
            sending = ranks[0].begin("send", tensor_of(_F32, (2,), 0), 1, timeout=waits.patience_s)
            receiving = ranks[1].begin("recv", shape, dtype, 0, timeout=waits.patience_s)
            for each in (sending, receiving):
                check_raised(each.outcome(), TensorMismatchError)
        still_works(ranks)

    @law("COMM-3")
    def test_a_tensor_of_another_device_is_refused_by_its_name(self) -> None:
        ranks = self.ranks(2)
        there = OtherDevice(tensor_of(_F32, (2,), 0))
        for method in ("all_reduce", "all_gather", "all_gatherv", "reduce_scatter", "gather", "broadcast"):
            for outcome in ranks.refused(method, lambda _: [there], UnsupportedError):
                assert "on meta" in outcome.text, str(outcome)
        given = tensor_of(_F32, (2,), 0)
        if self.compared_calls:
            for call in (["send", there, 1], ["batch_isend_irecv", [RecvOp(there, 1)]]):
                check_raised(ranks[0].begin(*call).outcome(), UnsupportedError)
            still_works(ranks)
            return
        pairs: list[list[list[Any]]] = [
            [["send", there, 1], ["recv", (2,), given.dtype, 0]],
            [["batch_isend_irecv", [SendOp(given, 1)]], ["batch_isend_irecv", [RecvOp(there, 0)]]],
        ]
        for pair in pairs:
            pending = [ranks[rank].begin(*call, timeout=waits.patience_s) for rank, call in enumerate(pair)]
            found = [each.outcome() for each in pending]
            wrong = 0 if pair[0][0] == "send" else 1
            check_raised(found[wrong], UnsupportedError)
            check_raised(found[1 - wrong], TensorMismatchError)
        still_works(ranks)

    @law("COMM-3")
    def test_a_rank_neither_sends_to_itself_nor_to_one_that_is_not_there(self) -> None:
        import torch

        ranks = self.ranks(2)
        for other in (0, 2, -1):
            check_raised(ranks[0].begin("send", tensor_of(_F32, (2,), 0), other).outcome(), ConfigError)
            check_raised(ranks[0].begin("recv", (2,), torch.float32, other).outcome(), ConfigError)
        alone = self.ranks(1)
        check_raised(alone[0].begin("send", tensor_of(_F32, (2,), 0)).outcome(), ConfigError)
        still_works(ranks)

    @law("COMM-3")
    def test_arguments_are_checked_with_one_rank_too(self) -> None:
        ranks = self.ranks(1)
        for method, args, kind in (
            ("all_gather", [tensor_of(_F32, (2,), 0), 1], TensorMismatchError),
            ("all_gatherv", [tensor_of(_F32, (2,), 0), 0, [3]], TensorMismatchError),
            ("reduce_scatterv", [tensor_of(_F32, (2,), 0), 0, [1, 1]], TensorMismatchError),
            ("gather", [tensor_of(_F32, (2,), 0), 1], ConfigError),
            ("all_reduce", [tensor_of("bool", (2,), 0)], UnsupportedError),
        ):
            ranks.refused(method, lambda _: args, kind)  # noqa: B023
        still_works(ranks)

    @law("COMM-3")
    def test_what_is_claimed_is_taken_and_what_is_not_is_refused(self) -> None:
        import torch

        ranks = self.ranks(2)
        for dtype in ("float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn", "uint8"):
            for summing, method in ((True, "all_reduce"), (False, "all_gather")):
                claimed = ranks[0].begin("supports", self.device, dtype, summing=summing).outcome().value
                given = torch.zeros(4, dtype=getattr(torch, dtype))
                if claimed:
                    ranks.values(method, lambda _: [given])  # noqa: B023
                else:
                    ranks.refused(method, lambda _: [given], UnsupportedError)  # noqa: B023
        still_works(ranks)
