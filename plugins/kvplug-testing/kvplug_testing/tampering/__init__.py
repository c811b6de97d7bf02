"""Peers that have proved their identity and lie: what they say is changed on its way.

- :mod:`~kvplug_testing.tampering.relay`: carries connections, records what is said, and changes it
- :mod:`~kvplug_testing.tampering.lies`: changes of what is said: values, frames and bytes that cannot be true
- :mod:`~kvplug_testing.tampering.victim`: the process that is lied to, and changes of memory that it shares
"""
