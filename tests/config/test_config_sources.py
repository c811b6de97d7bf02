"""Where configuration comes from: files, documents, the environment, the command line, vLLM's JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvplug import Config, ConfigError
from kvplug.config.sources import RESERVED
from kvplug.engine import Role

TOML = """
connector = "lookup"
role = "producer"
buffer_size = "2 GiB"

[options.cpu]
connections = 4
"""


JSON = json.dumps({"role": "producer", "buffer_size": "2 GiB", "options": {"cpu": {"connections": 4}}})


@pytest.mark.parametrize(("text", "file"), [(TOML, "kvplug.toml"), (JSON, "kvplug.json")])
def test_a_file_is_read(text: str, file: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.write_text(text)
    for given in (path, str(path)):
        config = Config.load(given, environ={})
        assert (config.role, config.buffer_size) == (Role.PRODUCER, 2 * 2**30)
        assert config.options == {"cpu": {"connections": 4}}
        assert config.source_of("buffer_size") == config.source_of("options.cpu.connections") == str(path)


UNREADABLE: dict[str, tuple[str | bytes, str]] = {
    "nothing.toml": ("port = ", "not TOML: Invalid value"),
    "twice.toml": ("port = 1\nport = 2", r"not TOML: Cannot overwrite a value \([^;]*$"),
    "deep.toml": ("a = " + "[" * 5000, "not TOML"),
    "unquoted.toml": (
        "role = 'both'\nconnector = lookup # fast",
        r'not TOML: .*line 2.*; text needs quotes: connector = "lookup"$',
    ),
    "dotted.toml": ("host = 10.0.0.5", r'not TOML: .*; text needs quotes: host = "10.0.0.5"'),
    "open.json": ("{", "not JSON"),
    "list.json": ("[]", "a table of keys and values is needed"),
    "twice.json": ('{"port": 0, "port": 1}', "the key 'port' is given twice"),
    "long.json": ('{"port": ' + "9" * 5000 + "}", "not JSON"),
    "nan.json": ('{"timeout_s": NaN}', "timeout_s"),
    "deep.json": ('{"a": ' * 100_000, "not JSON"),
    "kvplug.yaml": ("", "the file's name must end in .toml or .json"),
    "latin.toml": (
        b"# \xc3\xa9\nconnector = '\xff'",
        "cannot be read: line 2 is not UTF-8: it has the byte 0xff",
    ),
    "zero.toml": ("port = 0", "port: 0 was given"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read_or_has_a_fault_is_named_with_the_reason(
    name: str, tmp_path: Path
) -> None:
    text, said = UNREADABLE[name]
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=rf"{tmp_path / name}.*: {said}"):
        Config.load(tmp_path / name, environ={})


def test_a_file_that_is_not_there_or_a_folder_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    for name, said in (("nowhere.toml", "No such file"), ("folder.toml", "Is a directory")):
        with pytest.raises(ConfigError, match=rf"{tmp_path / name}: cannot be read: {said}"):
            Config.load(tmp_path / name, environ={})


# -- environment -----------------------------------------------------------------------------------


def test_every_key_has_a_variable_and_so_has_every_option() -> None:
    config = Config.load(
        environ={
            "KVPLUG_ROLE": "both",
            "KVPLUG_PORT": "5000",
            "KVPLUG_BUFFER_SIZE": "64 MiB",
            "KVPLUG_ALLOW_UNAUTHENTICATED_DATA_PLANE": "yes",
            "KVPLUG_OPTIONS__CUDA_IPC__MAX_IN_FLIGHT_BYTES": "1 MiB",
            "KVPLUG_ENGINE_ID": "",
            "PATH": "/bin",
        }
    )
    assert (config.role, config.port, config.buffer_size) == (Role.BOTH, 5000, 64 * 2**20)
    assert config.allow_unauthenticated_data_plane is True
    assert config.options == {"cuda-ipc": {"max_in_flight_bytes": "1 MiB"}}
    assert config.source_of("port") == "KVPLUG_PORT"
    assert config.source_of("engine_id") == "generated"


def test_wrong_variables_are_named_with_a_suggestion_and_values_of_unknown_ones_not_repeated() -> None:
    unknown = ("KVPLUG_SECERT", "KVPLUG_PRT", "KVPLUG_OPTIONS__A")
    with pytest.raises(ConfigError) as caught:
        Config.load(environ={**dict.fromkeys(unknown, "hunter2"), "KVPLUG_PORT_OFFSET": "z"})
    text = str(caught.value)
    for said in (
        "KVPLUG_SECERT: not a kvplug variable; did you mean 'KVPLUG_SECRET'?",
        "KVPLUG_PRT: not a kvplug variable; did you mean 'KVPLUG_PORT'?",
        "KVPLUG_OPTIONS__A: the variable of an option is KVPLUG_OPTIONS__<NAME>__<OPTION>",
        "[KVPLUG_PORT_OFFSET]",
    ):
        assert said in text
    assert "port_offset: 'z' was given" in text and "hunter2" not in text


@pytest.mark.parametrize("name", [*RESERVED, "KVPLUG_LOG_FORMAT", "KVPLUG_TEST_INSTALLED"])
def test_reserved_variables_are_not_options(name: str) -> None:
    config = Config.load(environ={name: "" if name == "KVPLUG_CONFIG" else "0123456789abcdef-secret"})
    assert "secret" not in repr(config).replace("secret_file", "")
    assert config.sources == {}
    with pytest.raises(ConfigError):
        Config.from_dict({name.removeprefix("KVPLUG_").lower(): "x"})


def test_variables_that_kubernetes_makes_of_a_service_named_kvplug_are_explained() -> None:
    environ = {
        "KVPLUG_PORT": "tcp://10.0.0.1:80",
        "KVPLUG_SERVICE_HOST": "10.0.0.1",
        "KVPLUG_SERVICE_PORT": "80",
        "KVPLUG_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    with pytest.raises(ConfigError) as caught:
        Config.load(environ=environ)
    (fault,) = caught.value.faults
    assert all(name in fault for name in environ)
    assert "enableServiceLinks" in fault


# -- precedence ------------------------------------------------------------------------------------


def test_the_command_line_goes_before_the_environment_before_the_file_before_defaults(tmp_path: Path) -> None:
    path = tmp_path / "kvplug.toml"
    path.write_text("port = 1001\nport_offset = 1\ntimeout_s = 11\n[options.cpu]\na = 1\nb = 1\nc = 1")
    environ = {"KVPLUG_PORT": "x", "KVPLUG_PORT_OFFSET": "2", "KVPLUG_OPTIONS__CPU__B": "2"}
    for config in (
        Config.load(path, environ=environ, overrides=["port=1003", "options.cpu.c=3"]),
        Config.load(
            environ={**environ, "KVPLUG_CONFIG": str(path)}, overrides=["port=1003", "options.cpu.c=3"]
        ),
    ):
        values = (config.port, config.port_offset, config.timeout_s, config.connect_timeout_s)
        assert values == (1003, 2, 11, 60), "a fault beneath a right value is not a fault"
        assert config.options == {"cpu": {"a": 1, "b": "2", "c": "3"}}
        sources = [config.source_of(key) for key in ("port", "port_offset", "timeout_s", "connect_timeout_s")]
        assert sources == ["command line", "KVPLUG_PORT_OFFSET", str(path), "default"]
        assert config.source_of("options.cpu.b") == "KVPLUG_OPTIONS__CPU__B"


# -- vLLM ------------------------------------------------------------------------------------------

VLLM: dict[str, Any] = {
    "kv_connector": "KvplugConnector",
    "kv_role": "kv_both",
    "kv_rank": 1,
    "kv_parallel_size": 2,
    "kv_ip": "127.0.0.1",
    "kv_port": 14579,
    "kv_buffer_device": "cuda",
    "kv_buffer_size": 1e9,
    "engine_id": "abc",
    "kv_load_failure_policy": "fail",
    "kv_connector_module_path": "kvplug_vllm.connector",
    "enable_permute_local_kv": False,
    "kv_connector_extra_config": {
        "connector": "p2p",
        "transport": "cpu",
        "timeout_s": "5 s",
        "options": {"cpu": {"connections": 1}},
    },
}


def test_vllms_json_is_accepted_as_it_is() -> None:
    config = Config.from_dict(VLLM)
    assert (config.connector, config.transport, config.role) == ("p2p", "cpu", Role.BOTH)
    assert (config.host, config.port) == ("127.0.0.1", 14579)
    assert (config.device, config.buffer_size, config.engine_id) == ("cuda", 10**9, "abc")
    assert config.timeout_s == 5.0
    assert config.options == {"cpu": {"connections": 1}}
    assert config.source_of("port") == "kv_port"
    assert config.source_of("transport") == "kv_connector_extra_config"


@pytest.mark.parametrize(
    ("given", "extra", "said"),
    [
        ("lookup", {"connector": "p2p"}, ["'lookup' was given, but kv_connector_extra_config"]),
        ("lookup", 3, ["kv_connector_extra_config: 3 was given"]),
        (
            "KvplugConnector",
            {"kv_load_failure_policy": "recompute", "prot": 5},
            ["kv_load_failure_policy: not a known key", "prot: not a known key"],
        ),
    ],
)
def test_an_extra_config_of_vllm_that_contradicts_or_is_none_is_refused(
    given: str, extra: Any, said: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"kv_connector": given, "kv_connector_extra_config": extra})
    assert len(caught.value.faults) == len(said)
    assert all(each in str(caught.value) for each in said)


@pytest.mark.parametrize(
    ("given", "extra", "connector"),
    [
        (None, None, "lookup"),  # what vLLM leaves out is written as null
        ("lookup", {}, "lookup"),
        ("KvplugConnector", {}, "lookup"),
        ("KvplugConnector", {"connector": "multi"}, "multi"),
        ("MyOwnSubclassOfIt", {"connector": "multi"}, "multi"),
    ],
)
def test_the_connector_is_kvplugs_name_not_vllms_class(given: str | None, extra: Any, connector: str) -> None:
    data = {"kv_connector": given, "kv_role": None, "kv_rank": None, "engine_id": None}
    config = Config.from_dict({**data, "kv_connector_extra_config": extra})
    assert (config.connector, config.role) == (connector, None)


def test_faults_in_vllms_json_are_told_in_its_own_words() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(
            {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_prodcer",
                "kv_prt": 3,
                "timeout_s": 3,
                "kv_connector_extra_config": {"transprt": "cpu", "buffer_size": "much"},
            }
        )
    text = str(caught.value)
    for part in (
        "kv_connector: 'NixlConnector' was given",
        "role: 'kv_prodcer' was given; allowed is one of producer, consumer or both (or none); did you mean",
        "[kv_role]",
        "kv_prt: not a key of vLLM's kv-transfer-config; did you mean 'kv_port'?",
        "timeout_s: not a key of vLLM's kv-transfer-config; kvplug's own keys go into",
        "transprt: not a known key; did you mean 'transport'?",
        "buffer_size: 'much' was given",
    ):
        assert part in text
