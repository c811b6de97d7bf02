"""Peers that have proved their identity and lie: what they say is changed on its way.

- :mod:`~kvplug_testing.tampering.relay`: carries connections, records what is said, and changes it
- :mod:`~kvplug_testing.tampering.edits`: the changes of a recorded conversation
- :mod:`~kvplug_testing.tampering.lies`: values and frames that cannot be true
- :mod:`~kvplug_testing.tampering.memory`: changes of memory that was handed over by descriptor
- :mod:`~kvplug_testing.tampering.victim`: the process that is lied to
"""
