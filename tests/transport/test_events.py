"""A store's events, and the follower that knows whether it has missed one."""

from __future__ import annotations

import subprocess
import sys
from array import array
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvplug.errors import WireError
from kvplug.transport.events import (
    EventLog,
    Follower,
    RemovalReason,
    Removed,
    Snapshot,
    Stored,
    StoreEvent,
    event_from_plain,
    event_to_plain,
    pack_tokens,
    unpack_tokens,
)


def filled(*entry_ids: int, epoch: str = "one") -> EventLog:
    log = EventLog(epoch)
    for entry_id in entry_ids:
        log.stored(entry_id, [entry_id])
    return log


def followed(log: EventLog) -> Follower:
    follower = Follower()
    assert all(follower.accept(event) for event in log.snapshot())
    return follower


# -- token ids ---------------------------------------------------------------------------------


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_token_ids_survive_as_bytes(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert list(unpack_tokens(packed)) == token_ids
    assert packed == b"".join(token.to_bytes(8, "little", signed=True) for token in token_ids)


def test_buffers_of_integers_are_packed_by_value_whatever_their_width() -> None:
    for code in "bhilq":
        if code == "b":
            continue
        assert list(unpack_tokens(pack_tokens(array(code, [1, 2, 300])))) == [1, 2, 300]
    assert list(unpack_tokens(pack_tokens(memoryview(array("q", range(6)))[::2]))) == [0, 2, 4]


@pytest.mark.parametrize(
    "token_ids", [b"\x01\x02", bytearray(8), memoryview(b"12345678"), [1.0], ["1"], [None]]
)
def test_what_are_no_token_ids_is_refused(token_ids: Any) -> None:
    with pytest.raises(TypeError):
        pack_tokens(token_ids)


def test_a_token_id_of_more_than_64_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_tokens([2**63])


def test_bytes_that_are_no_whole_number_of_token_ids_are_refused() -> None:
    with pytest.raises(WireError, match="8 bytes each"):
        unpack_tokens(b"1234567")


# -- the log -----------------------------------------------------------------------------------


def test_events_are_numbered_from_one_without_a_hole() -> None:
    log = EventLog("e")
    assert log.position == ("e", 0)
    events = [log.stored(7, [1, 2], extra=b"x"), log.removed(7, "evicted"), log.stored(7, [3])]
    assert [event.seq for event in events] == [1, 2, 3]
    assert log.position == ("e", 3) and len(log) == 1
    assert isinstance(events[0], Stored) and list(events[0].token_ids) == [1, 2]
    assert isinstance(events[1], Removed) and events[1].reason is RemovalReason.EVICTED


def test_two_stores_have_different_epochs() -> None:
    assert EventLog().epoch != EventLog().epoch


def test_an_entry_is_stored_once_and_removed_once_and_a_refusal_takes_no_number() -> None:
    log = filled(1)
    with pytest.raises(ValueError, match="entry 1 is held already"):
        log.stored(1, [1])
    with pytest.raises(KeyError):
        log.removed(2, RemovalReason.TAKEN)
    with pytest.raises(ValueError, match="lost"):
        log.removed(1, "lost")
    with pytest.raises(TypeError):
        log.stored(3, [0.5])  # type: ignore[list-item]
    assert log.position == ("one", 1) and len(log) == 1


def test_a_snapshot_has_a_header_and_what_is_held_with_its_old_numbers() -> None:
    log = filled(1, 2, 3)
    log.removed(2, "taken")
    log.removed(1, "taken")
    log.stored(1, [1])
    header, *held = log.snapshot()
    assert header == Snapshot(epoch="one", seq=6, count=2)
    assert [(event.seq, event.entry_id) for event in held if isinstance(event, Stored)] == [(3, 3), (6, 1)]


def test_a_follower_that_comes_back_gets_what_it_missed() -> None:
    log = filled(1)
    follower = followed(log)
    missed = [log.stored(2, [2]), log.removed(1, "taken")]
    assert log.since(follower.position) == missed
    assert log.since(log.position) == []


@pytest.mark.parametrize("position", [None, ("another life", 1), ("one", 99), ("one", 0), ("one", 1)])
def test_a_follower_that_cannot_be_helped_otherwise_gets_a_snapshot(
    position: tuple[str, int] | None,
) -> None:
    log = EventLog("one", history=2)
    for entry_id in range(4):
        log.stored(entry_id, [entry_id])
    assert log.since(position) == log.snapshot()
    assert [event.seq for event in log.since(("one", 2))] == [3, 4]


# -- the follower ------------------------------------------------------------------------------


def test_a_follower_is_not_ready_before_its_first_snapshot() -> None:
    follower = Follower()
    assert not follower.ready and follower.position is None
    assert not follower.accept(EventLog("e").stored(1, [1]))
    assert not follower.ready


def test_a_follower_of_an_empty_store_is_ready_at_once() -> None:
    follower = followed(EventLog("e"))
    assert follower.ready and follower.position == ("e", 0)


def test_a_follower_is_ready_with_the_last_event_of_the_snapshot() -> None:
    log = filled(1, 2, 3)
    log.removed(3, "evicted")  # the snapshot reaches further than its last event's number
    follower, ready = Follower(), []
    for event in log.snapshot():
        assert follower.accept(event)
        ready.append(follower.ready)
    assert ready == [False, False, True] and follower.position == ("one", 4)
    assert follower.accept(log.stored(4, [4])) and follower.ready


def test_a_gap_means_not_yet_until_the_missing_event_has_come() -> None:
    log = filled(1)
    follower = followed(log)
    lost, after = log.stored(2, [2]), log.removed(1, "taken")
    assert not follower.accept(after)
    assert not follower.ready and follower.position == ("one", 1)
    assert follower.accept(lost)
    assert not follower.ready  # it has heard of a third event
    assert follower.accept(after) and follower.ready


def test_an_event_that_comes_twice_is_not_applied_twice_and_does_no_harm() -> None:
    log = filled(1)
    follower = followed(log)
    event = log.stored(2, [2])
    assert follower.accept(event) and not follower.accept(event)
    assert follower.ready


def test_a_restarted_store_means_not_yet_until_its_snapshot_is_whole() -> None:
    follower = followed(filled(1, 2))
    reborn = filled(8, 9, epoch="two")
    assert not follower.accept(reborn.stored(10, [10]))
    assert not follower.ready and follower.position is None
    assert log_into(follower, reborn.since(follower.position))
    assert follower.ready and follower.position == ("two", 3)


def log_into(follower: Follower, events: list[StoreEvent]) -> bool:
    return all(follower.accept(event) for event in events)


def test_a_new_snapshot_in_the_middle_of_one_starts_over() -> None:
    log = filled(1, 2, 3)
    follower = Follower()
    log_into(follower, log.snapshot()[:2])
    log.removed(1, "taken")
    assert log_into(follower, log.snapshot()) and follower.ready


@pytest.mark.parametrize("which", ["live", "removed", "twice"])
def test_what_does_not_belong_into_a_snapshot_spoils_it(which: str) -> None:
    log = filled(1, 2)
    header, first, second = log.snapshot()
    follower = Follower()
    assert follower.accept(header) and follower.accept(first)
    wrong = {"live": log.stored(3, [3]), "removed": log.removed(1, "taken"), "twice": first}[which]
    assert not follower.accept(wrong)
    assert not follower.accept(second) and not follower.ready and follower.position is None
    assert log_into(follower, log.snapshot()) and follower.ready


def test_a_snapshot_older_than_an_event_that_was_heard_of_is_not_the_whole_truth() -> None:
    log = filled(1)
    follower = followed(log)
    old = log.snapshot()
    log.stored(2, [2])
    assert not follower.accept(log.stored(3, [3]))
    assert log_into(follower, old) and not follower.ready
    assert log_into(follower, log.since(follower.position)) and follower.ready


# -- plain form --------------------------------------------------------------------------------

EVENTS = [
    Snapshot(epoch="e", seq=9, count=3),
    Stored(
        epoch="e",
        seq=1,
        entry_id=4,
        extra=b"\x00lora",
        packed_tokens=pack_tokens([1, -1]),
        metadata={"n": [1]},
    ),
    Stored(epoch="e", seq=1, entry_id=0, packed_tokens=b""),
    Removed(epoch="e", seq=2, entry_id=4, reason="taken"),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_survives_its_plain_form(event: StoreEvent) -> None:
    assert event_from_plain(event_to_plain(event)) == event
    assert event_from_plain({**event_to_plain(event), "of a newer version": 1}) == event


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("wrong", [None, -1, 1.5, True, "x", b"1234567", [], {}])
def test_an_event_with_a_field_missing_or_of_another_kind_is_refused(event: StoreEvent, wrong: Any) -> None:
    plain = event_to_plain(event)
    for name, right in plain.items():
        with pytest.raises(WireError):
            event_from_plain({key: value for key, value in plain.items() if key != name})
        if type(wrong) is type(right) and name != "event" and wrong != -1 and wrong != b"1234567":
            continue
        if name == "extra" and wrong == b"1234567":
            continue
        with pytest.raises(WireError):
            event_from_plain({**plain, name: wrong})


@pytest.mark.parametrize(
    "plain", [None, 3, "stored", [], {}, {"event": "burnt", "epoch": "e", "seq": 1, "entry_id": 1}]
)
def test_what_is_no_event_is_refused(plain: Any) -> None:
    with pytest.raises(WireError):
        event_from_plain(plain)


def test_a_reason_of_a_newer_version_is_another_reason() -> None:
    plain = {**event_to_plain(EVENTS[3]), "reason": "melted"}
    event = event_from_plain(plain)
    assert isinstance(event, Removed) and event.reason is RemovalReason.OTHER


def test_no_token_id_appears_in_a_repr() -> None:
    event = EventLog("e").stored(1, [120001])
    assert "<1 tokens>" in repr(event) and "120001" not in repr(event)


def test_events_need_no_torch_and_no_numpy() -> None:
    rooms = "kvplug.transport.events, kvplug.transport.lease"
    code = f"import sys, {rooms}; print({{'torch', 'numpy'}} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "set()", found.stderr


# -- any store, any loss -----------------------------------------------------------------------


class Following(RuleBasedStateMachine):
    """A store that restarts, a line that loses, repeats and is cut off, and a follower at its end.

    Whenever the follower says it is ready *and* nothing is on the line, its copy is the store.
    Whenever it says so at all, its copy is what the store was at the follower's position.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0
        self.restart()
        self.follower = Follower()
        self.copy: dict[int, tuple[int, ...]] = {}
        self.line: list[StoreEvent] = []
        self.lossless = False
        self.past: dict[tuple[str, int], dict[int, tuple[int, ...]]]

    @rule()
    def restart(self) -> None:
        self.epochs += 1
        self.log = EventLog(str(self.epochs), history=3)
        self.held: dict[int, tuple[int, ...]] = {}
        self.past = {**getattr(self, "past", {}), self.log.position: {}}
        self.lossless = False

    def publish(self, event: StoreEvent) -> None:
        self.past[self.log.position] = dict(self.held)
        self.line.append(event)

    @rule(entry_id=st.integers(0, 4), token=st.integers(0, 9))
    def store(self, entry_id: int, token: int) -> None:
        if entry_id not in self.held:
            self.held[entry_id] = (token, entry_id)
            self.publish(self.log.stored(entry_id, self.held[entry_id]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        entry_id = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[entry_id]
        self.publish(self.log.removed(entry_id, "taken"))

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
        match event:
            case Snapshot():
                self.copy = {}
            case Stored():
                assert event.entry_id not in self.copy
                self.copy[event.entry_id] = tuple(event.token_ids)
            case Removed():
                del self.copy[event.entry_id]

    @rule(cut=st.booleans())
    def catch_up(self, cut: bool) -> None:
        """A new connection: the old line is gone, the store sends what was missed, then live events."""
        self.line = self.log.since(self.follower.position)
        self.lossless = True
        if cut and self.line:
            self.line.pop()
            self.lossless = False

    @invariant()
    def a_ready_follower_is_right(self) -> None:
        if not self.follower.ready:
            return
        position = self.follower.position
        assert position is not None
        assert self.copy == self.past[position]
        if self.lossless and not self.line:
            assert position == self.log.position and self.copy == self.held

    @invariant()
    def a_whole_line_makes_it_ready(self) -> None:
        if self.lossless and not self.line:
            assert self.follower.ready


TestFollowing = Following.TestCase
TestFollowing.settings = settings(
    max_examples=3 * settings.default.max_examples // 2, stateful_step_count=40, deadline=None
)
