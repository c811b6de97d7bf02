"""``kvplug demo``: prefill in one process, decode in another, check against a third.

``command`` is what click calls; ``runs`` says who does what and when, after the ``preparation``; ``session``
holds the processes (``processes``); ``worker`` is the main program of the prefill and the decode process,
``reference`` that of the third, which never imports kvplug.
"""
