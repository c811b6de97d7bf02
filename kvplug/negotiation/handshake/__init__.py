"""Each side states its facts; a pure function computes their agreement, or every reason against one.

:mod:`~kvplug.negotiation.handshake.hello` is the statement,
:mod:`~kvplug.negotiation.handshake.agreement` the function,
:mod:`~kvplug.negotiation.handshake.exchange` carries both over an authenticated channel.
"""
