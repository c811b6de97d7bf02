"""How bytes and processes meet: wire format, trust, liveness, deadlines, forks, checksums, streams."""
