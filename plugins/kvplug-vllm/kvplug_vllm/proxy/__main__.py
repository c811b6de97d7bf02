"""The command line: ``python -m kvplug_vllm.proxy``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from kvplug_vllm.proxy.application import PATHS, Proxy, Settings

_log = logging.getLogger("kvplug_vllm.proxy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status: 1 if it cannot listen or lacks aiohttp."""
    settings = _parse(arguments)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        from aiohttp import web
    except ImportError:
        return _failed("aiohttp is not installed; vLLM's environment has it")
    if settings.host not in ("127.0.0.1", "::1", "localhost"):
        _log.warning("every program that reaches %s can use the servers behind this proxy", settings.host)

    def say(*_: object) -> None:
        _log.info("listening on http://%s:%d", settings.host, settings.port)

    try:
        web.run_app(
            Proxy(settings).application(),
            host=settings.host,
            port=settings.port,
            print=say,
            access_log=None,
            handler_cancellation=True,  # a client that is gone ends the request of the server, too
            shutdown_timeout=5.0,
        )
    except OSError as e:
        return _failed(f"cannot listen on {settings.host}, port {settings.port}: {e}")
    return 0


def _failed(text: str) -> int:
    sys.stderr.write(f"kvplug proxy: {text}\n")
    return 1


def _parse(arguments: Sequence[str] | None) -> Settings:
    defaults = Settings(prefill=(), decode=())
    parser = argparse.ArgumentParser(
        prog="python -m kvplug_vllm.proxy",
        description="Send every prompt to a prefill server, then to a decode server. For demonstrations.",
        epilog=f"Passes on {', '.join(PATHS)} and /v1/models. /health says whether a decode server is up;"
        " /status shows each server, and how many requests went where.",
    )

    def add(name: str, text: str, **more: Any) -> None:
        default = more.get("default")
        shown = "" if default is None else f" Default: {default:g}." if more.get("type") is _positive else ""
        parser.add_argument(f"--{name}", help=text + shown, **more)

    servers: dict[str, Any] = {
        "nargs": "+",
        "action": "extend",
        "metavar": "URL",
        "type": _url,
        "required": True,
    }
    add("prefill", "Servers that compute prompts, such as http://127.0.0.1:8100.", **servers)
    add("decode", "Servers that generate.", **servers)
    add("host", f"Address to listen at. Default: {defaults.host}.", default=defaults.host)
    add("port", f"Default: {defaults.port}.", type=_port, default=defaults.port)
    seconds = {
        "prefill-timeout-s": "A prefill that takes longer is left out: decode computes the prompt.",
        "silence-timeout-s": "A decode server that sends nothing for so long has failed.",
        "connect-timeout-s": "For a connection to a server.",
        "health-interval-s": "Between two health checks of a server.",
        "health-timeout-s": "A server that has not answered its health check by then gets no requests.",
    }
    for name, text in seconds.items():
        default = getattr(defaults, name.replace("-", "_"))
        add(name, text, type=_positive, default=default, metavar="SECONDS")
    add("max-body-mib", "Largest body of a request.", type=_positive, default=32.0, metavar="MIB")
    given = vars(parser.parse_args(arguments))
    for role in ("prefill", "decode"):
        given[role] = tuple(dict.fromkeys(given[role]))
    return Settings(max_body=int(given.pop("max_body_mib") * 2**20), **given)


def _url(text: str) -> str:
    try:
        url = urlsplit(text)
        is_server = (
            url.scheme in ("http", "https") and url.hostname and url.port != 0 and "@" not in url.netloc
        )
    except ValueError:
        is_server = False
    if not is_server or url.path.strip("/") or url.query or url.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} was given; expected is http://HOST:PORT, without a path")
    return f"{url.scheme}://{url.netloc}"


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} was given; expected is a port from 1 to 65535")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} was given; expected is a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
