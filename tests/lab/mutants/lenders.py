"""The connector "p2p" with one fault each: in references, in lent blocks, and in pulls."""

from __future__ import annotations

import contextlib
import json
import socket
from types import MappingProxyType
from typing import Any, ClassVar

import attrs
import pytest

from kvplug.engine import PeerLink
from kvplug_lab.mutants import Sides, breaks
from kvplug_p2p.lender import ClaimKey, Lender
from kvplug_p2p.pull import ProducerWorker, _Layers
from kvplug_p2p.reference import MalformedError, Reference, to_text, verified
from kvplug_p2p.scheduler import P2PScheduler
from kvplug_p2p.worker import P2PWorker


class Mutant(Sides):
    """One fault, in a side or in what its worker side makes."""

    connector = "p2p"
    config = MappingProxyType({"transport": "cpu", "connect_timeout_s": 20})
    lends_blocks = True
    options: ClassVar[dict[str, Any]] = {"async_load": False}
    scheduler_factory: ClassVar[type[P2PScheduler]] = P2PScheduler
    worker_factory: ClassVar[type[P2PWorker]] = P2PWorker
    lender: ClassVar[type[Lender]] = Lender
    producer_worker: ClassVar[type[ProducerWorker]] = ProducerWorker
    layers: ClassVar[type[_Layers]] = _Layers
    parts = ("scheduler_factory", "worker_factory", "lender", "producer_worker", "layers")

    @pytest.fixture(autouse=True)
    def _faulty(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvplug_testing.engine.fake.PATIENCE_S", 8.0)
        monkeypatch.setattr("kvplug_p2p.worker.Lender", self.lender)
        monkeypatch.setattr("kvplug_p2p.worker.ProducerWorker", self.producer_worker)
        monkeypatch.setattr("kvplug_p2p.pull._Layers", self.layers)


# -- references --------------------------------------------------------------------------------------


@breaks(Mutant, "REF-1")
class TestTakesAnEarlierEpochForThisOne(P2PScheduler):
    """Every start of an engine signs its references with the same key, as of the same epoch."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._epoch, self._key = "the only one", b"the same" * 4


@breaks(Mutant, "REF-1")
class TestTakesEveryGenerationForTheLast(Lender):
    """A reference is good for whatever its request was handed off with last."""

    def _grant(self, link: PeerLink, claim: ClaimKey, reference: Reference) -> str | None:
        hold = self._holds.get(reference.request_id)
        lease = reference.lease if hold is None else hold.lease
        return super()._grant(link, claim, attrs.evolve(reference, lease=lease))


@breaks(Mutant, "REF-2")
class TestReadsTicketsAndBelievesWhatStandsBeside(Lender):
    """The ticket of a reference is not verified."""

    def _claim(self, link: PeerLink, key: str, text: bytes) -> str | None:
        with contextlib.suppress(MalformedError):
            text = to_text(Reference.from_params(json.loads(text)).to_params(self._key))
        return super()._claim(link, key, text)


@breaks(Mutant, "REF-2")
class TestTakesTicketsOfAnyAge(Lender):
    """A ticket is good for ever."""

    def _claim(self, link: PeerLink, key: str, text: bytes) -> str | None:
        if (reference := verified(text, self._key)) is not None:
            text = to_text(attrs.evolve(reference, expires_ms=1 << 62).to_params(self._key))
        return super()._claim(link, key, text)


@breaks(Mutant, "REF-2")
class TestDialsWhoeverIsNamed(P2PScheduler):
    """A reference's engine is dialled before the reference is verified."""

    def _make_claim(self, tracked: Any) -> Any:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.connect("\0kvplug-no-listener")
        return super()._make_claim(tracked)


# -- lent blocks, and what is pulled -----------------------------------------------------------------


@breaks(Mutant, "CONN-4")
class TestKeepsBlocksForReadersThatHaveGone(Lender):
    """Claims outlive the link that they came over: their blocks come back when the lease is over."""

    def _forget(self, link: PeerLink) -> None:
        with self._lock:
            self._served.pop(link, None)
            self._pipes.pop(link, None)


@breaks(Mutant, "CONN-4")
class TestGivesBlocksBackAsSoonAsTheyAreClaimed(Lender):
    """A claim ends the lease instead of keeping the blocks."""

    def _grant(self, link: PeerLink, claim: ClaimKey, reference: Reference) -> str | None:
        reason = super()._grant(link, claim, reference)
        if reason == "":
            self._ended.add(reference.request_id)
        return reason


@breaks(Mutant, "CONN-7")
class TestSendsWhatWasComputedBeforeAReset(Lender):
    """A reset returns true and does nothing."""

    def reset(self) -> None:
        return None


@breaks(Mutant, "CONN-3")
class TestTrustsWhatArrives(_Layers):
    """The hashes of the producer are received, and not compared."""

    def arrived(self, layer: int) -> None:
        self._checksum = None
        super().arrived(layer)


@breaks(Mutant, "CONN-2")
class TestPullsTheNextHead(ProducerWorker):
    """The heads of a pull are written into the place of others."""

    def pull(self, part: Any) -> None:
        heads = part.heads
        part.heads = attrs.evolve(heads, ours=heads.ours + 1, count=heads.count - 1)
        super().pull(part)


class TestForgetsTheWeights(Mutant):
    """Models that differ in their weights only are taken for one."""

    breaks = ("CONN-2",)

    def make_side(self, config: Any, side: str, **given: Any) -> Any:
        model = attrs.evolve(given.pop("model"), weights="any")
        return super().make_side(config, side, model=model, **given)


class TestHasNoFault(Mutant):
    """The connector as it is."""

    is_control = True
