"""CPU memory as a device of the plugin "pynccl", over the fake NCCL."""

from __future__ import annotations

from kvplug_lab.gpu import host
from kvplug_pynccl import device
from kvplug_pynccl.communicator.communicator import PyncclCommunicator


class HostDevice(host.HostDevice, device.Device):
    """The device for a pipe or communicator under test."""


class HostCommunicator(PyncclCommunicator):
    """Accepts CPU tensors."""

    devices = frozenset({"cpu"})
