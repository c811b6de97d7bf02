"""A plugin from the days of plugin API 1.0, as it was installed then, works in today's kvplug."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest

KEPT = Path(__file__).parent
WHEEL = KEPT / "kvplug_kept-1.0.0-py3-none-any.whl"


@pytest.fixture
def kept(site: Any) -> Any:
    """A place where it is installed, as pip unpacks such a wheel."""
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(site.folder / "site")
    return site


WHEELS = sorted(KEPT.glob("*.whl"))


def test_each_wheel_is_the_one_that_was_built_then() -> None:
    recorded = [line.split() for line in (KEPT / "SHA256SUMS").read_text().splitlines()]
    found = [[hashlib.sha256(wheel.read_bytes()).hexdigest(), wheel.name] for wheel in WHEELS]
    assert found == recorded, "kept wheels are not built again: restore the file that was committed"


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: wheel.name.partition("-")[0])
def test_each_wheel_holds_the_source_beside_it_and_is_for_the_first_api(wheel: Path) -> None:
    module = wheel.name.partition("-")[0]
    with zipfile.ZipFile(wheel) as opened:
        packed = {name: opened.read(name) for name in opened.namelist() if name.startswith(f"{module}/")}
    source = KEPT / module.replace("_", "-")
    beside = {str(path.relative_to(source)): path.read_bytes() for path in (source / module).glob("*.py")}
    assert packed == beside
    assert b"\nKVPLUG_API = (1, 0)\n" in packed[f"{module}/plugin.py"]


def test_it_loads(kept: Any) -> None:
    assert kept.plugin("kept") == {
        "name": "kept",
        "distribution": "kvplug-kept",
        "version": "1.0.0",
        "status": "ok",
        "reason": "",
        "api": [1, 0],
        "offers": ["kept", "kept-connector", "kept-sink", "kept-pipe"],
    }


def test_its_options_are_shown_and_read(kept: Any) -> None:
    shown = kept.kvplug("list", "--options", "kept-pipe").stdout
    assert "greeting" in shown
    assert "1 MiB" in shown
    given = '{"greeting": "loud", "chunk_bytes": "64 KiB", "poll_s": "20 ms"}'
    answer = kept.ask(
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


def test_its_connector_is_called_and_its_sink_hears_of_it(kept: Any) -> None:
    answer = kept.ask(
        """
        from kvplug import *
        from kvplug.engine import *
        from kvplug.transport import *
        config = Config.from_dict({
            "connector": "kept-connector", "role": "producer", "sinks": ["kept-sink"],
            "options": {"kept-sink": {"path": "lines"}, "kept-connector": {"folder": "nowhere"}},
        })
        layout = KVLayout("KBTHD", {"T": 4, "H": 2, "D": 8})
        cache = KVCacheConfig(groups=(CacheGroup(layer_names=("a", "b"), layout=layout),), num_blocks=8)
        model = ModelInfo(num_layers=2, num_kv_heads=2, head_size=8, dtype="float32", weights="w")
        side = build_connector(config, "scheduler", model=model, cache=cache)
        request = Request(request_id="r", token_ids=(1, 2, 3, 4, 5), num_prompt_tokens=5)
        side.on_new_request(request)
        matched = side.get_num_new_matched_tokens(request, 0)
        side.update_state_after_alloc(request, ((0, 1),), 0)
        step = SchedulerOutput(
            step=1,
            scheduled=(ScheduledRequest(request_id="r", num_computed_tokens=0, num_scheduled_tokens=5),),
            block_ids=lambda request_id: ((0, 1),),
        )
        meta = side.build_connector_meta(step)
        side.update_connector_output(WorkerOutput())
        ended = side.request_finished(request, ((0, 1),), RequestEnd.FINISHED)
        side.context.stats.record("load", 100, 0.1)
        side.shutdown()
        with open("lines") as file:
            answer = [matched, meta, ended, side.calls, side.context.options.folder, file.read()]
        """
    )
    assert answer == [
        [0, False],
        {"step": 1, "requests": [["r", 0, 5]]},
        [False, None],
        [
            ["match", "r", 5],
            ["alloc", "r", [[0, 1]], 0],
            ["output", []],
            ["finished", "r", "finished"],
        ],
        "nowhere",
        "kept-connector {'load': 1}\n",
    ]


def test_it_keeps_the_laws_of_plugins(kept: Any) -> None:
    done = kept.run("-c", "from kvplug_testing import check_plugin; print(check_plugin('kept'))")
    assert done.returncode == 0, done.stderr
