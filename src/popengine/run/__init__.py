"""Runs plans: the only mutable state, the only devices."""

# Registers branches and loops with torch.
from .backends import run_branches_and_loops as run_branches_and_loops
