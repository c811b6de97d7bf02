"""Each side states what it is; a pure function says what they agree on, or every reason why not.

:mod:`~kvplug.negotiation.handshake.hello` is the statement,
:mod:`~kvplug.negotiation.handshake.agreement` the function,
:mod:`~kvplug.negotiation.handshake.exchange` carries both over an authenticated channel.
"""
