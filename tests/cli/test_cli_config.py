"""``kvplug config show`` and ``kvplug config check``."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvplug.config.config import KEYS

ROOT = Path(__file__).parents[2]

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
    done = birds.kvplug("config", "show", path, "port=5000", "engine_id=a", **given)
    assert done.returncode == 0, done.stderr
    same = birds.kvplug("config", "show", "--config", path, "port=5000", "engine_id=a", **given)
    assert same.stdout == done.stdout
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
    done = birds.kvplug("config", "show", "pot=3", "peers=10.0.0.5")
    assert done.returncode == 1
    assert "pot: not a known key; did you mean 'port'? [command line]" in done.stderr
    assert "peers: '10.0.0.5' is not an address: the port is missing" in done.stderr
    assert done.stdout == ""


def test_show_takes_one_file_and_names_what_is_neither_a_file_nor_a_key(birds: Any) -> None:
    path = write(birds, GOOD)
    for arguments, said in (
        ((path, "--config", path), "allowed is one file"),
        (("port",), "'port' was given; allowed is FILE.toml, FILE.json or KEY=VALUE"),
        (("=x",), "'=x' was given; allowed is FILE.toml, FILE.json or KEY=VALUE"),
    ):
        done = birds.kvplug("config", "show", *arguments)
        assert (done.returncode, done.stdout) == (2, "") and said in done.stderr


def test_check_of_a_good_file_says_so_and_does_not_look_at_the_environment(birds: Any) -> None:
    path = write(birds, GOOD)
    done = birds.kvplug("config", "check", path, KVPLUG_PORT="x")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{path}: no faults\n", "")


def test_check_tells_every_fault_at_once_names_and_options_too(birds: Any) -> None:
    path = write(
        birds,
        """
        connector = "leter"
        tracing = "zipkin"
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
    assert f"bad configuration in {path}, 7 faults:" in done.stderr
    for part in (
        "  - connector: no connector named 'leter'; did you mean 'letter'?\n    known: ",
        "tracing: no installed package offers the exporter 'zipkin'",
        "prt: not a known key; did you mean 'port'?",
        "options.carrier-pigeon.bird: not a known key; did you mean 'birds'?",
        "options.owl: nothing with that name is installed",
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


# -- the schema ------------------------------------------------------------------------------------


def schema_of(birds: Any) -> dict[str, Any]:
    done = birds.kvplug("config", "schema")
    assert (done.returncode, done.stderr) == (0, "")
    schema: dict[str, Any] = json.loads(done.stdout)
    return schema


def test_the_schema_has_every_key_and_the_options_of_each_plugin(birds: Any) -> None:
    schema = schema_of(birds)
    keys = schema["$defs"]["configuration"]["properties"]
    assert [*keys] == [*KEYS, "options"]
    assert all(each.get("description") for key, each in keys.items() if key != "options")
    assert (keys["port"]["type"], keys["port"]["maximum"], keys["port"]["default"]) == (
        "integer",
        65535,
        29555,
    )
    assert keys["slow_path"]["enum"] == ["off", "refuse", "warn"]
    assert [each["type"] for each in keys["buffer_size"]["anyOf"]] == ["integer", "string"]
    pigeon = schema["$defs"]["options.carrier-pigeon"]
    assert pigeon["properties"]["birds"]["minimum"] == 1
    assert not pigeon["additionalProperties"] and pigeon["required"] == []


DATA = tomllib.loads(GOOD)
FITS: dict[str, Any] = {
    "the file": DATA,
    "a size with a unit": DATA | {"buffer_size": "4 GiB"},
    "a plain size": DATA | {"buffer_size": 4096},
    "a list": DATA | {"stores": ["nest"]},
    "nothing": {},
}
DOES_NOT_FIT: dict[str, Any] = {
    "another key": DATA | {"prt": 3},
    "an ambiguous size": DATA | {"buffer_size": "64M"},
    "beyond a bound": DATA | {"port": 70000},
    "another choice": DATA | {"slow_path": "wran"},
    "another type": DATA | {"tls_check_host": "yes"},
    "another option": DATA | {"options": {"carrier-pigeon": {"bird": 3}}},
    "another plugin": DATA | {"options": {"owl": {}}},
}


def test_a_validator_of_schemas_takes_right_files_and_refuses_wrong_ones(birds: Any) -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema_of(birds))
    validator.check_schema(validator.schema)
    pages = (ROOT / "README.md", ROOT / "docs/reference/config.md")
    files = [text for page in pages for text in re.findall("```toml\n(.*?)```", page.read_text(), re.S)]
    assert files
    for text in files:
        core = {key: value for key, value in tomllib.loads(text).items() if key in KEYS}
        assert validator.is_valid(core), text
    assert [what for what, data in FITS.items() if not validator.is_valid(data)] == []
    assert [what for what, data in DOES_NOT_FIT.items() if validator.is_valid(data)] == []
