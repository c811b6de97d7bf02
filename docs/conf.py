"""Sphinx configuration. Warnings are errors (tox run -e docs)."""

from __future__ import annotations

from importlib.metadata import version as version_of

project = "kvplug"
author = "The kvplug developers"
copyright = "The kvplug developers. Apache-2.0"
release = version = version_of("kvplug")

extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4  # so that pages can link to each other's sections
exclude_patterns = ["_build", "examples", "**/tests", "README.md"]

html_theme = "furo"
html_title = f"kvplug {release}"
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
