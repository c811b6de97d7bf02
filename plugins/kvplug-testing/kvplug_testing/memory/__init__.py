"""In-process transports that keep every law they can, written to be read: the suites' first subjects.

Every author's fakes, too. A config names them ``memory``; ``auto`` never considers one.
"""
