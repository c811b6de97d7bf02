"""What a listener tells a doctor: facts of its host, what is wrong there, and the rate of a pipe."""
