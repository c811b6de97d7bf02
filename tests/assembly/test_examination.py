"""What a doctor makes of facts and of a peer's words, without a peer."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from kvplug import Config, Registry
from kvplug.assembly.doctor.finding import from_reasons
from kvplug.assembly.doctor.host import of_two_hosts
from kvplug.assembly.doctor.peer import rate_finding
from kvplug.assembly.examination import Measured, Report, connector_options
from kvplug.assembly.host import HostFacts
from kvplug.assembly.links import LinkSettings
from kvplug.assembly.registry import PluginInfo, PluginStatus
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.errors import Reason, WireError


def test_texts_of_a_peer_are_made_fit_for_a_terminal_and_are_bounded() -> None:
    evil = "a\x1b[31m\nb" * 1000
    host = {"host": evil, "interfaces": {evil: [evil]}}
    answer = {
        "doctor": evil,
        "host": host,
        "missing": [evil] * 1000,
        "connector": evil,
        "options": {"a": evil},
    }
    report = Report.from_peer(answer)
    assert json.dumps(attrs.asdict(report), ensure_ascii=False).isprintable()
    assert report.host is not None and len(report.host.host) <= 400
    assert len(report.missing) == 256


@pytest.mark.parametrize(
    "answer",
    [None, 5.0, [], {}, {"doctor": []}, {"doctor": "look", "host": 7}, {"missing": [{}], "doctor": ""}],
)
def test_an_invalid_report_of_a_peer_is_refused(answer: Any) -> None:
    with pytest.raises(WireError, match="the report"):
        Report.from_peer(answer)


def test_hosts_apart_in_time_and_version_are_named() -> None:
    here = HostFacts(boot_id="a", host="a", time_ms=10**12, versions={"kvplug": "1.0", "torch": "2"})
    there = attrs.evolve(
        here, boot_id="b", host="b", time_ms=10**12 + 60_000, versions={"kvplug": "1.1", "torch": "3"}
    )
    found = {each.topic: each for each in of_two_hosts(here, there)}
    assert (found["clocks"].verdict, found["clocks"].what) == (
        "problem",
        "the two hosts' clocks are 60 s apart",
    )
    assert found["versions"].what == "kvplug: 1.0 here, 1.1 at the peer"
    assert found["versions"].change.startswith("pip install --upgrade kvplug    (at the end with the lower")
    soon = attrs.evolve(there, time_ms=10**12 + 2000, versions=here.versions)
    assert {each.verdict for each in of_two_hosts(here, soon)} == {"ok"}


@pytest.mark.parametrize(
    ("gb_per_s", "cross_host", "load", "verdict"),
    [
        (8.0, False, 0.5, "ok"),
        (1.0, False, 0.5, "note"),
        (1.0, False, 3.0, "ok"),
        (0.2, False, 0.5, "problem"),
        (0.2, False, 3.0, "ok"),
        (0.05, False, 3.0, "note"),
        (0.01, False, 3.0, "problem"),
        (0.01, True, 0.5, "note"),
    ],
)
def test_a_rate_is_judged_by_the_claim_the_host_and_its_load(
    gb_per_s: float, cross_host: bool, load: float, verdict: str
) -> None:
    measured = Measured(
        transport="shm", device="cpu", gb_per_s=gb_per_s, claimed_gb_per_s=15.0, num_bytes=1 << 20
    )
    found = rate_finding(measured, cross_host, load)
    assert (found.verdict, bool(found.change)) == (verdict, verdict != "ok")


def test_a_refusal_becomes_what_why_and_the_line_to_change() -> None:
    reasons = (
        Reason("dtype", "ours 'a', theirs 'b'", "set the dtype to the same at both ends; no more"),
        Reason("transport", "none can move cpu tensors between the two ends", "install one"),
        Reason("transport shm", "cannot work here"),
        "the peer gave no reason",
    )
    dtype, transport, other = from_reasons(reasons, "pid 5")
    assert (dtype.topic, dtype.what) == ("dtype", "refused with pid 5: ours 'a', theirs 'b'")
    assert dtype.change == "set the dtype to the same at both ends; no more"
    assert (transport.why, transport.change) == (("shm: cannot work here",), "install one")
    assert (other.topic, other.what) == ("handshake", "refused with pid 5: the peer gave no reason")


def test_of_an_option_that_may_be_a_secret_or_a_path_only_its_presence_is_reported() -> None:
    secrets = ("api_token", "Password", "db_pwd", "credentials", "AUTH", "access_keys")
    given = {
        **dict.fromkeys(secrets, "t0p"),
        "password_file": "/etc/t0p",
        "url": "redis://me:t0p@host",
        "hosts": ["t0p"],
        "page_tokens": "16",
    }
    plain = {"async_load": True, "max_unsaved": "16 MiB", "load_policy": "always", "stall_timeout_s": 0.5}

    def reported(options: dict[str, Any]) -> dict[str, str]:
        known = {"connector": "lookup", "role": "both", "options": {"lookup": options}}
        return connector_options(Config.from_dict(known))

    assert reported(given) == {**dict.fromkeys(given, "(given)"), "page_tokens": "16"}
    assert reported(plain) == {key: str(value) for key, value in plain.items()}


def test_of_a_plugin_that_did_not_load_its_name_is_reported_and_not_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "OSError: secrets/t0p: redis://me:t0p@host"
    missing = PluginInfo(
        name="shm", distribution="kvplug-shm", version="0.1.0", status=PluginStatus.BROKEN, reason=reason
    )
    monkeypatch.setattr(Registry, "failed", (missing,))
    report = Report.of(LinkSettings(resolved=ResolvedConfig(Config(), Registry())))
    assert report.missing == ("broken: shm (kvplug-shm 0.1.0)",)
    assert "t0p" not in str(report)
