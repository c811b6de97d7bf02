"""Refused calls (law COMM-3): refused at every rank, with the reason, and the communicator stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvplug import ConfigError, KvplugError, UnsupportedError
from kvplug.transport import TensorMismatchError
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.suite import CommunicatorSuite, Ranks
from kvplug_testing.contract.communicator.tensors import WORLD, check, each_rank, tensor_of, total

METHODS: Final = ("all_reduce", "all_gather", "all_gatherv", "reduce_scatter")
"""Collectives in which every rank waits for every other one, whether they compare their calls or not."""

_LATE_S: Final = 0.5


def still_works(ranks: Ranks) -> None:
    """Check that the communicator works after a refusal."""
    given = each_rank("int64", (3,), len(ranks.every))
    found = ranks.values("all_reduce", [[each] for each in given])
    check(found, [total(given)] * len(given), "all_reduce after a call that was refused")


def _f32(*shape: int) -> Any:
    return tensor_of("float32", shape, 1)


# At every rank: the method, its arguments, the error, and words that its message must contain.
_WRONG_EVERYWHERE: tuple[tuple[str, Callable[[], list[Any]], type[KvplugError], str], ...] = (
    ("all_gather", lambda: [_f32(2, 3), 2], TensorMismatchError, "dimension 2"),
    ("all_gather", lambda: [_f32(2, 3), -3], TensorMismatchError, "dimension -3"),
    ("all_gatherv", lambda: [_f32(2, 3), 0, [2, 2]], TensorMismatchError, "[2, 2]"),
    ("all_gatherv", lambda: [_f32(2, 3), 0, [3, 3, 3]], TensorMismatchError, "2 elements"),
    ("reduce_scatter", lambda: [_f32(4), 0], TensorMismatchError, "4 elements"),
    ("reduce_scatterv", lambda: [_f32(6), 0, [1, 2, 4]], TensorMismatchError, "add up to 7"),
    ("gather", lambda: [_f32(2, 3), WORLD], ConfigError, "dst=3"),
    ("broadcast", lambda: [_f32(2, 3), -1], ConfigError, "src=-1"),
    ("all_reduce", lambda: [tensor_of("bool", (2, 3), 1)], UnsupportedError, "bool"),
    ("all_reduce", lambda: ["a word"], UnsupportedError, "str"),
)

# Calls that are valid alone but do not match each other: the method, and a rank's arguments.
_WRONG_TOGETHER: tuple[tuple[str, Callable[[int], list[Any]]], ...] = (
    ("all_reduce", lambda rank: [_f32(2 + rank % 2)]),
    ("all_reduce", lambda rank: [tensor_of("float64" if rank else "float32", (4,), rank)]),
    ("all_gather", lambda rank: [_f32(2, 2 + rank)]),
    ("all_gather", lambda rank: [_f32(2, 2), rank % 2]),
    ("all_gather", lambda rank: [_f32(2), 5 * (rank == 1)]),  # one rank alone is wrong
    ("all_gatherv", lambda rank: [_f32(2), 0, [2, 2, 2 if rank else 3]]),
    ("all_gatherv", lambda rank: [[_f32(2)] * (1 + rank % 2), 0]),
    ("reduce_scatterv", lambda rank: [_f32(6), 0, [2, 2, 2] if rank else [1, 2, 3]]),
    ("gather", lambda rank: [_f32(2), rank % 2]),
    ("broadcast", lambda rank: [_f32(2), rank % 2]),
)


class Refusals(CommunicatorSuite):
    """Wrong arguments."""

    @law("COMM-3")
    def test_what_is_wrong_everywhere_is_refused_in_words_and_harms_nothing(self) -> None:
        ranks = self.ranks()
        for method, args, kind, words in _WRONG_EVERYWHERE:
            for outcome in ranks.raised(method, [args()] * WORLD, kind):
                assert words in outcome.text, f"the error of {method} of {args()} lacks {words!r}: {outcome}"
            still_works(ranks)
        for other in (0, WORLD, -1):  # rank 0 itself, and two outside the group
            for method, args_ in (
                ("send", [_f32(2), other]),
                ("recv", [(2,), _f32(2).dtype, other]),
                ("batch", [[[_f32(2), other]], []]),
            ):
                ranks.raised(method, {0: args_}, ConfigError)
        still_works(ranks)

    @law("COMM-3", needs="compared_calls")
    def test_what_does_not_fit_together_is_refused_at_every_rank_and_harms_nothing(self) -> None:
        ranks = self.ranks()
        for method, args_of in _WRONG_TOGETHER:
            found = ranks.raised(method, [args_of(rank) for rank in range(WORLD)], TensorMismatchError)
            assert any("rank 0" in outcome.text and "rank 2" in outcome.text for outcome in found), (
                f"{method}: the error does not name what each rank gave: {found[0]}"
            )
            still_works(ranks)
        pending = ranks.begin("all_reduce", {0: [_f32(2)], 2: [_f32(2)]})
        for each in (pending | ranks.begin("all_gather", {1: [_f32(2)]})).values():
            each.raised(TensorMismatchError)
        still_works(ranks)

    @law("COMM-3")
    def test_a_wrong_timeout_is_refused_at_once_at_its_rank_alone_which_may_call_again(self) -> None:
        ranks = self.ranks(2)
        given = each_rank("int64", (3,), 2)
        for wrong in (-1.0, float("nan"), "soon"):
            pending = ranks.begin("all_reduce", {0: [given[0]]})[0]
            (refused,) = ranks.raised("all_reduce", {1: [given[1]]}, ConfigError, timeout=wrong)
            assert "timeout" in refused.text, str(refused)
            pending.check_blocked()
            ranks.begin("all_reduce", {1: [given[1]]})[1].result()
            check([pending.result()[0]], [total(given)], "all_reduce with a rank that called again")
        pending = ranks.begin("all_reduce", {0: [given[0]]}, timeout=_LATE_S)[0]
        ranks.raised("all_reduce", {1: [given[1]]}, ConfigError, timeout=-1.0)
        late = pending.raised(TimeoutError)
        assert "rank 1" in late.text, f"the error does not name the rank that is missing: {late}"

    @law("COMM-3", needs="compared_calls")
    def test_what_a_receiver_does_not_want_is_refused_at_both(self) -> None:
        ranks = self.ranks(2)
        right, long, other = _f32(2), _f32(3), tensor_of("int64", (2,), 1)
        for wrong in (long, other):
            pending = ranks.begin("send", {0: [right, 1]})
            for each in (pending | ranks.begin("recv", {1: [(*wrong.shape,), wrong.dtype, 0]})).values():
                each.raised(TensorMismatchError)
        sends = [[[right, 1]], []]
        for ops in ([[], [[long, 0]]], [[], [[other, 0]]], [[], [[right, 0]] * 2], [[[right, 0]], []]):
            ranks.raised("batch", [sends, ops], TensorMismatchError)
        still_works(ranks)

    @law("COMM-3")
    def test_a_tensor_of_another_device_is_refused_by_its_name(self) -> None:
        ranks = self.ranks(2)
        for method in (*METHODS, "gather", "broadcast"):
            for outcome in ranks.raised(method, [[_f32(2)]] * 2, UnsupportedError, form="meta"):
                assert "on meta" in outcome.text, str(outcome)
        still_works(ranks)
