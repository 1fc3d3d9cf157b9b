"""Runs plans: the only mutable state, the only devices."""

from . import control as control  # registers branches and loops with torch
