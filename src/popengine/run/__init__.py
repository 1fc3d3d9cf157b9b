"""Runs plans: the only mutable state, the only devices."""
