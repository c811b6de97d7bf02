"""Memory that processes of one host share: anonymous, sealed, and passed on by descriptor."""
