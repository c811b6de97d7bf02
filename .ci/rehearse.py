"""Rehearse a release: install what was built as users would, and use it.

Usage: rehearse.py DIST

DIST is what packages.py has made. A package index on this host has those files and nothing else. The lines of
the README that install kvplug from an index run in an empty folder; what they take from elsewhere comes from
the index that pip is configured with. Then the installed program and plugins are used, another environment
gets the sdists, and the conformance kit judges the kept plugins. It takes minutes, and 3 GB as long as it
runs. Exit code 1 at the first fault.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from packages import EXAMPLES, PROJECTS, ROOT, metadata_of, stem_of

COMPILED = {"kvplug": "transport/store/_pages.so", "kvplug-shm": "native/_ring.so"}
"""Packages with compiled code, and where it is."""
LIMIT_S = 1200
"""For installing; everything else takes less."""


class ReleaseError(Exception):
    """What is wrong with the release."""


# -- an index ----------------------------------------------------------------------------------------


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the folder, and notes what was taken."""

    def __init__(self, *arguments: Any, taken: list[str], **more: Any) -> None:
        self._taken = taken
        super().__init__(*arguments, **more)

    def do_GET(self) -> None:
        self._taken.append(self.path.rpartition("/")[2])
        super().do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing: pip asks here for packages of others as well."""


@contextmanager
def index_of(dist: Path, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A package index (PEP 503) of these files: its address, and the names of files taken from it."""
    for project in PROJECTS:
        name, stem = metadata_of(project)["name"], stem_of(project)
        page = folder / "simple" / name
        page.mkdir(parents=True)
        links = []
        for file in sorted(dist.glob(f"{stem}[-.]*")):
            (page / file.name).symlink_to(file)
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            links.append(f'<a href="{file.name}#sha256={digest}">{file.name}</a><br>')
        if len(links) < 2:
            raise ReleaseError(f"{name}: {len(links)} files in {dist}, and not a wheel and an sdist")
        (page / "index.html").write_text("<!DOCTYPE html>\n" + "\n".join(links))
    taken: list[str] = []
    handler = partial(Handler, directory=str(folder), taken=taken)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple/", taken
        finally:
            server.shutdown()
            thread.join(10)


def environment(index: str) -> dict[str, str]:
    """For pip: this index beside those that it is configured with, and the versions that the tests have."""
    keep = {
        name: value for name, value in os.environ.items() if not name.startswith(("KVPLUG_", "PYTHON", "TOX"))
    }
    keep.pop("VIRTUAL_ENV", None)
    configured = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.extra-index-url"],
        capture_output=True,
        text=True,
        check=False,
    )
    beside = os.environ.get("PIP_EXTRA_INDEX_URL") or configured.stdout
    return keep | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PIP_EXTRA_INDEX_URL": " ".join([index, *beside.split()]),
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_COMPILE": "1",
        "PIP_QUIET": "1",
    }


# -- the README --------------------------------------------------------------------------------------


