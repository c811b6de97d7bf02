"""Config + Registry -> a device communicator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvplug.assembly.making import made
from kvplug.assembly.queues import choose_queue
from kvplug.assembly.registry import Registry
from kvplug.assembly.resolve import ResolvedConfig, choose_transport, credentials_of, must_authenticate
from kvplug.config import Config
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.transport.capabilities import Requirements
from kvplug.transport.communicator import DeviceCommunicator
from kvplug.transport.context import CommunicatorContext
from kvplug.transport.group.group import StatelessGroup
from kvplug.transport.spec import Kind, TransportSpec


@NamedExhaustion("building a device communicator")
def build_communicator(
    config: Config,
    group: StatelessGroup,
    *,
    device: str | None = None,
    device_group: Any = None,
    unique_name: str = "",
    ranks: Iterable[int] | None = None,
    global_world_size: int | None = None,
    data_parallel_size: int = 1,
    all2all_backend: str = "",
    registry: Registry | None = None,
) -> DeviceCommunicator:
    """This rank's end of the device communicator that the config's ``communicator`` names.

    All ranks of the group call it. ``device`` defaults to the config's; the other arguments are those of
    :class:`~kvplug.transport.context.CommunicatorContext`.

    Raises:
        ConfigError: the options are wrong; every fault at once.
        UnknownTransportError, AmbiguousNameError: no plugin offers the name, or two do.
        PluginError: the named one cannot work here, or none is installed for "auto".
        InsecureAddressError: other hosts can reach the config's host, and there is no secret.
        TimeoutError, PeerGoneError: a rank did not join, or is gone; names it.
        ResourceExhaustedError: the process has no free descriptor, thread or memory for it.
    """
    device = config.device if device is None else device
    resolved = ResolvedConfig.to_build(config, registry)
    resolved.check(keys=("communicator",))
    spec = choose_communicator(resolved, device)
    context = CommunicatorContext(
        options=resolved.options_of(spec),
        credentials=credentials_of(config),
        host=config.host,
        group=group,
        device_group=device_group,
        device=device,
        unique_name=unique_name,
        ranks=ranks,
        global_world_size=global_world_size,
        data_parallel_size=data_parallel_size,
        all2all_backend=all2all_backend,
        timeout_s=config.timeout_s,
    )
    return made(spec.called, DeviceCommunicator, spec.load_factory(), context)


def choose_communicator(resolved: ResolvedConfig, device: str) -> TransportSpec:
    """The communicator that the config names, for tensors of that device. Raises as ``choose_transport``."""
    config = resolved.config
    required = Requirements(device=device.partition(":")[0], authenticated=must_authenticate(config))
    return choose_transport(resolved, Kind.COMMUNICATOR, config.communicator, required)


def worker_transports(config: Config, registry: Registry | None = None) -> dict[str, str]:
    """Names of the ``"queue"`` and the ``"communicator"`` that an engine of several workers gets.

    Each is the one that the config names, or what "auto" means here. For programs that should fail before
    they spend minutes on loading a model, and that show what is used.

    Raises:
        ConfigError: the options are wrong; every fault at once.
        UnknownTransportError, AmbiguousNameError: no plugin offers a name, or two do.
        PluginError: one cannot work here; with every reason.
    """
    resolved = ResolvedConfig(config, Registry.from_env() if registry is None else registry)
    resolved.check(keys=("queue", "communicator"))
    queue, wrapper = choose_queue(resolved)
    return {
        "queue": queue.name if wrapper is None else f"{wrapper.spec.name}, around {queue.name}",
        "communicator": choose_communicator(resolved, config.device).name,
    }
