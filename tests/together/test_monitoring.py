"""The dashboard and the alert rules of the docs, in a real Prometheus that scrapes engines with faults."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from kvplug_lab import monitored

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "monitoring"
PROMTOOL = shutil.which("promtool")

pytestmark = pytest.mark.skipif(
    PROMTOOL is None or monitored.PROGRAM is None, reason="Prometheus is not installed"
)


def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(
        [str(PROMTOOL), "check", "rules", FOLDER / "alerts.yml"], capture_output=True, timeout=60
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


@pytest.mark.full
@pytest.mark.timeout(400)
def test_no_panel_is_empty_and_each_alert_fires_for_its_fault_and_in_no_good_run() -> None:
    with monitored.Run(FOLDER / "alerts.yml") as run:
        rules = run.prometheus.request("rules", type="alert")["groups"][0]["rules"]
        assert {rule["name"] for rule in rules} == {alert for alert, _ in run.expected}
        run.work(12)
        assert not run.prometheus.firing(), "nothing is wrong yet"
        run.break_all()
        run.work(40, is_done=lambda: run.prometheus.firing() >= run.expected)
        run.work(2)
        firing = run.prometheus.firing()
        assert firing >= run.expected, f"silent: {run.expected - firing}"
        assert not [job for _, job in firing if job.startswith("good")], firing
        empty = [
            (panel["title"], target["expr"])
            for panel in monitored.panels_of(FOLDER)
            for target in panel["targets"]
            if not any(
                math.isfinite(float(value))
                for each in run.series(target["expr"])
                for _, value in each["values"]
            )
        ]
        assert not empty, json.dumps(empty, indent=1)
        for op in ("load", "save", "match", "wait"):
            assert run.exemplars(f"kvplug_{op}_duration_seconds_bucket"), f"no {op} has a trace"
