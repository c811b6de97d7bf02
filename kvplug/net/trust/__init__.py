"""Who may talk to whom: secrets, the challenge, proven connections, and the channel on top of them."""
