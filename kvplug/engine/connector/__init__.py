"""What an engine talks to: two ABCs and the plain values that pass between engine and connector."""
