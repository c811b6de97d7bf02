"""Prepare a release: set the version of every package, and write the changelog.

Usage: release.py [--check] VERSION, or release.py --tag TAG

It changes files of the checkout, and makes no commit: look at the result, commit it, and push a tag; the
commands are printed. ``--check`` prints what would change, and changes nothing. Both refuse (exit code 1) a
version that is not newer than the newest of CHANGELOG.md, a checkout with changes, and a changelog without
entries. It needs towncrier: ``tox run -e version -- VERSION`` has it. ``--tag`` says whether every package
and the changelog have the version of the tag.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
"""Three numbers. The tag of a release is the same after a ``v``."""
SIGNS = {"kvplug-bench": "==", "kvplug-testing": "~="}
"""What uses more of the core than its public names. Others require at least a version."""
NOT_YET = "not on the package index yet"


def projects_of(root: Path) -> list[Path]:
    """The folders of the packages that are released: the core first."""
    return [root, *sorted(path.parent for path in root.glob("plugins/*/pyproject.toml"))]


def parsed(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def newest_release(root: Path) -> str:
    """The newest version of the changelog; empty before the first release."""
    found = re.findall(
        rf"^## ({VERSION.pattern}) ", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.M
    )
    return max((version for version, *_ in found), key=parsed, default="")


def edits(root: Path, version: str) -> dict[Path, str]:
    """The new text of each file that names the version of a package.

    A package requires at least this version of the packages beside it, with which it was tested, or exactly
    this one, or one that differs from it in the third number.

    Raises:
        ValueError: a file does not name a version where it is expected.
    """
    new = {}
    names = {
        tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]["name"]
        for folder in projects_of(root)
    }
    required = re.compile(rf'"({"|".join(sorted(names, reverse=True))})(\[[\w,]+\])?(==|~=|>=)[\d.]+"')
    for folder in projects_of(root):
        path = folder / "pyproject.toml"
        text = path.read_text(encoding="utf-8")
        name = tomllib.loads(text)["project"]["name"]
        text, count = re.subn(r'(?m)^version = "[^"]+"$', f'version = "{version}"', text)
        if count != 1:
            raise ValueError(f"{path}: {count} lines like 'version = \"...\"' instead of one")
        sign = SIGNS.get(name, ">=")
        new[path] = required.sub(
            lambda found, sign=sign: f'"{found[1]}{found[2] or ""}{sign}{version}"', text
        )
    path = root / "kvplug" / "__init__.py"
    text, count = re.subn(
        r'(?m)^__version__ = "[^"]+"$', f'__version__ = "{version}"', path.read_text(encoding="utf-8")
    )
    if count != 1:
        raise ValueError(f"{path}: no line '__version__ = \"...\"'")
    return {**new, path: text}


def fragments_of(root: Path) -> list[Path]:
    kinds = [
        each["directory"]
        for each in tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["towncrier"]["type"]
    ]
    return sorted(path for kind in kinds for path in root.glob(f"changelog.d/*.{kind}.md"))


def refusals(root: Path, version: str) -> Iterator[str]:
    """Why this version cannot be released from this checkout, each with what to change."""
    if not VERSION.fullmatch(version):
        yield f"{version!r} is no version: give three numbers, such as 0.2.0"
        return
    released = newest_release(root)
    if released and parsed(version) <= parsed(released):
        yield f"{version} is not newer than {released}, the newest version of CHANGELOG.md"
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    if changed:
        files = ", ".join(line[3:] for line in changed[:5]) + (", ..." if len(changed) > 5 else "")
        yield f"the checkout has changes: commit them, or put them away ({files})"
    if not fragments_of(root):
        yield "changelog.d has no entries: a release without a change that users notice is none"


def faults_of_tag(root: Path, tag: str) -> Iterator[str]:
    """In what the checkout is not the version of this tag."""
    version = tag.removeprefix("v")
    if tag != f"v{version}" or not VERSION.fullmatch(version):
        yield f"{tag!r} is no tag of a release, such as v0.2.0"
        return
    if newest_release(root) != version:
        yield f"CHANGELOG.md: its newest version is {newest_release(root) or 'none'}"
    for path, text in edits(root, version).items():
        if path.read_text(encoding="utf-8") != text:
            yield f"{path.relative_to(root)}: it, or what it requires, does not have the version {version}"


def by_hand(root: Path) -> Iterator[str]:
    """What has to be written by hand before the release is pushed."""
    if "Security" not in tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"].get(
        "urls", {}
    ):
        yield "pyproject.toml: add the address of the form for weaknesses as Security to [project.urls]"
    for path in sorted([root / "README.md", *root.glob("plugins/*/README.md"), *root.glob("docs/**/*.md")]):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if NOT_YET in line:
                yield f"{path.relative_to(root)}:{number}: the page says that kvplug is {NOT_YET}"


def towncrier(root: Path, version: str, *more: str) -> str:
    command = [sys.executable, "-m", "towncrier", "build", "--version", version, *more]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"towncrier failed: {done.stderr.strip()}")
    return done.stdout


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="release.py", description="Prepare a release: versions and changelog."
    )
    parser.add_argument("version", metavar="VERSION", nargs="?", help="three numbers, such as 0.2.0")
    parser.add_argument("--tag", help="check that the checkout is what this tag says, and do nothing else")
    parser.add_argument("--check", action="store_true", help="print what would change, and change nothing")
    given = parser.parse_args(arguments)
    if (given.version is None) == (given.tag is None):
        parser.error("give a VERSION, or --tag TAG")
    refused = list(faults_of_tag(root, given.tag) if given.tag else refusals(root, given.version))
    if refused:
        print(*(f"refused: {each}" for each in refused), sep="\n", file=sys.stderr)
        return 1
    if given.tag:
        return 0
    new = edits(root, given.version)
    draft = towncrier(root, given.version, "--draft")
    if not given.check:
        towncrier(root, given.version, "--yes")
    for path, text in new.items():
        old = path.read_text(encoding="utf-8")
        print(f"{path.relative_to(root)}{':' if old != text else ' stays as it is'}")
        for was, now in zip(old.splitlines(), text.splitlines(), strict=True):
            if was != now:
                print(f"    {was.strip()}\n    -> {now.strip()}")
        if not given.check:
            path.write_text(text, encoding="utf-8")
    print("CHANGELOG.md gets what stands in changelog.d:", draft[draft.index("## ") :], sep="\n")
    remaining = list(by_hand(root))
    if remaining:
        print("By hand, before the tag is pushed:", *(f"    {each}" for each in remaining), sep="\n")
    if not given.check:
        print(
            "Then:",
            "    git diff HEAD",
            f"    git commit --all --message 'Version {given.version}'",
            f"    git tag v{given.version}",
            f"    git push origin HEAD v{given.version}    # publishes: .github/workflows/release.yml",
            sep="\n",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
