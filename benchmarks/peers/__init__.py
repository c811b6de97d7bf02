"""Ends of what users would pick instead of kvplug's shared memory, for the harness of ``kvplug bench``."""
