"""The communicator "memory" with one fault each, and the law that it breaks; then some between processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from kvplug import ConfigError, PeerGoneError, TimeoutError, UnsupportedError
from kvplug.transport import Deadline, TensorMismatchError
from kvplug_lab.mutants import breaks
from kvplug_testing import DeviceCommunicatorContract
from kvplug_testing.memory.communicator import MemoryCommunicator


class Judged(DeviceCommunicatorContract):
    """One fault, in a rank's end or at the exchange; ``breaks`` are the laws that it breaks."""

    end: type[MemoryCommunicator] = MemoryCommunicator
    parts = ("end",)

    def make_communicator(self, context: Any) -> Any:
        return self.end(context)


class Mutant(Judged):
    """One fault of a communicator of threads."""

    across_processes = False


# -- COMM-1 ----------------------------------------------------------------------------------------


@breaks(Mutant, "COMM-1")
class TestForgetsTheLastRank(MemoryCommunicator):
    """The sum is without the last rank's part."""

    def _all_reduce(self, tensor: Any, deadline: Deadline) -> None:
        parts = self._everyones(tensor, deadline)
        tensor.copy_(sum(parts[:-1]))


@breaks(Mutant, "COMM-1")
class TestAddsItsOwnPartFirst(MemoryCommunicator):
    """Each rank adds the parts from its own on, so rounding differs between ranks."""

    def _all_reduce(self, tensor: Any, deadline: Deadline) -> None:
        parts = self._everyones(tensor, deadline)
        tensor.copy_(sum([*parts[self.rank + 1 :], *parts[: self.rank]], parts[self.rank]))


@breaks(Mutant, "COMM-1")
class TestGathersAsTheyCome(MemoryCommunicator):
    """Parts are in the order in which the ranks came."""

    def _everyones(self, value: Any, deadline: Deadline) -> list[Any]:
        came = super()._everyones((time.monotonic(), value), deadline)
        return [each for _, each in sorted(came, key=lambda pair: pair[0])]


@breaks(Mutant, "COMM-1")
class TestSumsIntegersAsFloats(MemoryCommunicator):
    """Integers are added as 32-bit floats."""

    def _all_reduce(self, tensor: Any, deadline: Deadline) -> None:
        parts = self._everyones(tensor, deadline)
        tensor.copy_(sum(part.float() for part in parts))


@breaks(Mutant, "COMM-1")
class TestForgetsStrides(MemoryCommunicator):
    """What is done to the contiguous copy of a tensor is not written back."""

    def broadcast(self, tensor: Any, src: int = 0, **given: Any) -> Any:
        super().broadcast(tensor.contiguous(), src, **given)
        return tensor


@breaks(Mutant, "COMM-1")
class TestSkipsEmptyRanks(MemoryCommunicator):
    """If a rank has no rows, the result is in another order."""

    def all_gatherv(self, input_: Any, dim: int = 0, sizes: Any = None, **given: Any) -> Any:
        if sizes is not None and 0 in sizes and any(sizes) and not isinstance(input_, list):
            return super().all_gatherv(input_, dim, sizes, **given).flip(dim)
        return super().all_gatherv(input_, dim, sizes, **given)


@breaks(Mutant, "COMM-1")
class TestGathersToEverybody(MemoryCommunicator):
    """All ranks get what one rank is to get."""

    def gather(self, input_: Any, dst: int = 0, dim: int = -1, **given: Any) -> Any:
        self._check_rank("dst", dst)
        return self.all_gather(input_, dim, **given)


@breaks(Mutant, "COMM-1")
class TestSendsBackwards(MemoryCommunicator):
    """Where no rank is named, it sends to the previous one."""

    def send(self, tensor: Any, dst: int | None = None, **given: Any) -> None:
        super().send(tensor, (self.rank - 1) % self.world_size if dst is None else dst, **given)


@breaks(Mutant, "COMM-1")
class TestBatchesOneAfterTheOther(MemoryCommunicator):
    """A batch receives before it sends: in a circle all ranks wait."""

    def _exchange(self, sends: Any, recvs: Any, deadline: Deadline) -> None:
        super()._exchange([], recvs, deadline)
        super()._exchange(sends, [], deadline)


@breaks(Mutant, "COMM-1")
class TestBatchesInAnotherOrder(MemoryCommunicator):
    """What is sent to one rank arrives there in the opposite order."""

    def _exchange(self, sends: Any, recvs: Any, deadline: Deadline) -> None:
        super()._exchange(list(reversed(sends)), recvs, deadline)


