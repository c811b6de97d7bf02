"""What the header says that NVIDIA's package ships: read with as little of C as it takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

_COMMENT: Final = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_CONTINUED: Final = re.compile(r"\\\n")


class Prototype(NamedTuple):
    returns: str
    takes: tuple[str, ...]


class Header:
    """``nccl.h`` and the headers beside it, without comments and line continuations."""

    def __init__(self, folder: Path) -> None:
        files = [folder / "nccl.h", *sorted((folder / "nccl_device").glob("*.h"))]
        raw = "\n".join(file.read_text(encoding="utf-8") for file in files)
        self.text = _COMMENT.sub(" ", _CONTINUED.sub(" ", raw))

    def macro(self, name: str) -> str:
        found = re.search(rf"#define\s+{name}\s+(.*)", self.text)
        assert found, f"the header defines no {name}"
        return found[1].strip()

    def number(self, name: str) -> int:
        return int(self.macro(name), 0)

    def macros(self, prefix: str) -> dict[str, int]:
        found = re.findall(rf"#define\s+({prefix}\w+)\s+(0x[0-9a-fA-F]+|\d+)\s*$", self.text, re.MULTILINE)
        return {name: int(value, 0) for name, value in found}

    def enum(self, name: str) -> dict[str, int]:
        """The members that have a number written beside them."""
        found = re.search(rf"typedef enum\s*{{([^}}]*)}}\s*{name}\s*;", self.text)
        assert found, f"the header has no {name}"
        members = re.findall(r"(\w+)\s*=\s*(\d+)\s*(?:,|#|$)", found[1].strip())
        return {key: int(value, 0) for key, value in reversed(members)}  # the first, where #else has another

    def struct(self, name: str) -> list[tuple[str, str]]:
        """Names and types of the fields; ``[n]`` is part of the type."""
        found = re.search(rf"typedef struct \w*\s*{{([^}}]*)}}\s*{name}\s*;", self.text)
        if found is None:
            found = re.search(rf"struct {name.removesuffix('_t')}\s*{{([^}}]*)}}\s*;", self.text)
        assert found, f"the header has no {name}"
        fields = []
        for line in filter(None, (each.strip() for each in found[1].split(";"))):
            kind, star, field, length = re.fullmatch(r"(.*?)\s*(\**)\s*(\w+)\s*(\[\w+\])?", line).groups()  # type: ignore[union-attr]
            fields.append((field, _spelt(f"{kind}{star}") + (length or "")))
        return fields

    def initialiser(self, name: str) -> list[str]:
        found = re.search(
            rf"#define\s+{name}\s*{{([^}}]*)}}", re.sub(r"NCCL_VERSION\([^()]*\)", "_", self.text)
        )
        assert found, f"the header has no {name}"
        return [value.strip() for value in found[1].split(",") if value.strip()]

    def prototypes(self) -> dict[str, Prototype]:
        """Functions called ``nccl...``, with the types of what they take."""
        pattern = r"(const char\s*\*|ncclResult_t|void)\s+(?:__host__\s+)?(nccl\w+)\s*\(([^()]*)\)\s*;"
        found = {}
        for returns, name, arguments in re.findall(pattern, self.text):
            takes = [_type_of(each) for each in arguments.split(",") if each.strip() not in ("", "void")]
            found[name] = Prototype(_spelt(returns), tuple(takes))
        return found


def _type_of(argument: str) -> str:
    """``const void* sendbuff``: ``void*``. What is constant does not show in a call. Some have no name."""
    kind = re.sub(r"\w+\s*$", "", argument.strip())
    return _spelt(kind if kind.strip() else argument)


def _spelt(kind: str) -> str:
    return re.sub(r"\s*\*", "*", " ".join(re.sub(r"\bconst\b", " ", kind).split()))
