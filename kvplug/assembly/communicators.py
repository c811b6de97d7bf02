"""Config + Registry -> a device communicator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvplug.assembly.making import made
from kvplug.assembly.registry import Registry
from kvplug.assembly.resolve import ResolvedConfig, choose_transport, credentials_of, must_authenticate
from kvplug.config import Config
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.transport.capabilities import Requirements
from kvplug.transport.communicator import DeviceCommunicator
from kvplug.transport.context import CommunicatorContext
from kvplug.transport.group.group import StatelessGroup
from kvplug.transport.spec import Kind


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
    required = Requirements(device=device.partition(":")[0], authenticated=must_authenticate(config))
    spec = choose_transport(resolved, Kind.COMMUNICATOR, config.communicator, required)
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
