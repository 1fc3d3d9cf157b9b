"""Marks that users add to a model: blocks, strategies, groups of replicas."""
