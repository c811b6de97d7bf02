"""Which transport joins two ends: pure, symmetric, and every candidate says why."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvplug.errors import HandshakeError
from kvplug.negotiation.select import Candidate, Offer, Selection, select
from kvplug.transport.capabilities import Capabilities, Requirements
from kvplug.transport.spec import Probe

HERE = Requirements()
APART = Requirements(cross_host=True)
EXPOSED = Requirements(cross_host=True, authenticated=True)


def offer(
    name: str, *, us: float = 10.0, gb: float = 1.0, protocol: int = 1, auto: bool = True, **more: Any
) -> Offer:
    probe = Probe(**{key: more.pop(key) for key in ("viable", "reason", "domain") if key in more})
    capabilities = Capabilities(cost=Capabilities.Cost(latency_us=us, gb_per_s=gb), **more)
    return Offer(name=name, protocol=protocol, capabilities=capabilities, probe=probe, auto=auto)


NET = offer("net", us=50, gb=2, cross_host=True)
LOCAL = offer("local", us=5, gb=8, domain="d1")

COSTS = st.builds(
    Capabilities.Cost, latency_us=st.sampled_from([1.0, 5.0, 50.0]), gb_per_s=st.sampled_from([0.5, 2.0, 8.0])
)
OFFERS = st.lists(
    st.builds(
        Offer,
        name=st.sampled_from("abcd"),
        protocol=st.sampled_from([1, 1, 1, 2]),
        capabilities=st.builds(
            Capabilities,
            devices=st.sampled_from([{"cpu"}, {"cuda"}, {"cpu", "cuda"}]),
            cross_host=st.booleans(),
            authenticated=st.booleans(),
            cost=COSTS,
        ),
        probe=st.builds(
            Probe, viable=st.sampled_from([True, True, False]), domain=st.sampled_from(["", "d1", "d2"])
        ),
    ),
    max_size=5,
    unique_by=lambda it: it.name,
)
REQUIRED = st.builds(
    Requirements,
    device=st.sampled_from(["cpu", "cuda"]),
    cross_host=st.booleans(),
    authenticated=st.booleans(),
)
NAMES = st.sampled_from(["auto", "auto", "auto", "a", "b", "z"])


def outcome(local: list[Offer], remote: list[Offer], required: Requirements, named: tuple[str, str]) -> Any:
    """What both ends must see alike, without the words: the choice, or the names of all that were refused."""
    try:
        return select(local, remote, required, named)
    except HandshakeError as e:
        return sorted(reason.partition(":")[0] for reason in e.reasons)


def common(found: Any) -> Any:
    if isinstance(found, list):
        return found
    return found.chosen, [it.name for it in found.candidates]


@given(OFFERS, OFFERS, REQUIRED, NAMES, NAMES, st.randoms())
def test_both_ends_choose_the_same_which_both_can_use_and_every_candidate_has_a_reason(
    a: list[Offer], b: list[Offer], required: Requirements, x: str, y: str, rng: Any
) -> None:
    found = outcome(a, b, required, (x, y))
    assert common(found) == common(outcome(b, a, required, (y, x)))
    shuffled = [rng.sample(offers, len(offers)) for offers in (a, b)]
    assert common(outcome(*shuffled, required, (x, y))) == common(found)
    if isinstance(found, list):
        names = {it.name for it in (*a, *b)} | ({x, y} - {"auto"})
        assert {*found} - {"transport"} == {f"transport {name}" for name in names}
        return
    ours, theirs = (next(it for it in side if it.name == found.chosen) for side in (a, b))
    assert ours.protocol == theirs.protocol
    for it in (ours, theirs):
        assert it.probe.viable
        assert not it.capabilities.missing(required)
    assert ours.probe.domain == theirs.probe.domain or (
        ours.capabilities.cross_host and theirs.capabilities.cross_host
    )
    assert {x, y} <= {"auto", found.chosen}
    assert {it.name for it in found.candidates} == {it.name for it in (*a, *b)}
    assert found.candidates[0].name == found.chosen
    assert all(it.reason for it in found.candidates)


def test_auto_takes_the_cheapest_and_says_by_how_much() -> None:
    found = select([NET, LOCAL], [LOCAL, NET], HERE)
    assert found == Selection(
        "local",
        (
            Candidate("local", "the cheapest that can: 2.1 ms for 16 MiB, by its own claim"),
            Candidate("net", "could be used, but claims 8.44 ms for 16 MiB"),
        ),
    )


def test_the_size_of_the_message_decides_between_latency_and_throughput_and_names_between_equals() -> None:
    quick, wide = offer("quick", us=1, gb=1), offer("wide", us=100, gb=10)
    assert select([quick, wide], [quick, wide], HERE, nbytes=64).chosen == "quick"
    assert select([quick, wide], [quick, wide], HERE, nbytes=64 << 20).chosen == "wide"
    twins = [offer("b"), offer("a")]
    assert select(twins, twins, HERE).chosen == "a"


@pytest.mark.parametrize(
    ("ours", "theirs", "required", "reason"),
    [
        (LOCAL, None, HERE, "not installed at the peer"),
        (None, LOCAL, HERE, "not installed here"),
        (offer("local", viable=False, reason="no /dev/shm"), LOCAL, HERE, "cannot work here: no /dev/shm"),
        (LOCAL, offer("local", viable=False, domain="d1"), HERE, "cannot work at the peer: its probe gives"),
        (LOCAL, offer("local", protocol=2, domain="d1"), HERE, "protocol 1 here and 2 at the peer; install"),
        (LOCAL, offer("local", domain="d2"), HERE, "cannot reach each other"),
        (LOCAL, LOCAL, APART, "one host only, but the peer is on another"),
        (
            offer("net", cross_host=True, authenticated=False),
            NET,
            EXPOSED,
            "its data plane is not authenticated",
        ),
        (offer("net", devices={"cuda"}), offer("net", devices={"cuda"}), HERE, "moves cuda tensors, but cpu"),
    ],
)
def test_a_candidate_that_cannot_be_used_says_why(
    ours: Offer | None, theirs: Offer | None, required: Requirements, reason: str
) -> None:
    spare = offer("spare", us=1e6, cross_host=True)
    found = select([it for it in (ours, spare) if it], [it for it in (theirs, spare) if it], required)
    assert found.chosen == "spare"
    assert reason in found.candidates[1].reason


@pytest.mark.parametrize(
    ("theirs", "device", "named", "reasons"),
    [
        (
            [NET, LOCAL],
            "cpu",
            ("net", "local"),
            [
                "transport: ours 'net', theirs 'local'; name the same one at both ends, or leave",
                "transport local: could be used",
                "transport net: could be used",
            ],
        ),
        (
            [NET],
            "cpu",
            ("local", "auto"),
            [
                "transport: 'local' is named here and cannot be used; these could be: net, or 'auto'",
                "transport local: not installed at the peer",
                "transport net: could be used",
            ],
        ),
        (
            [NET],
            "cuda",
            ("auto", "auto"),
            [
                "transport: none can move cuda tensors between the two ends; install a transport that can",
                "transport local: not installed at the peer",
                "transport net: moves cpu tensors",
            ],
        ),
    ],
    ids=["two names", "a name that cannot be used", "nothing that can do it"],
)
def test_a_refusal_has_every_candidate(
    theirs: list[Offer], device: str, named: tuple[str, str], reasons: list[str]
) -> None:
    with pytest.raises(HandshakeError) as refusal:
        select([NET, LOCAL], theirs, Requirements(device=device), named)
    assert len(refusal.value.reasons) == len(reasons)
    assert all(map(str.startswith, refusal.value.reasons, reasons)), refusal.value.reasons


def test_what_is_only_for_those_who_name_it_is_no_candidate_of_auto() -> None:
    fake = offer("fake", us=0.001, gb=1000, auto=False)
    found = select([NET, fake], [NET, fake], HERE)
    assert found.chosen == "net"
    assert [each.name for each in found.candidates] == ["net"]
    with pytest.raises(HandshakeError) as refused:
        select([fake], [fake], HERE)
    assert "fake" not in str(refused.value)
    for requested in (("fake", "auto"), ("auto", "fake"), ("fake", "fake")):
        assert select([NET, fake], [NET, fake], HERE, requested).chosen == "fake"
