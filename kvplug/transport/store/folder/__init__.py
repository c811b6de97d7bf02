"""Stores that keep each page in a file of its own: the files, their count, room for more, and the store."""
