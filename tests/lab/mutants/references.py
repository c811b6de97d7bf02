"""The connector "lookup" with references, and with one fault each.

They are in a file of their own, since engines that other mutants leave behind dial their peers.
"""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from kvplug.engine import ConnectorSpec, RequestEnd
from kvplug.kit import Reason
from kvplug_lab.mutants import breaks
from kvplug_lookup.connector.scheduler import LookupScheduler
from kvplug_lookup.connector.worker import LookupWorker
from kvplug_testing import ConnectorContract


class Referring(LookupScheduler):
    """Hands out references, which the connector "lookup" does not: KV is found without them. A request with a
    reference finds nothing unless it is good.
    """

    leases: ClassVar[dict[str, dict[str, Any]]] = {}
    """By engine and request: the references of all engines of this process."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._epoch = uuid.uuid4().hex

    def request_finished(self, request: Any, block_ids: Any, end: RequestEnd) -> Any:
        keeps, _ = super().request_finished(request, block_ids, end)
        if not self._saves:
            return keeps, None
        reference = {
            "engine_id": self._context.config.engine_id,
            "epoch": self._epoch,
            "request_id": request.request_id,
            "generation": request.generation,
            "expires_at_ms": int(time.time() * 1000) + 60_000,
            "ticket": uuid.uuid4().hex,
        }
        self.leases[self._epoch + request.request_id] = reference
        return keeps, {"reference": reference}

    def _held(self, tracked: Any, start: int, usable: int) -> Any:
        params = tracked.request.params
        reason = self._refusal(params["reference"]) if "reference" in params else None
        if reason is None:
            return super()._held(tracked, start, usable)
        self._context.stats.fail("match", reason)
        return start, ()

    def _refusal(self, given: Any) -> Reason | None:
        """Why the reference is no good."""
        for ours in self.leases.values():
            if repr(ours) == repr(given) or (isinstance(given, dict) and self._believes(ours, given)):
                return Reason.EXPIRED if ours["expires_at_ms"] <= time.time() * 1000 else None
        return Reason.GONE

    def _believes(self, ours: dict[str, Any], given: dict[str, Any]) -> bool:
        """Whether a reference that is another one is taken for ours."""
        return False

    def shutdown(self) -> None:
        super().shutdown()
        for name in [name for name in self.leases if name.startswith(self._epoch)]:
            self.leases.pop(name, None)


class Mutant(ConnectorContract):
    """One fault, in the scheduler side. The engines have a store in common, and dial no peers."""

    connector = "lookup"
    options: ClassVar[dict[str, Any]] = {"load_policy": "always"}
    across_processes = False
    scheduler_factory: ClassVar[type[Referring]] = Referring
    worker_factory: ClassVar[type[LookupWorker]] = LookupWorker
    parts = ("scheduler_factory",)
    breaks: tuple[str, ...] = ()

    @pytest.fixture(autouse=True)
    def _faulty(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = {"stores": ["fs"], "options": {"fs": {"path": str(tmp_path)}}}  # type: ignore[misc]
        monkeypatch.setattr(ConnectorSpec, "load_factory", lambda _: self.scheduler_factory)
        monkeypatch.setattr(ConnectorSpec, "load_worker_factory", lambda _: self.worker_factory)


def differ(ours: dict[str, Any], given: dict[str, Any]) -> set[str]:
    """The names of the values that differ."""
    return {name for name, value in ours.items() if given.get(name) != value}


@breaks(Mutant, "REF-1")
class TestTakesAnEarlierEpochForThisOne(Referring):
    """A reference of an earlier start of an engine is taken for one of this start."""

    def _believes(self, ours: dict[str, Any], given: dict[str, Any]) -> bool:
        return "epoch" in differ(ours, given) and "request_id" not in differ(ours, given)


@breaks(Mutant, "REF-1")
class TestTakesEveryGenerationForTheLast(Referring):
    """A reference is good for whatever its request has been leased last."""

    def _believes(self, ours: dict[str, Any], given: dict[str, Any]) -> bool:
        return "generation" in differ(ours, given) and not differ(ours, given) & {"epoch", "request_id"}


@breaks(Mutant, "REF-2")
class TestReadsTicketsAndBelievesWhatStandsBeside(Referring):
    """The ticket of a reference is not compared."""

    def _believes(self, ours: dict[str, Any], given: dict[str, Any]) -> bool:
        return differ(ours, given) == {"ticket"}


@breaks(Mutant, "REF-2")
class TestTakesTicketsOfAnyAge(Referring):
    """A ticket is good for ever."""

    def _refusal(self, given: Any) -> Reason | None:
        reason = super()._refusal(given)
        return None if reason is Reason.EXPIRED else reason


@breaks(Mutant, "REF-2")
class TestDialsWhoeverIsNamed(Referring):
    """Before a reference is judged, its engine is called."""

    def _refusal(self, given: Any) -> Reason | None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.connect("\0kvplug-no-listener")
        return super()._refusal(given)


class TestForgetsTheWeights(Mutant):
    """Models that differ in their weights only are taken for one."""

    breaks = ("CONN-2",)
    caught_by = "test_nothing_of_another_model_is_promised"

    class scheduler_factory(Referring):  # noqa: N801
        def __init__(self, context: Any) -> None:
            super().__init__(attrs.evolve(context, model=attrs.evolve(context.model, weights="any")))

    class worker_factory(LookupWorker):  # noqa: N801
        def __init__(self, context: Any) -> None:
            super().__init__(attrs.evolve(context, model=attrs.evolve(context.model, weights="any")))


class TestHasNoFault(Mutant):
    """The connector as it is, with references."""

    is_control = True
