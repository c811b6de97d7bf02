"""Each side states what it is; a pure function says what they agree on, or every reason why not.

:mod:`~kvplug.handshake.hello` is the statement, :mod:`~kvplug.handshake.agreement` the function,
:mod:`~kvplug.handshake.exchange` carries both over an authenticated channel.
"""
