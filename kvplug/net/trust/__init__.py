"""Authentication: secrets, the challenge, proven connections, and the channel on top of them."""
