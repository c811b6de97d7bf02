"""Two hosts within this one: :class:`~kvplug_testing.hosts.pair.HostPair` starts processes on either.

A host is a set of Linux namespaces. Its processes see no process, shared memory, abstract socket or loopback
address of the other, and another boot id; a network link joins the two. Only the clock, the kernel and the
files are shared. It needs root, or a system that lets users make user namespaces.
"""
