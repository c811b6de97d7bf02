"""pages.c under gcc's sanitizers, for addresses and for undefined behaviour, in the tests of the compiled
copies."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Final

import pytest

import kvplug

pytestmark = [pytest.mark.full, pytest.mark.timeout(500)]

HERE: Final = Path(__file__).parent
PACKAGE: Final = Path(kvplug.__file__ or "").parent
SANITIZERS: Final = "-fsanitize=address,undefined"
FLAGS: Final = (
    *("-std=c11", "-O1", "-g", "-fPIC", "-shared"),
    *("-fno-strict-aliasing", "-fno-omit-frame-pointer"),
)


def gcc(folder: Path) -> str:
    """The path of gcc. Skips the test, with the reason, where its programs with sanitizers do not run."""
    found = shutil.which("gcc")
    if found is None:
        pytest.skip("there is no gcc")
    source, program = folder / "program.c", folder / "program"
    source.write_text("int main(void) { return 0; }\n", encoding="ascii")
    for step in ([found, SANITIZERS, "-o", str(program), str(source)], [str(program)]):
        done = subprocess.run(step, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            pytest.skip(f"gcc {SANITIZERS} cannot be used: {(done.stderr.strip() or done)!s:.300}")
    return found


def test_the_compiled_copies_make_no_fault_in_memory(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """In test_copy_tensors.py with a copy of the package whose pages.c is built with sanitizers."""
    compiler = gcc(tmp_path)
    preloaded = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    package = tmp_path / "packages" / "kvplug"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "_pages.so"))
    source = package / "transport" / "store" / "pages.c"
    crc = f"-DSOURCE_CRC32={zlib.crc32(source.read_bytes())}u"
    made = source.with_name("_pages.so")
    recover = "-fno-sanitize-recover=undefined"
    build = [compiler, *FLAGS, SANITIZERS, recover, crc, "-o", str(made), str(source)]
    subprocess.run(build, check=True, timeout=120)
    reports = tmp_path / "reports"
    reports.mkdir()
    env = {
        **os.environ,
        "LD_PRELOAD": preloaded,
        "PYTHONPATH": os.pathsep.join([str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONMALLOC": "malloc",  # so that the bounds of small arrays are seen
        # Python keeps memory until it ends, which is no leak; freed memory is kept a little while only.
        "ASAN_OPTIONS": f"detect_leaks=0:quarantine_size_mb=16:log_path={reports / 'address'}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={reports / 'undefined'}",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "dev"]
    command += ["-c", str(pytestconfig.inipath), "--rootdir", str(pytestconfig.rootpath)]
    command.append(str(HERE / "test_copy_tensors.py"))
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400
    )
    reported = "\n".join(each.read_text(errors="replace") for each in sorted(reports.iterdir()))
    assert not reported
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 5, done.stdout[-1000:]
