"""C headers of a package that may be installed: as text, and as the compiler understands them."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def folder_of(package: str, file: str) -> Path | None:
    """Where an installed package has that file."""
    try:
        files = importlib.metadata.distribution(package).files or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(each.locate())).parent for each in files if each.name == file), None)


def text_of(*files: Path) -> str:
    """Without comments and line continuations."""
    raw = "\n".join(file.read_text(encoding="utf-8") for file in files).replace("\\\n", " ")
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", raw, flags=re.DOTALL)


def signature(text: str, name: str, returns: str, types: dict[str, Any]) -> list[Any]:
    """The types of what a function returns and takes; ``returns``: a pattern of what precedes its name."""
    found = re.search(rf"{returns}\s*{name}\s*\(((?:[^()]|\([^()]*\))*)\)\s*;", text)
    assert found, f"the header does not declare {name}"
    arguments = [each for each in found[2].split(",") if each.strip() not in ("", "void")]
    return [types[_kind(each)] for each in (f"{found[1]} result", *arguments)]


def _kind(argument: str) -> str:
    """``const void *src``: ``void*``. What is constant does not show in a call. Some have no name."""
    plain = re.sub(r"__dv\(.*|\bconst\b", " ", argument).strip()
    named = re.sub(r"\w+$", "", plain).strip()
    return re.sub(r"\s*\*", "*", " ".join((named or plain).split()))


def compiled(before: str, main: str, asked: Iterable[str], folder: Path, include: Path) -> list[str]:
    """What a program prints: what the code ``main`` does, and the value of each expression."""
    lines = "".join(f'printf("%lld\\n", (long long)({each}));\n' for each in asked)
    (folder / "asked.c").write_text(
        f"#include <stdbool.h>\n#include <stddef.h>\n#include <stdio.h>\n{before}\n"
        f"int main(void) {{\n{main}\n{lines}return 0;\n}}\n"
    )
    program = str(folder / "asked")
    command = ["cc", "-std=gnu11", f"-I{folder}", f"-I{include}", "-o", program, f"{program}.c"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout.split()
