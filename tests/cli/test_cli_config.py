"""``kvplug config show`` and ``kvplug config check``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

GOOD = """
connector = "letter"
transport = "carrier-pigeon"
role = "producer"
[options.carrier-pigeon]
birds = 3
"""


def write(site: Any, text: str, name: str = "kvplug.toml") -> str:
    path: Path = site.folder / name
    path.write_text(text)
    return str(path)


def test_show_prints_every_value_with_its_source_and_never_a_secret(birds: Any) -> None:
    path = write(birds, GOOD)
    given = {"KVPLUG_TIMEOUT_S": "5 s", "KVPLUG_SECRET": "hunter2-hunter2-hunter2"}
    done = birds.kvplug("config", "show", "--config", path, "port=5000", **given)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in done.stdout.splitlines()}
    assert rows["connector"] == f"letter {path}"
    assert rows["port"] == "5000 command line"
    assert rows["timeout_s"] == "5 s KVPLUG_TIMEOUT_S"
    assert rows["heartbeat_timeout_s"] == "5 s default"
    assert rows["buffer_size"] == "1 GiB default"
    assert rows["options.carrier-pigeon.birds"] == f"3 {path}"
    assert rows["options.carrier-pigeon.rest_s"] == "0.5 s default"
    assert "hunter2" not in done.stdout + done.stderr


def test_show_tells_every_fault_of_form_and_shows_nothing(birds: Any) -> None:
    done = birds.kvplug("config", "show", "pot=3", "rank=9")
    assert done.returncode == 1
    assert "pot: not a known key; did you mean 'port'? [command line]" in done.stderr
    assert "rank: not a known key any more" in done.stderr
    assert done.stdout == ""


def test_check_of_a_good_file_says_so_and_does_not_look_at_the_environment(birds: Any) -> None:
    path = write(birds, GOOD)
    done = birds.kvplug("config", "check", path, KVPLUG_PORT="x")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{path}: no faults\n", "")


def test_check_tells_every_fault_at_once_names_and_options_too(birds: Any) -> None:
    path = write(
        birds,
        """
        connector = "leter"
        prt = 3
        secret_file = "/nowhere/at/all"
        [options.carrier-pigeon]
        bird = 3
        [options.owl]
        a = 1
        [options.flock]
        a = 1
        """,
    )
    done = birds.kvplug("config", "check", path)
    assert done.returncode == 1
    assert f"bad configuration in {path}, 6 faults:" in done.stderr
    for part in (
        "connector: no connector named 'leter'; did you mean 'letter'?",
        "prt: not a known key; did you mean 'port'?",
        "options.carrier-pigeon.bird: not a known key; did you mean 'birds'?",
        "options.owl: nothing of that name is installed",
        "'flock' takes no options",
        "secret_file /nowhere/at/all: No such file",
    ):
        assert part in done.stderr


def test_check_reads_vllms_json(birds: Any) -> None:
    data = {
        "kv_connector": "KvplugConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connector": "letter"},
    }
    path = write(birds, json.dumps(data), "kv.json")
    assert birds.kvplug("config", "check", path).returncode == 0


def test_check_notes_what_must_come_from_elsewhere(birds: Any) -> None:
    path = write(birds, 'connector = "letter"\nhost = "192.0.2.7"')
    done = birds.kvplug("config", "check", path)
    assert done.returncode == 0
    assert "note: role is not set here" in done.stderr
    assert "note: host: 192.0.2.7" in done.stderr
    assert "KVPLUG_SECRET" in done.stderr
    done = birds.kvplug("config", "check", path, KVPLUG_SECRET="0123456789abcdef")
    assert "KVPLUG_SECRET" not in done.stderr


@pytest.mark.parametrize(("name", "text"), [("a.toml", "port = "), ("a.json", "{"), ("a.yaml", "port: 1")])
def test_check_of_what_cannot_be_read_exits_with_two(birds: Any, name: str, text: str) -> None:
    done = birds.kvplug("config", "check", write(birds, text, name))
    assert done.returncode == 2
    assert done.stderr.startswith("kvplug: bad configuration in ")


def test_a_secret_is_made_for_this_user_alone_and_never_overwritten(birds: Any, tmp_path: Path) -> None:
    path = tmp_path / "the secret"
    done = birds.kvplug("config", "secret", str(path))
    assert done.returncode == 0
    assert (done.stdout, path.stat().st_mode & 0o777) == (f'secret_file = "{path}"\n', 0o600)
    made = path.read_text()
    assert len(made.strip()) == 64
    (tmp_path / "kvplug.toml").write_text(f'host = "192.0.2.7"\n{done.stdout}')
    checked = birds.kvplug("config", "check", str(tmp_path / "kvplug.toml"))
    assert checked.returncode == 0
    assert "note: host" not in checked.stderr
    again = birds.kvplug("config", "secret", str(path))
    assert again.returncode == 2
    assert "exists" in again.stderr
    assert path.read_text() == made
