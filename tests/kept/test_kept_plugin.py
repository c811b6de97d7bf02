"""Plugins from the days of plugin API 1.0, as they were installed then, work in today's kvplug."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parent


def test_each_wheel_is_the_one_that_was_built_then() -> None:
    recorded = [line.split() for line in (KEPT / "SHA256SUMS").read_text().splitlines()]
    wheels = sorted(KEPT.glob("*.whl"))
    found = [[hashlib.sha256(wheel.read_bytes()).hexdigest(), wheel.name] for wheel in wheels]
    assert found == recorded, "kept wheels are not built again: restore the file that was committed"


def test_each_loads_with_the_first_api(kept: Any) -> None:
    offers = {
        "kept": ["kept", "kept-connector", "kept-sink", "kept-pipe"],
        "kept-store": ["kept-store"],
        "kept-transport": ["kept-transport"],
    }
    for name, names in offers.items():
        assert kept.plugin(name) == {
            "version": "1.0.0",
            "status": "ok",
            "reason": "",
            "api": [1, 0],
            "offers": names,
        }


def test_its_options_are_shown_and_read(kept: Any) -> None:
    shown = kept.kvplug("list", "--options", "kept-pipe").stdout
    assert "greeting" in shown
    assert "1 MiB" in shown
    given = '{"greeting": "loud", "chunk_bytes": "64 KiB", "poll_s": "20 ms"}'
    answer = kept.evaluate(
        f"""
        cls = registry.get(Kind.PIPE, "kept-pipe").load_options()
        made = check_options(cls, {given})
        try:
            check_options(cls, {{"greeting": "shy", "chunks": 3}})
        except ConfigError as e:
            faults = e.faults
        answer = [made.greeting, made.chunk_bytes, made.poll_s, len(faults)]
        """
    )
    assert answer == ["loud", 64 * 1024, 0.02, 2]


def test_its_command_runs(kept: Any) -> None:
    assert kept.kvplug("kept", "--times", "2").stdout == "the first plugin API the first plugin API\n"


def test_it_keeps_the_laws_of_plugins(kept: Any) -> None:
    done = kept.run("-c", "from kvplug_testing import check_plugin; print(check_plugin('kept'))")
    assert done.returncode == 0, done.stderr
