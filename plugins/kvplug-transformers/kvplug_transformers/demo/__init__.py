"""``kvplug demo``: prefill in one process, decode in another, check against a third.

``command`` is what click calls; ``preparation`` does the steps before the transfer, and ``runs`` the steps of
the demo. ``session`` holds the processes (``processes``); ``worker`` is the main program of the prefill and
the decode process, and ``reference`` that of the third, which never imports kvplug.
"""
