"""The interface of a connector: two ABCs, and the plain values that pass between engine and connector."""
