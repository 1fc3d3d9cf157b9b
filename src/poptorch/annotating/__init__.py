"""What users write into a model: blocks, strategies, groups of replicas, notes."""
