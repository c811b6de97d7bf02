"""Transports, a store and a connector within one process: examples, fakes, and first subjects of the suites.

A config names them ``memory``; ``auto`` never selects them.
"""
