"""A stranger's package: built, installed, listed, chosen by name or by cost. The core knows nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.full

SAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "kvplug-sample"

PREFILL = """
import sys, torch, kvplug
config = kvplug.Config.from_dict({"transport": sys.argv[1], "timeout_s": 30})
with kvplug.listen_pipe(config, "unix:") as server:
    print(server.contact, flush=True)
    with server.accept(timeout=60) as pipe:
        pipe.send_tensor(torch.arange(100_000, dtype=torch.bfloat16).reshape(100, 1000))
        pipe.send_tensor(None)
        assert pipe.recv_tensor().item() == 42
        print(type(pipe.pipe).__module__, flush=True)
"""

DECODE = """
import sys, torch, kvplug
config = kvplug.Config.from_dict({"transport": sys.argv[1], "timeout_s": 30})
with kvplug.connect_pipe(config, sys.argv[2], timeout=60) as pipe:
    out = torch.empty(100, 1000, dtype=torch.bfloat16)
    pipe.recv_tensor(out=out)
    assert torch.equal(out, torch.arange(100_000, dtype=torch.bfloat16).reshape(100, 1000))
    assert pipe.recv_tensor() is None
    pipe.send_tensor(torch.tensor(42)).wait()
    print(type(pipe.pipe).__module__, flush=True)
"""


def run(*command: str | Path, **environ: str) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("KVPLUG_", "SAMPLE_"))}
    done = subprocess.run(
        command, env=env | environ, capture_output=True, text=True, timeout=100, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment: everything that is installed here, and the sample's wheel."""
    folder = tmp_path_factory.mktemp("stranger")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, SAMPLE)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    wheel = next(folder.glob("kvplug_sample-*.whl"))
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel)
    theirs = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    ours = sysconfig.get_path("purelib")
    # Not a bare path: the .pth files in there count too, should kvplug be installed in editable mode.
    Path(theirs, "what-is-installed-here.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    return python


@pytest.fixture
def prefill(python: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    transport, environ = request.param
    child = subprocess.Popen(
        [python, "-c", PREFILL, transport],
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def test_it_is_listed_after_pip_install(python: Path) -> None:
    rows = json.loads(run(python, "-m", "kvplug.cli", "list", "--json"))
    (row,) = [row for row in rows if row["name"] == "sample"]
    assert row["kind"] == "pipe"
    assert row["distribution"] == "kvplug-sample"
    assert row["status"] == "ok", row["reason"]


def test_its_options_are_printed(python: Path) -> None:
    assert "max_in_flight_bytes" in run(python, "-m", "kvplug.cli", "list", "--options", "sample")


FULL = pytest.mark.full
CHEAP = {"SAMPLE_PIPE_GB_PER_S": "1000"}


@pytest.mark.parametrize(
    ("prefill", "transport", "environ", "chosen"),
    [
        pytest.param(("auto", {}), "sample", {}, "kvplug_sample.pipe", id="by name at one end", marks=FULL),
        pytest.param(("auto", CHEAP), "auto", CHEAP, "kvplug_sample.pipe", id="auto, cheaper than ours"),
        pytest.param(
            ("auto", CHEAP), "auto", {}, "kvplug_shm.pipe.pipe", id="auto, cheap at one end only", marks=FULL
        ),
    ],
    indirect=["prefill"],
)
def test_it_moves_tensors_when_it_is_chosen(
    python: Path, prefill: subprocess.Popen[str], transport: str, environ: dict[str, str], chosen: str
) -> None:
    assert prefill.stdout is not None
    contact = prefill.stdout.readline().strip()
    assert run(python, "-c", DECODE, transport, contact, **environ).strip() == chosen
    assert prefill.stdout.read().strip() == chosen
    assert prefill.wait(30) == 0


@pytest.mark.parametrize("prefill", [("auto", {"KVPLUG_DISABLE_PLUGINS": "sample"})], indirect=True)
def test_where_one_end_lacks_it_the_refusal_says_so(python: Path, prefill: subprocess.Popen[str]) -> None:
    assert prefill.stdout is not None
    contact = prefill.stdout.readline().strip()
    with pytest.raises(AssertionError, match="HandshakeError") as refused:
        run(python, "-c", DECODE, "sample", contact)
    assert "transport sample: not installed at the peer" in str(refused.value)
