"""Build an sdist and a wheel of the core, of every plugin and of the examples, and check their content.

Usage: packages.py FOLDER (emptied first). Exit code 1 and one line for each fault.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECTS = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
EXAMPLES = sorted(path.parent for path in ROOT.glob("docs/examples/*/pyproject.toml"))


def faults_of(project: Path, dist: Path) -> Iterator[str]:
    metadata = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module = metadata["name"].replace("-", "_")
    stem = f"{module}-{metadata['version']}"
    (path,) = dist.glob(f"{stem}-py3-none-*.whl")
    compiled = not path.name.endswith("-any.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        headers = Parser().parsestr(wheel.read(f"{stem}.dist-info/METADATA").decode())
    for name in names:
        if name.partition("/")[0] not in (module, f"{stem}.dist-info"):
            yield f"{stem}: the wheel holds {name}"
        if "__pycache__" in name or ("/tests/" in name and "/templates/" not in name):
            yield f"{stem}: the wheel holds {name}"
    in_tree = {
        str(path.relative_to(project))
        for path in (project / module).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    if missing := in_tree - set(names):
        yield f"{stem}: the wheel lacks {', '.join(sorted(missing))}"
    if compiled != any(name.endswith(".so") for name in names):
        yield f"{stem}: {path.name} is the wrong name for what it holds"
    if f"{module}/py.typed" not in names:
        yield f"{stem}: no py.typed"
    if not (metadata.get("scripts") or metadata.get("entry-points")):
        yield f"{stem}: no entry points"
    if f"{stem}.dist-info/entry_points.txt" not in names:
        yield f"{stem}: entry points are not in the wheel"
    if project == ROOT and not any(name.endswith("/LICENSE") for name in names):
        yield f"{stem}: no licence text"
    if headers["License-Expression"] != "Apache-2.0":
        yield f"{stem}: License-Expression is {headers['License-Expression']}"
    if headers["Requires-Python"] != ">=3.11":
        yield f"{stem}: Requires-Python is {headers['Requires-Python']}; no upper bound, not below 3.11"
    if not headers.get_payload():
        yield f"{stem}: no long description"
    with tarfile.open(dist / f"{stem}.tar.gz") as sdist:
        inside = {name.partition("/")[2].partition("/")[0] for name in sdist.getnames()}
    if not {"pyproject.toml", "README.md", module} <= inside:
        yield f"{stem}: the sdist holds only {sorted(inside)}"
    if strays := inside & {".tox", ".venv", ".git", "plugins", "docs", ".hypothesis"}:
        yield f"{stem}: the sdist holds {', '.join(sorted(strays))}"


def main(folder: str) -> int:
    dist = Path(folder)
    shutil.rmtree(dist, ignore_errors=True)
    faults = []
    for project in [*PROJECTS, *EXAMPLES]:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(project)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        faults += faults_of(project, dist)
    print(*sorted(path.name for path in dist.iterdir()), sep="\n")
    print(*faults, sep="\n", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
