"""Transports and a store within one process: examples, fakes, and first subjects of the suites.

A config names them ``memory``; ``auto`` never selects them.
"""
