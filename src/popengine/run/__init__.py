"""Runs plans: the only mutable state, the only devices."""

from .backends import (
    run_branches_and_loops as run_branches_and_loops,
)  # registers branches and loops with torch
