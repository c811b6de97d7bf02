"""The device communicator: the abstract class, and the comparison of calls before each collective."""

from kvplug.transport.communicator.communicator import DeviceCommunicator

__all__ = ["DeviceCommunicator"]
