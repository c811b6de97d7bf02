"""The interface of a connector: two ABCs, and the plain values that engine and connector exchange."""
