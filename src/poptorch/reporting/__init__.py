"""Profiles of executors: what ran, with the tables of the plan (`reporter`)."""
