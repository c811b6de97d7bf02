"""Sphinx configuration. Warnings are errors (tox run -e docs)."""

from __future__ import annotations

from importlib.metadata import version as version_of

project = "kvplug"
author = "The kvplug developers"
copyright = "The kvplug developers. Apache-2.0"
release = version = version_of("kvplug")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4  # so that pages can link to each other's sections
exclude_patterns = ["_build", "examples", "**/tests", "README.md"]
# Types and errors that docstrings name have no pages of their own, and torch is not installed where the docs
# are built. Links between pages are checked by myst.
nitpick_ignore_regex = [("py:.*", ".*")]

autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"kvplug {release}"
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
