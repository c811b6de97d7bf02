"""ring.c under gcc's sanitizers, and on another processor: in two threads of C, and in tests of this plugin.

AddressSanitizer and UndefinedBehaviorSanitizer run in Python, whose allocator they replace (``LD_PRELOAD``);
ThreadSanitizer, which must see every access of both threads, in ring_driver.c only.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

import kvplug_shm
import ring_library

pytestmark = [pytest.mark.full, pytest.mark.timeout(500)]

HERE: Final = Path(__file__).parent
MEMORY: Final = "address,undefined"
THREAD: Final = "thread"
DEBUG: Final = ("-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined", "-Wno-tsan")
SECONDS, ROUNDS, SEED = "5", "20", "1"
"""How long the driver runs at least. Round 15 has messages that are stored past the caches."""
ARM: Final = ("aarch64-linux-gnu-gcc", "qemu-aarch64-static")
TESTS: Final = {
    "test_shm_native.py": "",
    "test_shm_pipe_contract.py": "arrive or blocks",
    "test_shm_pipe_hostile.py": "",
    "test_shm_pipe_streams.py": "",
    "test_shm_queue_hostile.py": "",
    "test_shm_queue_ring.py": "",
}
"""Tests of this folder that move bytes through a ring or lie in its words, and which of them."""


def gcc(sanitizer: str) -> str:
    """The path of gcc. Skips the test, with the reason, where its programs with this sanitizer do not run."""
    found = shutil.which("gcc")
    why = "there is no gcc" if found is None else cannot_run(found, sanitizer)
    if why:
        pytest.skip(why)
    assert found is not None
    return found


@functools.cache
def cannot_run(compiler: str, sanitizer: str) -> str:
    """Why a program with this sanitizer does not run; empty: it does."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "program.c"), Path(folder, "program")
        source.write_text("int main(void) { return 0; }\n", encoding="ascii")
        command = [compiler, f"-fsanitize={sanitizer}", "-o", str(program), str(source)]
        for step in (command, [str(program)]):
            done = subprocess.run(step, capture_output=True, text=True, check=False, timeout=60)
            if done.returncode:
                return f"gcc -fsanitize={sanitizer} cannot be used: {(done.stderr.strip() or done)!s:.300}"
    return ""


def two_threads_use_a_ring(folder: Path, compiler: str, flags: Sequence[str], *emulator: str) -> None:
    program, ring = folder / "driver", f'-DRING_C="{ring_library.SOURCE}"'
    command = [compiler, "-std=c11", "-fno-strict-aliasing", *flags, ring]
    command += ["-o", str(program), str(HERE / "ring_driver.c"), "-lpthread"]
    subprocess.run(command, check=True, timeout=120)
    env = {**os.environ, "ASAN_OPTIONS": "", "TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": ""}
    command = [*emulator, str(program), SECONDS, ROUNDS, SEED]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr or done.returncode


@pytest.mark.parametrize("sanitizer", [THREAD, MEMORY])
def test_two_threads_use_a_ring_without_a_fault(sanitizer: str, tmp_path: Path) -> None:
    two_threads_use_a_ring(tmp_path, gcc(sanitizer), [*DEBUG, f"-fsanitize={sanitizer}"])


def test_two_threads_use_a_ring_on_another_processor(tmp_path: Path) -> None:
    """The emulator runs both threads at once, and orders memory at least as strongly as this processor."""
    compiler, emulator = map(shutil.which, ARM)
    if compiler is None or emulator is None:
        pytest.skip("needs " + " and ".join(ARM) + ": apt-get install gcc-aarch64-linux-gnu qemu-user-static")
    two_threads_use_a_ring(tmp_path, compiler, ["-O2", "-static", "-Wall", "-Wextra", "-Werror"], emulator)


@pytest.mark.parametrize("tests", TESTS)
def test_tests_of_this_plugin_make_no_fault_in_memory(
    tests: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """They run with a copy of the package whose ring.c is built with sanitizers."""
    compiler = gcc(MEMORY)
    preloaded = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    package = tmp_path / "packages" / "kvplug_shm"
    shutil.copytree(Path(kvplug_shm.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    ring_library.build(package / "native", flags=(*DEBUG, f"-fsanitize={MEMORY}"))
    reports = tmp_path / "reports"
    reports.mkdir()
    path = [str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        **os.environ,
        "LD_PRELOAD": preloaded,
        "PYTHONPATH": os.pathsep.join(path),
        # Python keeps memory until it ends, which is no leak; freed memory is kept a little while only.
        "ASAN_OPTIONS": f"detect_leaks=0:quarantine_size_mb=16:log_path={reports / 'address'}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={reports / 'undefined'}",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-c", str(pytestconfig.inipath)]
    command += ["--rootdir", str(pytestconfig.rootpath), "-k", TESTS[tests], str(HERE / tests)]
    command += ["-m", "not slow and not variant and not mutant and not timing"]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400
    )
    found = "\n".join(each.read_text(errors="replace") for each in sorted(reports.iterdir()))
    assert not found
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert "no compiled steps" not in done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 5, done.stdout[-1000:]
