"""What several examples need: flags and named configs, log lines, checkpoints, and the rows of each global batch."""
