"""A listener's answers to a doctor: facts about its host, its problems, and the rate of a pipe."""
