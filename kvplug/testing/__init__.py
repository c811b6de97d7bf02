"""What tests of kvplug, of its plugins and of yours are written with: public, shipped, light to import.

:mod:`~kvplug.testing.peers` runs a test's functions in real child processes and finds what they leave
behind; :mod:`~kvplug.testing.corrupt` wraps a pipe and flips bits.
"""
