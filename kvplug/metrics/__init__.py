"""What was moved, how fast, and what failed for which reason: counted in one place, shown in many."""
