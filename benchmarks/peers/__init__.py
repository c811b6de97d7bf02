"""Ends of alternatives to kvplug's shared memory, for the harness of ``kvplug bench``."""
