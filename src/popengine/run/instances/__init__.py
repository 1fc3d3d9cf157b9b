"""Several processes: how they meet, what they agree on, how they add up."""
