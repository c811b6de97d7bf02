"""Stores that keep each page in a file of its own: the files, their totals, eviction, and the store."""
