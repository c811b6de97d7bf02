"""The program ``kvplug``, in children of a process that has imported what it needs: a fresh interpreter takes
half a second for that, and five where a command needs torch.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvplug_lab.installed_site import Site
from kvplug_testing.forkserver import ForkServer


class Programs(Site):
    """Packages of plugins, and runs of the program with them."""

    def kvplug(
        self, *arguments: str, timeout_s: float = 60.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        done = self.forked("kvplug_lab.installed_site:run_program", list(arguments), environment, timeout_s)
        return subprocess.CompletedProcess(arguments, *done)


@pytest.fixture
def site(tmp_path: Path, fork_server: ForkServer) -> Programs:
    return Programs(tmp_path, lambda: fork_server)


HEADER = """\
from kvplug.engine import CommandSpec, ConnectorSpec, SinkSpec
from kvplug.transport import Capabilities, StoreSpec, TransportSpec, hookimpl
KVPLUG_API = (1, 0)
"""
BIRDS = (
    HEADER
    + """
@hookimpl
def kvplug_transports():
    return [
        TransportSpec(kind="pipe", name="carrier-pigeon", factory="kvplug_birds.heavy:Endpoint",
                      options="kvplug_birds.light:Options", probe="kvplug_birds.light:describe",
                      summary="Tensors by air", capabilities=Capabilities(
                          devices={"cpu", "cuda"}, cross_host=True, authenticated=False,
                          cost=Capabilities.Cost(latency_us=9e9, gb_per_s=0.5))),
        TransportSpec(kind="queue", name="flock", factory="kvplug_birds.heavy:Queue",
                      probe="kvplug_birds.light:no_luck"),
        TransportSpec(kind="communicator", name="swarm", factory="kvplug_birds.heavy:Comm",
                      probe="kvplug_birds.light:crash"),
    ]

@hookimpl
def kvplug_connectors():
    return [ConnectorSpec(name="letter", factory="kvplug_birds.heavy:S", worker_factory="a:b")]

@hookimpl
def kvplug_stores():
    return [StoreSpec(name="nest", factory="kvplug_birds.heavy:Store")]

@hookimpl
def kvplug_sinks():
    return [SinkSpec(name="paper", factory="kvplug_birds.heavy:Sink")]

@hookimpl
def kvplug_commands():
    return [CommandSpec(name=name, target="kvplug_birds.heavy:" + name, summary="Make a sound: " + name)
            for name in ("coo", "fail", "odd", "lost")]
"""
)
LIGHT = """
import attrs
from kvplug.transport import Probe, option

@attrs.frozen(kw_only=True)
class Options:
    birds: int = option(2, help="How many fly at once.", at_least=1)
    message_bytes: int = option(2**20, help="What one carries.", unit="bytes")
    rest_s: float = option(0.5, help="Between flights.", unit="seconds")

def describe():
    return Probe(domain="sky")

def no_luck():
    return Probe(viable=False, reason="it is night")

def crash():
    raise OSError("window closed")
"""
HEAVY = """
import click
open(__file__ + ".loaded", "w").close()

class Endpoint:
    pass

@click.command()
@click.argument("what", default="coo")
def coo(what):
    "Make a sound."
    click.echo(what)

@click.command()
def fail():
    from kvplug import PeerGoneError
    raise PeerGoneError("the cat came")

odd = "not a command"
"""


class Birds(Programs):
    """With a plugin that offers something of each kind."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        super().__init__(folder, lambda: server)
        files = {"light.py": LIGHT, "heavy.py": HEAVY}
        self.package = self.add("birds", BIRDS, version="0.7", files=files)

    def add_bad(self) -> None:
        """Another plugin, which does not load."""
        self.add("bad", HEADER + "import a_module_that_is_not_there")


@pytest.fixture
def birds(tmp_path: Path, fork_server: ForkServer) -> Birds:
    return Birds(tmp_path, fork_server)
