"""``kvplug explain``: every step of a config with its reason; nothing is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def explained(site: Any, *arguments: str, **environment: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The exit code, and the steps by topic."""
    done = site.kvplug("explain", "--json", *arguments, **environment)
    assert not done.stderr, done.stderr
    steps: dict[str, list[dict[str, Any]]] = {}
    for step in json.loads(done.stdout):
        steps.setdefault(step["topic"], []).append(step)
    return done.returncode, steps


def test_a_config_that_works_says_what_is_taken_and_why_and_makes_nothing(site: Any, tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    code, steps = explained(
        site, "role=both", "stores=host,fs", f"options.fs.path={folder}", "host=unix:@explained"
    )
    assert code == 0
    assert not [step for topic in steps.values() for step in topic if step["verdict"] == "problem"]
    assert "listens at unix:@explained-0: only processes of this host" in steps["host"][0]["text"]
    assert [step["text"].partition(" from ")[0] for step in steps["stores"]] == ["host", "fs"]
    assert "not_worth_it in metrics" in steps["options.lookup.load_policy"][0]["text"]
    assert "restarts and peers can load KV where the engine finds" in steps["weights"][0]["text"]
    (transport,) = steps["transport"]
    assert "go by shm: the cheapest that can" in transport["text"]
    assert any(detail.startswith("cpu: could be used, but claims") for detail in transport["details"])
    assert any("pynccl: cannot work here" in detail for detail in transport["details"])
    assert not any("at the peer" in detail for detail in transport["details"])
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "topic", "said"),
    [
        ([], "role", "set it to producer, consumer or both"),
        (["role=both", "host=10.0.0.4"], "secret", "set KVPLUG_SECRET or secret_file"),
        (["role=both", "stores=fs"], "options.fs.path", "must be given"),
        (["role=both", "stores=fd"], "stores", "no store named 'fd'"),
        (["role=both", "transport=pynccl"], "transport", "'pynccl' is named here and cannot be used"),
        (["role=bath"], "config", "role: 'bath' was given"),
        (["role=both", "port=65535", "port_offset=1"], "config", "rank 0 would listen at 65536"),
    ],
)
def test_what_would_not_work_is_a_problem(site: Any, arguments: list[str], topic: str, said: str) -> None:
    code, steps = explained(site, *arguments)
    assert code == 1
    assert any(step["verdict"] == "problem" and said in step["text"] for step in steps[topic]), steps


def test_between_hosts_only_what_reaches_them_is_taken(site: Any) -> None:
    code, steps = explained(
        site, "role=both", "host=10.0.0.4", "peers=10.0.0.5:29555", KVPLUG_SECRET="s" * 32
    )
    assert code == 0
    here, there = (step["text"] for step in steps["transport"])
    assert "on this host go by shm" in here
    assert "on another host go by cpu" in there
    assert steps["peers"][0]["text"].startswith("KV of the engine at 10.0.0.5:29555 is loaded")


def test_plugins_that_did_not_load_are_named_and_lines_fit_a_terminal(site: Any) -> None:
    site.add("bad", "import a_module_that_is_not_there")
    done = site.kvplug("explain", "role=both", "integrity=off")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "bad (kvplug-bad 1.0) is broken" in " ".join(" ".join(lines).split())
    assert any(line.startswith("note     integrity") for line in lines)
