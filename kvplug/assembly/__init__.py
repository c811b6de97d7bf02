"""The composition root: the only room that resolves names to objects.

Config + Registry -> a connector side, a pipe, a message queue, a lookup buffer or a device communicator.
Everything below receives its dependencies as arguments.
"""