def lines_of_the_readme() -> list[str]:
    """The lines that install kvplug from an index, and make the environment.

    Raises:
        ReleaseError: a package is missing there.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"(?m)(?:^    .*\n)+", readme)
    (block,) = [block for block in blocks if "pip install kvplug" in block]
    lines = [line.partition("#")[0].strip() for line in block.splitlines()]
    named = set(re.findall(r"kvplug(?:-[a-z0-9-]+)?", " ".join(lines)))
    if missing := {metadata_of(project)["name"] for project in PROJECTS} - named:
        raise ReleaseError(f"the README installs no {', '.join(sorted(missing))}")
    return lines


def programs_of_the_readme() -> tuple[str, str]:
    """The two ends of "From Python"."""
    section = (
        (ROOT / "README.md").read_text(encoding="utf-8").partition("## From Python")[2].partition("\n## ")[0]
    )
    one, other = re.findall(r"(?s)```python\n(.*?)```", section)
    return one, other


# -- the rehearsal -----------------------------------------------------------------------------------


def run(*command: str | Path, env: Mapping[str, str], cwd: Path, limit_s: float = 180) -> str:
    done = subprocess.run(
        command, env=env, cwd=cwd, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode:
        shown = " ".join(map(str, command))
        raise ReleaseError(
            f"{shown}: exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def say(text: str, began: float) -> None:
    print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True)


def check_what_is_installed(python: Path, taken: list[str], env: Mapping[str, str], cwd: Path) -> None:
    """Every package is there in its version, and its wheel came from our index."""
    code = "import json; from importlib.metadata import distributions as every"
    code += "; print(json.dumps({each.name: each.version for each in every()}))"
    installed = json.loads(run(python, "-c", code, env=env, cwd=cwd))
    for project in PROJECTS:
        metadata, stem = metadata_of(project), stem_of(project)
        if installed.get(metadata["name"]) != metadata["version"]:
            raise ReleaseError(f"{metadata['name']}: {installed.get(metadata['name'])} is installed")
        wheels = [name for name in taken if name.startswith(f"{stem}-") and name.endswith(".whl")]
        if not wheels:
            raise ReleaseError(
                f"{stem} did not come as a wheel of the rehearsed release: {sorted(set(taken))}"
            )
        if metadata["name"] in COMPILED and not all("manylinux" in name for name in wheels):
            raise ReleaseError(f"{stem}: {wheels} is not compiled for this host")


def check_pipe(python: Path, transport: str, env: Mapping[str, str], cwd: Path) -> None:
    """The two programs of the README, with this transport."""
    ends = [text.replace('transport="auto"', f'transport="{transport}"') for text in programs_of_the_readme()]
    one_file, other_file = cwd / "one.py", cwd / "other.py"
    one_file.write_text(ends[0])
    other_file.write_text(ends[1])
    with subprocess.Popen(
        [python, "-u", one_file],
        env=env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as one:
        watch = threading.Timer(120, one.kill)
        watch.start()
        try:
            assert one.stdout is not None
            contact = one.stdout.readline().strip()
            said = run(python, other_file, contact, env=env, cwd=cwd)
            rest = one.stdout.read()
            if one.wait() or "11." not in said:
                raise ReleaseError(f"a pipe over {transport}: {contact} {rest} {said}")
        finally:
            watch.cancel()
            one.kill()


def check_plugins(bin_: Path, env: Mapping[str, str], cwd: Path) -> list[str]:
    """`kvplug list` shows every plugin without a fault, and `kvplug check` finds none."""
    rows = json.loads(run(bin_ / "kvplug", "list", "--all", "--json", env=env, cwd=cwd))
    # What this host lacks is no fault of the release: a GPU, or the library of a store.
    failed = [row for row in rows if row["status"] not in ("ok", "unavailable")]
    if failed:
        raise ReleaseError(f"kvplug list: {failed}")
    plugins = sorted({row["plugin"] for row in rows if row["plugin"]})
    released = {
        name for each in PROJECTS for name in metadata_of(each).get("entry-points", {}).get("kvplug", {})
    }
    if missing := released - {*plugins}:
        raise ReleaseError(f"kvplug list does not show {', '.join(sorted(missing))}")
    for plugin in plugins:
        run(bin_ / "kvplug", "check", plugin, env=env, cwd=cwd)
    return plugins


def check_sdists(env: Mapping[str, str], cwd: Path) -> None:
    """Each sdist builds, in the build environment that it asks for, into what can be imported."""
    run("python3", "-m", "venv", "from-sdists", env=env, cwd=cwd)
    names = [metadata_of(project)["name"] for project in PROJECTS]
    python = cwd / "from-sdists" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--no-deps", f"--no-binary={','.join(names)}"]
    run(*pip, *names, env=env, cwd=cwd, limit_s=LIMIT_S)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(python, "-c", code, env=env, cwd=cwd).strip())
    for name, library in COMPILED.items():
        if not (packages / name.replace("-", "_") / library).is_file():
            raise ReleaseError(f"{name}: its sdist was built without {library}; is there a C compiler?")


def rehearse(dist: Path, cwd: Path) -> None:
    began = time.monotonic()
    (cwd / "index").mkdir()
    with index_of(dist, cwd / "index") as (index, taken):
        env = environment(index)
        for line in lines_of_the_readme():
            say(line, began)
            run("sh", "-euc", line, env=env, cwd=cwd, limit_s=LIMIT_S)
        bin_ = cwd / "env" / "bin"
        python = bin_ / "python"
        check_what_is_installed(python, taken, env, cwd)
        say("every package is installed, from the rehearsed files", began)
        say(run(bin_ / "kvplug", "--version", env=env, cwd=cwd).strip(), began)
        for transport in ("auto", "cpu", *(["shm"] if platform.machine() == "x86_64" else [])):
            check_pipe(python, transport, env, cwd)
            say(f"a pipe between two processes: {transport}", began)
        pip = [python, "-m", "pip", "install", "--no-deps", "--no-index"]
        examples = [path for each in EXAMPLES for path in (dist / "examples").glob(f"{stem_of(each)}-*.whl")]
        run(*pip, *examples, *sorted((ROOT / "tests" / "kept").glob("*.whl")), env=env, cwd=cwd)
        check_pipe(python, "sample", env, cwd)
        say("a pipe between two processes: sample, of the docs", began)
        say(f"kvplug check: {', '.join(check_plugins(bin_, env, cwd))}", began)
        check_sdists(env, cwd)
        say("the sdists build and install", began)
        suites = ROOT / "tests" / "kept" / "suites.py"
        command = [
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-c",
            ROOT / "pyproject.toml",
        ]
        command += ["--rootdir", ROOT, "--kvplug-level", "quick", suites]
        said = run(python, *command, env=env, cwd=cwd, limit_s=600)
        say(f"the kept plugins keep the laws: {said.strip().splitlines()[-1]}", began)


def main(dist: str) -> int:
    with tempfile.TemporaryDirectory(prefix="kvplug-release-") as folder:
        try:
            rehearse(Path(dist).resolve(), Path(folder))
        except (ReleaseError, subprocess.TimeoutExpired) as e:
            print(f"fault: {e}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
