"""The composition root: the only package that resolves names to objects.

It turns a Config and a Registry into a connector side, a pipe, a message queue, a lookup buffer or a device
communicator. Every lower package receives its dependencies as arguments.
"""
