"""In-process transports that keep every law they can: examples, and the first subjects of the suites.

Every author's fakes, too. A config names them ``memory``; ``auto`` never considers one.
"""
