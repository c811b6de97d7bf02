"""A store's events, and the follower that knows whether it has missed one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvplug.errors import WireError
from kvplug.transport.store.events import PageEvent

SERIES = bytes(range(16))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_a_snapshot_has_its_stores_own_epoch_and_everything_that_is_held_and_expected() -> None:
    assert PageEvent.Log().epoch != PageEvent.Log().epoch
    log = PageEvent.Log("one")
    log.cleared()
    header, *rest = log.snapshot({SERIES: [key(1), key(2)]}, [(SERIES, [key(3)], 1.5)])
    assert header == PageEvent(kind="snapshot", epoch="one", seq=1, count=2)
    assert rest == [
        PageEvent(kind="stored", epoch="one", seq=1, series=SERIES, keys=(key(1), key(2))),
        PageEvent(kind="declared", epoch="one", seq=1, series=SERIES, keys=(key(3),), for_s=1.5),
    ]


@pytest.mark.parametrize(
    ("owed", "epoch", "seq"), [(0, "e", 3), (0, "e", 1), (0, "other", 2), (1, "e", 2), (1, "e", 1)]
)
def test_what_is_not_the_next_event_is_refused_and_the_follower_is_not_ready(
    owed: int, epoch: str, seq: int
) -> None:
    follower = PageEvent.Follower()
    assert follower.accept(PageEvent(kind="snapshot", epoch="e", seq=1, count=owed))
    assert follower.ready == (not owed)
    assert not follower.accept(PageEvent(kind="cleared", epoch=epoch, seq=seq))
    assert not follower.ready and not follower.accept(PageEvent(kind="cleared", epoch="e", seq=2))


# -- plain form --------------------------------------------------------------------------------

EVENTS: list[PageEvent] = [
    PageEvent(kind="snapshot", epoch="e", seq=9, count=3),
    PageEvent(kind="stored", epoch="e", seq=1, series=SERIES, keys=(key(1), key(2))),
    PageEvent(kind="stored", epoch="e", seq=1, series=SERIES, keys=()),
    PageEvent(kind="declared", epoch="e", seq=2, series=SERIES, keys=(key(1),), for_s=0.5),
    PageEvent(
        kind="removed", epoch="e", seq=3, series=SERIES, keys=(key(1),), reason=PageEvent.Removal.EVICTED
    ),
    PageEvent(kind="cleared", epoch="e", seq=4),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_an_event_survives_its_plain_form(event: PageEvent) -> None:
    assert PageEvent.from_plain(event.to_plain()) == event
    assert PageEvent.from_plain({**event.to_plain(), "of a newer version": 1}) == event


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
@pytest.mark.parametrize("wrong", [None, -1, True, "x", b"1234567", [], {}])
def test_an_event_with_a_field_missing_or_of_another_kind_is_refused(event: PageEvent, wrong: Any) -> None:
    plain = event.to_plain()
    for name in plain:
        with pytest.raises(WireError):
            PageEvent.from_plain({key: value for key, value in plain.items() if key != name})
        if isinstance(wrong, str) and name in ("epoch", "reason"):
            continue
        with pytest.raises(WireError):
            PageEvent.from_plain({**plain, name: wrong})


def test_a_reason_of_a_newer_version_is_another_reason() -> None:
    event = PageEvent.from_plain({**EVENTS[4].to_plain(), "reason": "melted"})
    assert event.kind == "removed" and event.reason is PageEvent.Removal.OTHER


# -- any store, any loss -----------------------------------------------------------------------


class Following(RuleBasedStateMachine):
    """A store that restarts, a line that loses, repeats and is cut off, and a follower at its end.

    Whenever the follower is ready, its index is what the store held as of the last event that it
    has accepted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0
        self.past: dict[tuple[str, int], frozenset[bytes]] = {}
        self.restart()
        self.follower = PageEvent.Follower()
        self.index: set[bytes] = set()
        self.at = ("", 0)
        self.line: list[PageEvent] = []
        self.lossless = False

    @rule()
    def restart(self) -> None:
        self.epochs += 1
        self.log = PageEvent.Log(str(self.epochs))
        self.held: set[bytes] = set()
        self.past[self.log.position] = frozenset()
        self.lossless = False

    def publish(self, event: PageEvent) -> None:
        self.past[self.log.position] = frozenset(self.held)
        self.line.append(event)

    @rule(number=st.integers(0, 4))
    def store(self, number: int) -> None:
        self.held.add(key(number))
        self.publish(self.log.stored(SERIES, [key(number)]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.held)))
        self.held.discard(gone)
        self.publish(self.log.removed(SERIES, [gone], PageEvent.Removal.EVICTED))

    @rule()
    def clear(self) -> None:
        self.held.clear()
        self.publish(self.log.cleared())

    @precondition(lambda self: self.line)
    @rule()
    def lose(self) -> None:
        self.line.pop(0)
        self.lossless = False

    @precondition(lambda self: self.line)
    @rule()
    def repeat(self) -> None:
        self.line.insert(0, self.line[0])
        self.lossless = False

    @precondition(lambda self: self.line)
    @rule()
    def deliver(self) -> None:
        event = self.line.pop(0)
        if not self.follower.accept(event):
            return
        self.at = (event.epoch, event.seq)
        match event.kind:
            case "snapshot" | "cleared":
                self.index = set()
            case "stored":
                self.index |= set(event.keys)
            case "removed":
                self.index -= set(event.keys)

    @rule(cut=st.booleans())
    def connect_again(self, cut: bool) -> None:
        """The old line is gone; the store sends a snapshot, then live events."""
        self.line = self.log.snapshot({SERIES: sorted(self.held)} if self.held else {})
        self.lossless = True
        if cut:
            self.line.pop()
            self.lossless = False

    @invariant()
    def a_ready_follower_is_right(self) -> None:
        if self.follower.ready:
            assert self.index == self.past[self.at]
        if self.lossless and not self.line:
            assert self.follower.ready
            assert self.index == self.held


TestFollowing = Following.TestCase
TestFollowing.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
