"""Peers that have proved their identity and send false messages: a relay makes the messages false.

- :mod:`~kvplug_testing.tampering.relay`: carries connections, records what is sent, and changes it
- :mod:`~kvplug_testing.tampering.lies`: false values, frames and bytes in what is sent
- :mod:`~kvplug_testing.tampering.victim`: the process that receives them, and changes of shared memory
"""
