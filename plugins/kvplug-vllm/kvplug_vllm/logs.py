"""Sends kvplug's log lines through vLLM's handlers, which vLLM gives to its own logger only."""

from __future__ import annotations

import logging

from kvplug import Registry
from kvplug.engine import CommandSpec

_VLLM = "vllm"


def join_vllm(registry: Registry) -> None:
    """Make kvplug and all its plugins log through vLLM's handlers, at vLLM's level.

    Without a handler, Python prints only the text of warnings on stderr, and nothing below that level. A
    logger with a handler or a level is not changed. If vLLM's logging is not configured, no logger is
    changed.
    """
    theirs = logging.getLogger(_VLLM)
    targets = (spec.target if isinstance(spec, CommandSpec) else spec.factory for _, spec in registry)
    packages = (target.partition(":")[0].partition(".")[0] for target in targets)
    for name in sorted({"kvplug", "kvplug_vllm", *packages}):
        logger = logging.getLogger(name)
        if theirs.handlers and not logger.handlers and logger.level == logging.NOTSET:
            logger.handlers = list(theirs.handlers)
            logger.setLevel(theirs.level)
            logger.propagate = False