@breaks(Mutant, "COMM-1")
class TestFindsExpertsInSteps(MemoryCommunicator):
    """ "ep" is looked for anywhere in the name, so that "step" serves experts."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.is_ep_communicator = "ep" in self.unique_name


# -- COMM-2, and how calls end ---------------------------------------------------------------------


class LeavesLate(MemoryCommunicator):
    """A rank that was destroyed leaves later."""

    def _destroy(self) -> None:
        threading.Timer(8.0, super()._destroy).start()


@breaks(Mutant, "COMM-2")
class TestNamesNobody(MemoryCommunicator):
    """A TimeoutError does not name the missing ranks."""

    def _compare(self, *args: Any, **given: Any) -> Any:
        try:
            return super()._compare(*args, **given)
        except TimeoutError:
            raise TimeoutError("not all ranks have come") from None


@breaks(Mutant, "COMM-2")
class TestGoesOnAfterATimeout(MemoryCommunicator):
    """A rank that has given up takes part in the next call, which is another one elsewhere."""

    def _check_usable(self) -> None:
        self._broken = ""
        super()._check_usable()


@breaks(Mutant, "COMM-2", "ALL-4")
class TestWaitsForEver(MemoryCommunicator):
    """No deadline is kept."""

    def _compare(self, calls: Any, deadline: Deadline, **given: Any) -> Any:
        return super()._compare(calls, Deadline.after(8.0), **given)


@breaks(Mutant, "COMM-2", "ALL-2")
class TestWaitsForWhoIsGone(LeavesLate):
    """A rank that has left is waited for until the deadline."""


@breaks(Mutant, "ALL-1")
class TestIsNotWokenByItsOwnEnd(LeavesLate):
    """A call that is blocked goes on waiting when its rank is destroyed."""


@breaks(Mutant, "ALL-1", "ALL-6")
class TestWorksAfterItsEnd(MemoryCommunicator):
    """A communicator of one rank that was destroyed answers."""

    def _check_whole(self) -> None:
        pass


@breaks(Mutant, "ALL-4")
class TestMixesTwoThreads(MemoryCommunicator):
    """Two threads may be in collectives of one rank at once."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._busy = _Never()  # type: ignore[assignment]
        self.cpu_group._collective = _Never()


class _Never:
    def acquire(self, blocking: bool = True) -> bool:
        return True

    def release(self) -> None:
        pass

    def taken(self) -> Any:
        return nullcontext()


@breaks(Mutant, "ALL-7")
class TestLeaksADescriptor(MemoryCommunicator):
    """Each end opens something that it does not close."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._leak = os.open("/dev/null", os.O_RDONLY)


# -- COMM-3 ----------------------------------------------------------------------------------------


@breaks(Mutant, "COMM-3")
class TestRefusesAlone(MemoryCommunicator):
    """A rank whose arguments are wrong raises at once, and the others wait for it."""

    def _agreed(self, name: str, check: Any, *rest: Any, **given: Any) -> Any:
        check()
        return super()._agreed(name, check, *rest, **given)


@breaks(Mutant, "COMM-3")
class TestBreaksWhenItRefuses(MemoryCommunicator):
    """After a call that was refused nothing works any more."""

    @contextmanager
    def _attempt(self, timeout: Any) -> Iterator[Deadline]:
        with super()._attempt(timeout) as deadline:
            try:
                yield deadline
            except (UnsupportedError, TensorMismatchError, ConfigError) as e:
                self._broken = str(e)
                raise


@breaks(Mutant, "COMM-3")
class TestTakesTensorsOfOtherDevices(MemoryCommunicator):
    """The device of a tensor is not checked."""

    def _is_here(self, device: str) -> bool:
        return True

    def supports(self, device: str, dtype: Any, *, summing: bool = False) -> bool:
        return super().supports(self.device, dtype, summing=summing)


@breaks(Mutant, "COMM-3")
class TestSumsWhatItDoesNotClaim(MemoryCommunicator):
    """Booleans are added, though the communicator does not claim to."""

    def _check_taken(self, tensor: Any, *, summing: bool = False) -> None:
        super()._check_taken(tensor)


# -- COMM-4 ----------------------------------------------------------------------------------------


@breaks(Mutant, "COMM-4")
class TestBringsSharedTokensTwice(MemoryCommunicator):
    """Ranks that have the same tokens each bring theirs."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._width = 1


@breaks(Mutant, "COMM-4")
class TestForgetsExtraTensors(MemoryCommunicator):
    """Extra tensors come back as they went in."""

    def dispatch(self, a: Any, b: Any, c: Any, sp: Any = False, more: Any = None, **given: Any) -> Any:
        found = super().dispatch(a, b, c, sp, **given)
        return found if more is None else (*found, more)


@breaks(Mutant, "COMM-4")
class TestGivesEveryRankTheFirstRows(MemoryCommunicator):
    """combine cuts the sum at the wrong place."""

    def combine(self, hidden_states: Any, *args: Any, **given: Any) -> Any:
        mine = super().combine(hidden_states, *args, **given)
        return hidden_states[: len(mine)] if self.use_all2all else mine


# -- COMM-5 ----------------------------------------------------------------------------------------


@breaks(Mutant, "COMM-5")
class TestWorksInItsSleep(MemoryCommunicator):
    """suspend is not noticed."""

    def suspend(self) -> None:
        pass


@breaks(Mutant, "COMM-5")
class TestDoesNotWakeUp(MemoryCommunicator):
    """resume leaves it asleep."""

    def resume(self) -> None:
        pass


# -- between processes -----------------------------------------------------------------------------


class Apart(Judged):
    """One fault of a communicator between processes."""

    ends_are_processes = True


@breaks(Apart, "ALL-3")
class TestTakesAStoppedRankForDead(MemoryCommunicator):
    """Silence until the deadline counts as death."""

    def _compare(self, *args: Any, **given: Any) -> Any:
        try:
            return super()._compare(*args, **given)
        except TimeoutError as e:
            raise PeerGoneError(str(e)) from e


@breaks(Apart, "ALL-2", "ALL-5")
class TestDoesNotHearAKill(MemoryCommunicator):
    """The death of the first rank is taken for a pause."""

    def _compare(self, *args: Any, **given: Any) -> Any:
        try:
            return super()._compare(*args, **given)
        except PeerGoneError as e:
            time.sleep(3)
            raise TimeoutError(str(e)) from e


# -- the controls ----------------------------------------------------------------------------------


class TestHasNoFault(Mutant):
    """The communicator "memory" as it is."""

    is_control = True


class TestHasNoFaultApart(Apart):
    """A communicator between processes as it is."""

    is_control = True
