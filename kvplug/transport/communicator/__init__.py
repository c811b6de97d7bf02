"""The device communicator: the ABC, and the comparison of calls before each collective."""

from kvplug.transport.communicator.communicator import DeviceCommunicator
from kvplug.transport.communicator.rank import CommunicatorContext

__all__ = ["CommunicatorContext", "DeviceCommunicator"]
