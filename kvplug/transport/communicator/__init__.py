"""The device communicator: the ABC, and the comparison of calls before each collective."""

from kvplug.transport.communicator.all2all import All2AllManager
from kvplug.transport.communicator.communicator import DeviceCommunicator
from kvplug.transport.communicator.point_to_point import RecvOp, SendOp
from kvplug.transport.communicator.tokens import TokenSplit

__all__ = ["All2AllManager", "DeviceCommunicator", "RecvOp", "SendOp", "TokenSplit"]
